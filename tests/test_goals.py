"""`python -m benchmarks goals`: its goals name what exists, its verdicts are strict."""

import argparse
import json

import pytest

from benchmarks import goals
from benchmarks._find import benchmark as benchmark_of
from benchmarks._goal_list import At
from benchmarks._judged import (
    BY_HAND,
    CARD,
    COLUMNS,
    MET,
    PRODUCTS,
    in_records,
    in_run,
    outcome,
)
from benchmarks._records import RECORDS
from benchmarks.delta_rule import gated_delta_step
from benchmarks.goals import Goal, judged
from benchmarks.linear import linear
from benchmarks.optim import adamw
from benchmarks.quant import interleaved_matmul
from jaxkern.primitives.quant.tile_formats import TILE_FORMATS

RECORD = {
    "limits": {"copy": 4e12, "matmul": 7e14},
    "cases": {"a": {"bytes": (4e6, 8e6), "flops": (7e8, 0.0)}},
    "results": {
        "a": {
            "jaxkern": {"forward": 1.1e-6, "backward": 2e-6, "error": 1e-3},
            "XLA": {"forward": 2.2e-6, "backward": 4.2e-6, "error": 9e-4},
            "FA3": {"failed": "ImportError: none here"},
        }
    },
}


BOUNDS = ("times", "share", "us", "ms", "seconds", "tflops", "tokens", "of_bytes")


def names_of(module):
    """{name of a benchmark: names of its cases}; None of those without a list."""
    if module is adamw:
        cases = [f"{m}, {d}" for m in adamw.MODELS for d in adamw.WIDTHS]
        return {"adamw": cases}
    if module is gated_delta_step:
        return {"gated_delta_step": [*gated_delta_step.CASES]}
    found = getattr(module, "BENCHMARKS", None) or [module.BENCHMARK]
    return {b.name: [case.name for case in b.cases] for b in found}


def name_of(goal):
    return f"{goal.record} {goal.case} {goal.which}"


@pytest.mark.parametrize("goal", goals.GOALS, ids=name_of)
def test_each_goal_names_a_case_and_peers_that_exist(goal):
    module = benchmark_of(goal.module)
    assert sum(getattr(goal, b) is not None for b in BOUNDS) == 1
    assert (goal.times is None) == (not goal.than)
    if goal.module in BY_HAND:
        assert goal.record == goal.module
        return
    if goal.module in PRODUCTS:
        kind, _, shape = goal.case.rpartition(" ")
        assert kind in kinds_of(module)
        f, d = map(int, shape.split("x"))
        asked = argparse.Namespace(shapes=[f"{goal.case}, {goal.which}"])
        [product] = interleaved_matmul.products(asked, "")
        assert product == (kind, f, d, int(goal.which.split()[0]))
        assert set(goal.than) <= {"humming", "bfloat16 by XLA"}
        return
    assert goal.case in names_of(module)[goal.record]
    if module not in (adamw, gated_delta_step):
        benchmark = goals.benchmark_named(module, goal.record)
        peers = {"XLA", *benchmark.jax_peers, *benchmark.torch_peers}
        assert set(goal.than) <= peers


def kinds_of(module):
    if module is linear:
        return [""]
    return TILE_FORMATS if module is interleaved_matmul else module.KINDS


@pytest.mark.parametrize("goal", [g for g in goals.GOALS if g.at], ids=name_of)
def test_another_name_in_the_records_is_one_that_they_have(goal):
    found = in_records(goal, RECORDS / CARD)
    assert found and goal.ours in found.by


@pytest.mark.parametrize(
    "bounds, met",
    [
        ({"which": "forward", "times": 2.0, "than": ("XLA",)}, True),
        ({"which": "forward", "times": 2.01, "than": ("XLA",)}, False),
        ({"which": "both", "times": 2.0, "than": ("XLA", "FA3")}, True),
        ({"which": "both", "times": 2.1, "than": ("XLA",)}, False),
        ({"which": "forward", "times": 0.1, "than": ("FA3",)}, False),  # it failed
        ({"which": "forward", "share": 90.0}, True),
        ({"which": "forward", "share": 91.0}, False),
        ({"which": "backward", "share": 99.9}, True),
        ({"which": "forward", "us": 1.1}, True),
        ({"which": "forward", "us": 1.09}, False),
        ({"which": "forward", "tflops": 636.0}, True),
        ({"which": "forward", "tflops": 637.0}, False),
        ({"which": "error", "times": 1.2, "than": ("XLA",)}, True),
        ({"which": "error", "times": 1.1, "than": ("XLA",)}, False),
        ({"which": "gradient error", "times": 9.0, "than": ("XLA",)}, False),
    ],
)
def test_verdicts(bounds, met):
    goal = Goal("m", "m", "a", **bounds)
    assert outcome(goal, in_run(goal, RECORD))[1] == met


def test_a_nan_meets_nothing():
    record = json.loads(json.dumps(RECORD))
    record["results"]["a"]["jaxkern"] = {"forward": 1e-6, "error": float("nan")}
    goal = Goal("m", "m", "a", "error", times=1.2, than=("XLA",))
    assert not outcome(goal, in_run(goal, record))[1]


SECTIONS = [
    {
        "run": "m",
        "date": "2030-01-01",
        "unit": "us",
        "rows": [
            {"case": "a", "pass": "1 row", "by": {"jaxkern": 9.0, "humming": 8.0}},
            {
                "case": "b",
                "pass": "1 row",
                "by": {"jaxkern": 50.0},
                "beside": {"bytes": 40.0, "temporaries, MB": 60},
            },
            {
                "case": "c",
                "pass": "4096 rows",
                "by": {"jaxkern": {"value": 1.0, "tflops": 700}},
            },
        ],
    },
    {
        "date": "2030-01-02",
        "unit": "us",
        "rows": [{"case": "a", "pass": "1 row", "by": {"jaxkern": 7.0}}],
    },
    {
        "run": "another",
        "date": "2030-01-03",
        "unit": "us",
        "rows": [{"case": "a", "pass": "1 row", "by": {"jaxkern": 1.0}}],
    },
    {
        "date": "2030-01-02",
        "unit": "tokens/s",
        "rows": [
            {
                "case": "8B",
                "pass": "decode",
                "by": {"jaxkern": 260, "jaxkern, 2 GPUs": 420},
                "beside": {"limit": 290},
            }
        ],
    },
    {
        "date": "2030-01-02",
        "unit": "TFLOP/s",
        "rows": [{"case": "g", "pass": "dx and dw", "by": {"jaxkern": 605}}],
    },
]


@pytest.mark.parametrize(
    "case, which, bounds, met",
    [
        ("a", "1 row", {"us": 7.0}, True),  # the newest
        ("a", "1 row", {"us": 6.9}, False),  # not that of another benchmark
        ("a", "1 row", {"times": 0.88, "than": ("humming",)}, True),  # has the peer
        ("a", "1 row", {"times": 0.9, "than": ("humming",)}, False),
        ("a", "1 row", {"times": 0.1, "than": ("FA3",)}, False),  # nobody has it
        ("a", "1 row", {"share": 1.0}, False),  # of what bytes?
        ("b", "1 row", {"share": 80.0}, True),
        ("b", "1 row", {"share": 81.0}, False),
        ("b", "1 row", {"of_bytes": 1.25}, True),
        ("b", "1 row", {"of_bytes": 1.24}, False),
        ("b", "1 row", {"ms": 0.05, "megabytes": 60}, True),
        ("b", "1 row", {"ms": 0.05, "megabytes": 59}, False),
        ("b", "1 row", {"seconds": 4.9e-5, "megabytes": 60}, False),
        ("a", "1 row", {"us": 9.0, "megabytes": 60}, False),  # of what memory?
        ("c", "4096 rows", {"tflops": 700}, True),
        ("c", "4096 rows", {"tflops": 701}, False),
        ("8B", "decode", {"tokens": 260}, True),
        ("8B", "decode", {"tokens": 261}, False),
        ("8B", "decode", {"us": 1e9}, False),  # a rate is no time
        ("8B", "decode", {"of_bytes": 1.12}, True),
        ("8B", "decode", {"of_bytes": 1.11}, False),
        (
            *("8B", "decode"),
            {"times": 1.6, "than": ("jaxkern",), "ours": "jaxkern, 2 GPUs"},
            True,
        ),
        ("other", "backward", {"tflops": 600, "at": At("g", "dx and dw")}, True),
        ("other", "backward", {"tflops": 606, "at": At("g", "dx and dw")}, False),
        ("other", "backward", {"tflops": 1}, False),
    ],
)
def test_verdicts_of_records(tmp_path, case, which, bounds, met):
    (tmp_path / "m.json").write_text(json.dumps({"sections": SECTIONS}))
    module = "linear" if case != "other" else "m"  # a script's sections name no run
    (tmp_path / "linear.json").write_text(json.dumps({"sections": SECTIONS}))
    goal = Goal(module, "m", case, which, **bounds)
    [line] = judged(folder=tmp_path, goals=[goal])
    assert line[MET] == ("yes" if met else "NO")


def test_a_section_that_names_no_run_may_be_of_other_dtypes(tmp_path):
    section = SECTIONS[1] | {"rows": [SECTIONS[1]["rows"][0] | {"pass": "forward"}]}
    (tmp_path / "attention.json").write_text(json.dumps({"sections": [section]}))
    goal = Goal("attention", "attention", "a", "forward", us=1e9)
    [line] = judged(folder=tmp_path, goals=[goal])
    assert line[MET - 1] == "not measured"


def test_of_one_day_the_last_section_counts(tmp_path):
    later = SECTIONS[1] | {"rows": [SECTIONS[1]["rows"][0] | {"by": {"jaxkern": 6.5}}]}
    (tmp_path / "linear.json").write_text(json.dumps({"sections": [*SECTIONS, later]}))
    [line] = judged(folder=tmp_path, goals=[Goal("linear", "m", "a", "1 row", us=6.6)])
    assert line[MET] == "yes"


def test_another_card_tells_shares_and_ratios_alone(tmp_path):
    for card in ("h200", "h100"):
        (tmp_path / card).mkdir()
    (tmp_path / "h100" / "linear.json").write_text(json.dumps({"sections": SECTIONS}))
    asked = [
        Goal("linear", "m", "b", "1 row", share=80),
        Goal("linear", "m", "b", "1 row", us=51),
        Goal("linear", "m", "a", "1 row", times=0.5, than=("humming",)),
    ]
    lines = [*judged(folder=tmp_path / "h200", goals=asked)]
    assert [line[MET] for line in lines] == ["yes", "NO", "yes"]
    said = "linear on h100, 2030-01-01"
    assert [line[-1] for line in lines] == [said, "", said]


def test_a_run_stands_before_the_records(tmp_path):
    runs, folder = tmp_path / "runs", tmp_path / "records"
    runs.mkdir()
    folder.mkdir()
    (runs / "m.json").write_text(json.dumps(RECORD | {"date": "2030-02-02"}))
    newer = SECTIONS[1] | {"date": "2031-01-01"}
    (folder / "linear.json").write_text(json.dumps({"sections": [newer]}))
    goals_of = [Goal("linear", "m", "a", w, us=7) for w in ("forward", "1 row")]
    lines = [*judged(runs, folder, goals_of)]
    assert [line[MET] for line in lines] == ["yes", "yes"]
    assert [line[-1] for line in lines] == ["m, 2030-02-02", "linear, 2031-01-01"]


def test_every_benchmark_takes_the_arguments_that_it_is_run_with(tmp_path, capsys):
    options = argparse.Namespace(only=None, shapes=None)
    commands = [*goals.commands(tmp_path, options)]
    assert all(f(arguments) == 2 for f, arguments in commands)  # they need a GPU
    assert capsys.readouterr().out.count("needs a GPU") == len(commands)
    by_hand = {g.record for g in goals.GOALS if g.module in BY_HAND}
    assert len(commands) == len({g.record for g in goals.GOALS} - by_hand)
    options = argparse.Namespace(only=["int_matmul"], shapes=["none"])
    assert not [*goals.commands(tmp_path, options)]


def test_records_that_are_missing_meet_nothing(tmp_path):
    lines = [*judged(folder=tmp_path)]
    assert len(lines) == len(goals.GOALS)
    for goal, line in zip(goals.GOALS, lines, strict=True):
        said = goal.module if goal.module in BY_HAND else ""
        assert line[-3:] == ["not measured", "NO", said]
        assert len(line) == len(COLUMNS)


def test_a_run_of_all_goals_keeps_what_answers_them(tmp_path):
    """What `goals --out` leaves for the records is judged as the run itself is."""
    runs, folder = tmp_path / "runs", tmp_path / "records"
    runs.mkdir()
    folder.mkdir()
    record = json.loads(json.dumps(RECORD).replace('"a"', '"16384x4096"'))
    record["results"]["16384x4096"]["only its bytes"] = {"forward": 1e-6}
    (runs / "rms_norm.json").write_text(json.dumps(record))
    rows = [*goals.rows_of(runs)]
    section = {"run": "goals", "date": "2030-01-01", "unit": "us", "rows": rows}
    (folder / "goals.json").write_text(json.dumps({"sections": [section]}))
    mine = [g for g in goals.GOALS if g.case == "16384x4096"]
    by_run, by_record = (
        [*judged(*where, mine)] for where in ((runs, tmp_path), (None, folder))
    )
    assert [line[:-1] for line in by_run] == [line[:-1] for line in by_record]
    assert {line[MET] for line in by_run} == {"yes", "NO"}
