"""docs/operators.md: no origin name without a row, no row that points nowhere."""

import collections
import importlib.util
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = tomllib.loads((Path(__file__).parent / "origin_names.toml").read_text())
spec = importlib.util.spec_from_file_location("table", ROOT / "docs/operator_table.py")
assert spec is not None and spec.loader is not None
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)
ROWS = list(table.rows())


@pytest.mark.parametrize("origin", NAMES)
def test_every_origin_name_has_a_row(origin):
    found = {n for row in ROWS if row["origin"] == origin for n in row["names"]}
    assert not set(NAMES[origin]) - found


def test_no_name_has_two_rows():
    counts = collections.Counter((r["origin"], n) for r in ROWS for n in r["names"])
    assert [name for name, n in counts.items() if n > 1] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["names"][0])
def test_every_row_points_somewhere(row):
    for call in row["call"]:
        assert table.resolve(call) is not None
    if any(c.startswith("jaxkern.") for c in row["call"]):
        assert row["test"], "an operator of ours without a test"
    assert not row["test"] or (ROOT / row["test"]).is_file()
    assert row["call"] or row["note"], "not built, and no word about it"


def test_the_page_is_what_the_rows_say():
    page = (ROOT / "docs/operators.md").read_text()
    assert page == table.table(), "run python docs/operator_table.py"
