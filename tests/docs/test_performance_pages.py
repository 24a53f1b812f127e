"""docs/performance.md and its pages are what the records say.

Figures were typed into the pages before, so no check could see one that no run had
measured, nor a table without its date: now every row stands in a record, and the pages
are written from them.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import cpu_generate, cpu_ops, pages
from benchmarks._find import benchmark, names, owner
from benchmarks._records import RECORDS, SHOWN, measured, records
from benchmarks._runs import add
from benchmarks.cpu_generate import LLAMA_CPP, Speeds
from benchmarks.optim import adamw

ROOT = Path(__file__).parents[2]
ALL = list(records())
SECTIONS = [
    pytest.param(section, record, id=f"{machine}-{record['op']}-{k}")
    for machine, record in ALL
    for k, section in enumerate(record["sections"])
]


def test_the_committed_pages_are_what_the_records_say():
    written = pages.pages()
    folder = ROOT / "docs"
    on_disk = [folder / "performance.md", *(folder / "performance").glob("*.md")]
    assert {str(f.relative_to(folder)) for f in on_disk} == set(written)
    for path, text in written.items():
        same = (folder / path).read_text() == text
        assert same, f"docs/{path}: run python -m benchmarks pages"


def test_the_readme_has_some_of_the_lines_what_loses_among_them():
    text = (ROOT / "README.md").read_text()
    assert text == pages.readme(text), "README.md: run python -m benchmarks pages"
    ratios = re.findall(r"^\| H200 .* ([\d.]+) \|$", text, re.MULTILINE)
    assert len(ratios) >= 8 and sum(float(ratio) < 1 for ratio in ratios) >= 2


@pytest.mark.parametrize("section, record", SECTIONS)
def test_every_section_says_when_and_with_what(section, record):
    assert record["family"] in pages.FAMILIES
    date, versions = measured(section, record)
    assert re.fullmatch(r"2\d{3}-\d\d(-\d\d)?", date)
    assert "jax" in versions and all(versions.values())
    if "columns" in section:
        assert all(len(row) == len(section["columns"]) for row in section["rows"])
        return
    assert section["unit"] in ("us", "ms", "s", "tokens/s", "GB/s", "TFLOP/s", "MB")
    keys = [(row.get("run"), row["case"], row["pass"]) for row in section["rows"]]
    assert keys and len(set(keys)) == len(keys), "two rows of one case and pass"
    for row in section["rows"]:
        assert any(name.startswith("jaxkern") for name in row["by"])
        for figure in row["by"].values():
            if isinstance(figure, dict):
                assert figure["value"] > 0 and set(figure) <= {"value", *SHOWN}
            else:
                assert figure, "an empty figure"


def cases_of(module) -> dict[str, set[str]]:
    """{run: cases} of a benchmark; none where it is a script."""
    if module is adamw:
        return {"adamw": {f"{m}, {d}" for m in adamw.MODELS for d in adamw.WIDTHS}}
    found = getattr(module, "BENCHMARKS", None)
    if found is None and hasattr(module, "BENCHMARK"):
        found = [module.BENCHMARK]
    return {b.name: {case.name for case in b.cases} for b in found or ()}


def test_every_run_that_a_section_names_exists_with_its_cases():
    """A row whose case is written otherwise would never be replaced by a new run."""
    cases: dict[str, set[str]] = {}
    for op in names():
        found = cases_of(benchmark(op))
        assert all(owner(name)[1] == op for name in found)
        cases |= found or {op: set()}
    for machine, record in ALL:
        for section in record["sections"]:
            run = section.get("run", "goals")
            if run.startswith("cpu_ops "):
                assert list(cpu_ops.PRIMITIVES.glob(f"*/{run[8:]}.py"))
                continue
            assert run in cases, f"{machine}: {run}"
            if known := cases[run]:
                others = {row["case"] for row in section["rows"]} - known
                assert not others, f"{machine}: {run} has no case {sorted(others)}"


def run_of(case: str, seconds: float) -> dict:
    row = {"forward": seconds, "backward": 2 * seconds}
    return {
        "name": "rms_norm",
        "op": "rms_norm",
        "family": "norm",
        "machine": "h200",
        "date": "2030-01-02",
        "command": "python -m benchmarks rms_norm --peers --out DIR",
        "versions": {"jax": "9.9.9"},
        "limits": {"copy": 4e12},
        "cases": {case: {"bytes": (4e6, 8e6), "flops": (0.0, 0.0)}},
        "results": {case: {"jaxkern": row, "Liger": {"failed": "refuses"}}},
    }


def added(run: dict, tmp_path: Path) -> Path:
    folder, runs = tmp_path / "records", tmp_path / "runs"
    shutil.copytree(RECORDS, folder)
    runs.mkdir()
    (runs / f"{run['name']}.json").write_text(json.dumps(run))
    for _ in add(runs, folder):
        pass
    return folder


def test_a_new_run_takes_the_place_of_its_rows_alone(tmp_path):
    folder = added(run_of("8192x8192", 2e-6), tmp_path)
    record = json.loads((folder / "h200" / "rms_norm.json").read_text())
    section = record["sections"][0]
    rows = {(row["case"], row["pass"]): row for row in section["rows"]}
    by = rows["8192x8192", "forward"]["by"]
    assert by == {"jaxkern": {"value": 2.0, "share": 50}, "Liger": "refuses"}
    assert rows["8192x8192", "sum"]["by"]["jaxkern"] == 6.0
    assert section["date"] == "2030-01-02" and section["versions"] == {"jax": "9.9.9"}
    old = rows["16384x4096", "forward"]
    (_, before) = next(x for x in ALL if x[0] == "h200" and x[1]["op"] == "rms_norm")
    assert old["by"] == before["sections"][0]["rows"][0]["by"]
    assert old["date"] == before["sections"][0]["date"]
    assert old["versions"] == before["versions"]
    text = pages.pages(folder)["performance/norm.md"]
    assert "| 8192x8192 | forward | 2.0 (50 %) |" in text and "9.9.9" in text
    assert f"| 16384x4096 ({old['date']}) | forward | 65.4 (96 %) |" in text


def test_a_new_run_of_an_op_without_a_record_makes_one(tmp_path):
    run = run_of("8192x8192", 2e-6)
    run |= {"name": "batch_norm", "op": "batch_norm"}
    text = pages.pages(added(run, tmp_path))["performance/norm.md"]
    assert "### batch_norm" in text and "Measured 2030-01-02" in text


def test_rounds_of_a_model_become_rows_beside_their_peer(tmp_path):
    rounds = [
        {"--weights f32": Speeds(100.0, 10.0), LLAMA_CPP: Speeds(50.0, 20.0)},
        {"--weights f32": Speeds(120.0, 12.0), LLAMA_CPP: Speeds(40.0, 40.0)},
        {"--weights f32": Speeds(110.0, 11.0), LLAMA_CPP: Speeds(11.0, 10.0)},
    ]
    rows = cpu_generate.rows_of("`--weights f32`", "--weights f32", rounds)
    assert [row["by"] for row in rows] == [
        {"jaxkern": 110.0, LLAMA_CPP: 40.0},
        {"jaxkern": 11.0, LLAMA_CPP: 20.0},
    ]
    assert [row["times"] for row in rows] == [{LLAMA_CPP: 3.0}, {LLAMA_CPP: 0.5}]
    parser = cpu_generate.model_parser("cpu_generate", None)
    run = cpu_generate.run_of("cpu_generate", rows, parser.parse_args(["--peers"]))
    text = pages.pages(added(run, tmp_path))["performance/models.md"]
    assert "| `--weights f32` | prefill | 110.0 | 40.0 | 3.0 |" in text
    assert "| `--weights bf16` (2026-11) | prefill | 1018 | 345 | 2.95 |" in text


def test_a_run_without_a_date_is_refused(tmp_path):
    run = run_of("8192x8192", 2e-6)
    del run["date"]
    with pytest.raises(ValueError, match="does not say its date: measure it again"):
        added(run, tmp_path)


def test_a_headline_without_its_row_is_refused():
    record = {"op": "x", "sections": []}
    line = {"work": "w", "case": "a", "pass": "forward"}
    with pytest.raises(ValueError, match="x: no row 'a', 'forward' with a peer"):
        pages.named(record, line)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=str
)
def test_every_link_and_every_named_page_is_there(page):
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name}: {target}"
    for named in re.findall(r"\bdocs/[\w/]+\.md\b", text):
        assert (ROOT / named).exists(), f"{page.name}: {named}"
