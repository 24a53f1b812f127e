"""`python -m benchmarks goals`: its goals name what exists, its verdicts are strict."""

import json

import pytest

from benchmarks import goals
from benchmarks._find import benchmark as benchmark_of
from benchmarks.goals import Goal, outcome
from benchmarks.optim import adamw

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


def names_of(module):
    if module is adamw:
        cases = [f"{m}, {d}" for m in adamw.MODELS for d in adamw.WIDTHS]
        return {"adamw": cases}
    found = getattr(module, "BENCHMARKS", None) or [module.BENCHMARK]
    return {b.name: [case.name for case in b.cases] for b in found}


def test_each_goal_names_a_case_and_peers_that_exist():
    for goal in goals.GOALS:
        module = benchmark_of(goal.module)
        assert goal.case in names_of(module)[goal.record], goal
        bounds = (goal.times, goal.share, goal.us, goal.tflops)
        assert sum(b is not None for b in bounds) == 1, goal
        if module is not adamw:
            benchmark = goals.benchmark_named(module, goal.record)
            peers = {"XLA", *benchmark.jax_peers, *benchmark.torch_peers}
            assert set(goal.than) <= peers, goal


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
    assert outcome(Goal("m", "m", "a", **bounds), RECORD)[1] == met


def test_a_nan_meets_nothing():
    record = json.loads(json.dumps(RECORD))
    record["results"]["a"]["jaxkern"] = {"forward": 1e-6, "error": float("nan")}
    goal = Goal("m", "m", "a", "error", times=1.2, than=("XLA",))
    assert not outcome(goal, record)[1]


def test_records_that_are_missing_meet_nothing(tmp_path):
    lines = goals.judged(tmp_path)
    assert len(lines) == len(goals.GOALS)
    assert all(line[-2:] == ("not measured", "NO") for line in lines)
