"""docs/performance.md and its pages are what the records say.

Figures were typed into the pages before, so no check could see one that no run had
measured, nor a table without its date: now every row stands in a record, and the pages
are written from them.
"""

import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks import _rows, cpu_generate, cpu_ops, gpu_generate, pages
from benchmarks._find import benchmark, names, owner
from benchmarks._records import RECORDS, SHOWN, measured, records
from benchmarks._runs import add, section_of
from benchmarks.cpu_generate import LLAMA_CPP, Speeds
from benchmarks.optim import adamw
from benchmarks.quant import interleaved_matmul
from jaxkern.models.llama import LlamaWeights

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


def test_products_and_models_leave_rows_for_the_records(tmp_path, monkeypatch):
    for module in (_rows, interleaved_matmul):
        monkeypatch.setattr(module, "copy_rate", lambda: 4e12)
    monkeypatch.setattr(_rows, "machine", lambda: "h200")
    folder, runs = tmp_path / "records", tmp_path / "runs"
    shutil.copytree(RECORDS, folder)
    kept = _rows.Rows("int_matmul", "products", "us", runs)
    seconds = {"side by side": 20e-6, "humming": 16e-6}
    product = ("int4 by 128", 8192, 8192, 16)
    names = {"side by side": "jaxkern"}
    interleaved_matmul.keep(kept, product, names, seconds, 40_000_000)
    models = _rows.Rows("gpu_generate", "whole models", "tokens/s", runs)
    models.record_of = "models", "generate"
    run = gpu_generate.Run(260.4, 30_000.2, 1.0, 9.0)
    gpu_generate.keep(models, "8B bfloat16", (7936, 128, 32), run, limit=290)
    for _ in add(runs, folder):
        pass
    record = json.loads((folder / "h200" / "int_matmul.json").read_text())
    [section] = [s for s in record["sections"] if s.get("run") == "int_matmul"]
    assert {
        "case": "int4 by 128 8192x8192",
        "pass": "16 rows",
        "by": {
            "jaxkern": {"value": 20.0, "share": 50.0, "tflops": 107},
            "humming": 16.0,
        },
        "beside": {"bytes": 10.0},
    } in section["rows"]
    record = json.loads((folder / "h200" / "generate.json").read_text())
    decode, prefill = record["sections"][-1]["rows"]
    assert decode["case"] == "8B bfloat16 behind 7936 tokens, 32 sequences"
    assert (decode["by"], decode["beside"]) == ({"jaxkern": 260}, {"limit": 290})
    assert prefill["case"] == "8B bfloat16, 7936 tokens, 32 sequences"
    assert prefill["by"] == {"jaxkern": 30_000}


def test_the_limit_of_a_step_reads_matrices_once_and_keys_of_each(monkeypatch):
    monkeypatch.setattr(gpu_generate, "copy_rate", lambda: 4e12)
    table, norm = jnp.zeros((1024, 4), "bfloat16"), jnp.zeros(4)
    weights = LlamaWeights(table, (), norm, (table,), None)
    read = table.nbytes + norm.nbytes
    token = 2 * 32 * 8 * 128 * 2  # keys and values of 8B, 16 bits
    for batch in (1, 32):
        expected = batch * 4e12 / (read + batch * 600 * token)
        assert gpu_generate.limit("8B", weights, 600, batch) == expected


def test_rows_of_another_unit_are_a_section_of_their_own(tmp_path):
    run = run_of("8192x8192", 2e-6)
    folder = added(run, tmp_path)
    file = folder / "h200" / "rms_norm.json"
    before = json.loads(file.read_text())["sections"]
    section = section_of(run) | {"unit": "ms"}
    (tmp_path / "runs" / "rms_norm.json").write_text(
        json.dumps(run | {"sections": [section]})
    )
    for _ in add(tmp_path / "runs", folder):
        pass
    after = json.loads(file.read_text())["sections"]
    assert after[:-1] == before and after[-1]["unit"] == "ms"
