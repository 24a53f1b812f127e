"""docs/coming_from.md: every name and option of ours in it exists.

A page of names is read by nobody who knows them, so a renamed function or option would
have stayed in it.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest

import jaxkern

PAGE = (Path(__file__).parents[2] / "docs/coming_from.md").read_text()
QUOTED = re.compile(r"`([^`]+)`")


def rows(page: str) -> list[list[str]]:
    """The cells of its tables: theirs, ours, what differs."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in line.strip("|").split(" | ")] for line in lines]
    return [c for c in cells if c[0] != "theirs" and not c[0].startswith("---")]


def unknown(call: str) -> str:
    """What a call of the second column names and we have not; empty if nothing."""
    tree = ast.parse(call, mode="eval").body
    f = tree.func if isinstance(tree, ast.Call) else tree
    if not isinstance(f, ast.Name) or f.id not in jaxkern.__all__:
        return f"{call}: no public name"
    has = inspect.signature(getattr(jaxkern, f.id)).parameters
    given = tree.keywords if isinstance(tree, ast.Call) else []
    return "".join(f"{call}: no {k.arg}" for k in given if k.arg not in has)


@pytest.mark.parametrize(
    "library", ["tokamax", "flash-linear-attention", "Liger", "MLX", "ggml", "PyTorch"]
)
def test_a_library_has_its_table(library):
    sections = [s for s in PAGE.split("\n## ") if library in s.splitlines()[0]]
    assert len(sections) == 1 and len(rows(sections[0])) >= 8


@pytest.mark.parametrize("row", rows(PAGE), ids=lambda row: row[0].split("`")[1])
def test_what_is_ours_exists(row):
    theirs, ours, _ = row
    calls = QUOTED.findall(ours)
    assert QUOTED.findall(theirs) and calls
    assert QUOTED.sub("", ours).strip(", ") == "", "names alone stand in this column"
    assert not [said for said in map(unknown, calls) if said]


def test_no_name_of_theirs_has_two_rows():
    names = [name for theirs, *_ in rows(PAGE) for name in QUOTED.findall(theirs)]
    assert len(names) == len(set(names)) > 60


def test_what_does_not_exist_is_found():
    assert "no public name" in unknown("rmsnorm")
    assert "no epsilon" in unknown("rms_norm(..., epsilon=1e-6)")
    assert not unknown("rms_norm(..., eps=1e-6)")
