"""Draws of shapes: each fits its operator, and a wrong kernel is found."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import drawn_shapes
from benchmarks._drawn.check import wrong_results
from benchmarks._drawn.choices import TEMPERATURE, sorted_draw
from benchmarks._drawn.draw import EPSILON, Draw, Source, normals
from benchmarks._drawn.measure import Outcome, Pass
from benchmarks._drawn.report import losses, summary_table
from benchmarks.drawn_shapes import ELEMENTS, OPS, main
from jaxkern import cumsum
from jaxkern.lowering.lower import lower
from jaxkern.primitives.delta_rule.cumsum import cumsum_p
from jaxkern.primitives.sampling.sample import sample_p
from jaxkern.testing.checks import own_rows
from tests.gpu import truth

CHEAP = ["linear", "argmax"]
BY_XLA = "xla: softmax_reference"


def source(seed, elements):
    return Source(np.random.default_rng(seed), elements)


@pytest.mark.parametrize("op", OPS)
def test_a_draw_of_a_gpu_fits_its_operator_and_the_bounds(op):
    draw = OPS[op](source(5, ELEMENTS["gpu"]))
    assert OPS[op](source(5, ELEMENTS["gpu"])).title == draw.title
    operands = jax.eval_shape(draw.arrays, jax.random.key(0))
    most = max(x.size for x in jax.tree.leaves(operands))
    assert most <= 8 * ELEMENTS["gpu"], draw.title
    assert jax.tree.leaves(jax.eval_shape(draw.f, *operands)), draw.title


def test_a_run_checks_each_op_in_turn_and_leaves_its_figures(tmp_path, capsys):
    given = ["--check", "--elements", "512", "--seconds", "500", "--out", str(tmp_path)]
    assert main([*given, "--draws", "2", "--only", *CHEAP]) == 0
    [file] = Path(tmp_path).glob("*.json")
    draws = json.loads(file.read_text())["draws"]
    assert [d["op"] for d in draws] == sorted(CHEAP, key=list(OPS).index)
    assert [list(OPS)[d["index"]] for d in draws] == [d["op"] for d in draws]
    said = capsys.readouterr().out
    assert "2 draws of seed 0" in said
    assert main(["--read", str(tmp_path)]) == 0
    assert capsys.readouterr().out in said


@pytest.mark.full
def test_small_draws_of_every_op_are_right():
    small = ["--check", "--elements", "2048", "--seconds", "900"]
    assert main([*small, "--draws", str(2 * len(OPS))]) == 0


def test_without_a_gpu_only_values_can_be_compared(capsys):
    assert main([]) == 2
    assert "needs a GPU, found cpu. `--check`" in capsys.readouterr().out


def test_one_draw_is_made_again_by_its_number(monkeypatch):
    made = []

    def recorded(op, generate, seed, index, elements, timed):
        made.append((op, seed, index))
        return Outcome(op, seed, index, "")

    monkeypatch.setattr(drawn_shapes, "outcome_of", recorded)
    assert main(["--check", "--seed", "7", "--draw", "41"]) == 0
    assert made == [(list(OPS)[41 % len(OPS)], 7, 41)]


def test_a_kernel_that_is_off_is_found():
    def wrong(x, **_):
        return jnp.cumsum(x, -1).at[0, 3].add(1e-3)

    draw = Draw("3x8", normals("float32", (3, 8)), lambda x: cumsum(x))
    with own_rows(cumsum_p):
        lower(cumsum_p, "cpu", "cpp", fwd=wrong)
        args = draw.arrays(jax.random.key(0))
        assert wrong_results(draw, args, ()).startswith("result 0: ")


def test_limits_are_those_of_the_tests_on_a_gpu():
    assert EPSILON == truth.EPSILON


def test_a_loss_is_beyond_five_percent_and_a_microsecond():
    def timed(runs, ours, theirs):
        seconds = {"jaxkern": ours, "XLA": 2 * theirs, "cuDNN": theirs}
        return Pass([runs], ["a reason"], seconds)

    kernel = "triton: triton.activation.softmax.softmax"
    cases = {
        "lost": (kernel, 3e-4, 2e-4),
        "lost by more": (kernel, 3e-5, 1e-5),
        "4 percent": (kernel, 1.04e-4, 1e-4),
        "half a microsecond": (kernel, 2.5e-6, 2e-6),
        "won": (kernel, 1e-4, 2e-4),
        "left to XLA": (BY_XLA, 3e-4, 2e-4),
    }
    found = [
        Outcome("softmax", 0, i, name, passes={"forward": timed(*case)})
        for i, (name, case) in enumerate(cases.items())
    ]
    assert [o.title for o, _, _ in losses(found)] == ["lost by more", "lost"]
    table = summary_table(found, {"rows": ["softmax"]})
    last = [list(column.cells)[-1] for column in table.columns]
    assert last == ["  softmax", "6", "5", "1", "60 %", "1.25", "0"]


def test_the_draw_by_a_sort_makes_the_same_cuts():
    logits = 4 * jax.random.normal(jax.random.key(0), (32, 50))
    uniform = jax.random.uniform(jax.random.key(1), (32,))
    cuts = [jnp.full(32, x) for x in (TEMPERATURE, 20, 0.9, 0.05)]
    expected = sample_p(logits, uniform, *cuts)
    found = sorted_draw(logits, uniform, top_k=20, top_p=0.9, min_p=0.05)
    np.testing.assert_array_equal(found, expected)
