"""docs/apple.md: its words, its example, its counts."""

import importlib.util
import re
from pathlib import Path

import pytest

from jaxkern.primitives.quant.block_formats import FORMATS
from jaxkern.primitives.quant.requantize import AFFINE_CODES
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


def test_the_blocks_that_become_affine():
    """Each with the bits of its codes and of a weight, in the file and after."""
    named = {}
    for line in re.findall(r"^\| (?:I?Q|TQ).*$", PAGE, re.MULTILINE):
        names, code, group, sizes = line.strip("| ").split(" | ")
        stored, affine = sizes.rsplit(", ", 1)
        bits = int(code.split(",")[0])
        assert float(affine) == bits + 64 / int(group)  # two float32 a group
        for name in names.split(", "):
            named[name] = bits
            own = re.search(rf"\({name} ([\d.]+)\)", stored)
            size = float(own[1] if own else stored.split()[0])
            facts = FORMATS[name]
            assert abs(size - 8 * facts.bytes / facts.elements) < 0.05, name
    assert named == {name: bits for name, (_, bits) in AFFINE_CODES.items()}


@pytest.mark.full
def test_the_counts_are_what_the_command_writes():
    spec = importlib.util.spec_from_file_location("t", ROOT / "docs/apple_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page(PAGE) == PAGE, "run python docs/apple_table.py"
