"""docs/apple.md: its words, its example, its counts."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.lowering.apple.test_every_op import KNOWN

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/apple.md").read_text()


def test_what_is_claimed_and_what_is_not():
    words = " ".join(PAGE.split())
    assert (
        "lowered and op-checked; numerics verified on CPU; not executed on Apple "
        "hardware" in words
    )
    for names in KNOWN.values():
        assert all(f"`{name}`" in PAGE for name in names)
    assert not re.search(r"\b(faster|tokens/s|speed-?up)\b", words)


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})


@pytest.mark.full
def test_the_counts_are_what_the_command_writes():
    spec = importlib.util.spec_from_file_location("t", ROOT / "docs/apple_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page(PAGE) == PAGE, "run python docs/apple_table.py"
