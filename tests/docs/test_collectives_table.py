"""docs/collectives.md is what the compiled HLO says."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("t", ROOT / "docs/collectives_table.py")
assert spec is not None and spec.loader is not None
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)
FEW = "rms_norm", "dense_swiglu", "moe_weighted_reduce"


def line_of(p):
    return [x for x in table.PAGE.read_text().splitlines() if x.startswith(f"| {p} |")]


@pytest.mark.parametrize("name", FEW)
def test_some_lines_are_current(name):
    assert line_of(name) == table.lines_of(table.REGISTRY[name])


@pytest.mark.full
@pytest.mark.parametrize("p", table.operators(), ids=lambda p: p.name)
def test_every_line_is_current(p):
    assert line_of(p.name) == table.lines_of(p)


def test_every_operator_has_a_line():
    for p in table.operators():
        said = f"{p.name}: run `python -m docs.collectives_table {p.name}`."
        assert line_of(p.name), said


def test_only_the_lines_of_the_named_operators_are_made_anew(monkeypatch):
    text = table.PAGE.read_text()
    monkeypatch.setattr(table, "lines_of", lambda p: [f"| {p.name} | new |"])
    old = "\n".join(line_of("rms_norm"))
    assert table.page(["rms_norm"]) == text.replace(old, "| rms_norm | new |")
    with pytest.raises(SystemExit, match=r"no operator is called \['rms_nrom'\]"):
        table.page(["rms_nrom"])
