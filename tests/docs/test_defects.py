"""Each known defect of the origins has a test that its behaviour would fail."""

import re
import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DEFECTS = tomllib.loads((Path(__file__).parent / "defects.toml").read_text())


def test_every_defect_is_listed():
    assert set(DEFECTS) == {f"D{k}" for k in range(1, 39)}


@pytest.mark.parametrize("defect", DEFECTS)
def test_its_test_exists(defect):
    _, node = DEFECTS[defect]
    file, name = node.split("::")
    assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), node
