"""Experts of one token by whole numbers: lane by lane, and as machine code."""

import functools

import ml_dtypes
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.primitives.moe.expert_slots import expert_hidden, expert_sum
from jaxkern.triton.moe.expert_slots import one_token
from jaxkern.triton.quant.fixed_point_codes import FORMATS
from tests.primitives.moe.test_expert_slots import GPT_OSS, PLAIN, hidden_of, sum_of
from tests.triton.moe.test_expert_slots import by_lanes, drawn, ops_of
from tests.triton.test_every_kernel import launches_of

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
E = 3


CASES = [
    # kind, columns, rows, ids of which E is the shared one's, programs
    ("MXFP4", 320, 32, [2, 0, -1, 4], 3),
    ("Q4_K", 256, 16, [1, E, 7], 1),
]


@pytest.mark.parametrize("kind, d, f, ids, programs", CASES)
def test_lanes_give_gate_and_up(monkeypatch, kind, d, f, ids, programs):
    monkeypatch.setattr(one_token, "num_sms", lambda: programs)
    rng, shared = np.random.default_rng(d), E in ids
    ids, options = np.array([ids], np.int32), PLAIN if shared else GPT_OSS
    x = rng.standard_normal((1, d)).astype(ml_dtypes.bfloat16)
    (gate, g), (up, u) = (drawn(rng, kind, E, f, d) for _ in range(2))
    biases = [None if shared else rng.standard_normal((E, f)) for _ in range(2)]
    (both, b) = drawn(rng, kind, 2 * f, d) if shared else (None, None)
    narrow = [None if a is None else a.astype(np.float32) for a in biases]
    hidden = functools.partial(expert_hidden, **options)
    y = np.full((*ids.shape, f), np.nan, np.float32)
    y = by_lanes(hidden, (x, ids, gate, up, *narrow, both), y)
    truth = hidden_of(x.astype(float), ids, g, u, biases, b, options)
    assert np.linalg.norm(y - truth) <= 1e-4 * np.linalg.norm(truth)
    assert not y[(ids < 0) | (ids > E - (not shared))].any()


@pytest.mark.parametrize("kind, d, f, ids, programs", CASES)
def test_lanes_give_the_weighted_sum(monkeypatch, kind, d, f, ids, programs):
    monkeypatch.setattr(one_token, "num_sms", lambda: programs)
    rng, shared = np.random.default_rng(d), E in ids
    ids = np.array([ids], np.int32)
    x = rng.standard_normal((*ids.shape, d)).astype(ml_dtypes.bfloat16)
    by_expert = rng.uniform(0, 1, ids.shape).astype(np.float32)
    down, w = drawn(rng, kind, E, f, d)
    bias = None if shared else rng.standard_normal((E, f)).astype(np.float32)
    residual = rng.standard_normal((1, f)).astype(ml_dtypes.bfloat16)
    (back, b) = drawn(rng, kind, f, d) if shared else (None, None)
    y = np.full((1, f), np.nan, np.float32)
    y = by_lanes(expert_sum, (x, ids, by_expert, down, bias, residual, back), y)
    truth = sum_of(x.astype(float), ids, by_expert, w, bias, residual.astype(float), b)
    assert np.linalg.norm(y - truth) <= 1e-4 * np.linalg.norm(truth)


@pytest.mark.parametrize(
    "kind, d, f, e, k, shared",
    [
        ("MXFP4", 2880, 2880, 32, 4, False),  # gpt-oss-20b
        *(
            pytest.param(kind, 2048, 512, 256, 9, True, marks=pytest.mark.full)
            for kind in FORMATS
        ),
    ],
)
def test_nothing_spills_on_hopper(kind, d, f, e, k, shared):
    with compiling_for(90):
        for op, operands in ops_of(kind, d, f, e, k, shared, tokens=1):
            [launch] = launches_of(op, operands)
            assert launch.kernel.__name__.startswith("fixed_point"), kind
            assert launch.stack_bytes == 0 and launch.registers <= 128, kind
            assert "UBLKCP" in launch.sass


@pytest.mark.parametrize("capability, kind, d", [(80, "MXFP4", 256), (90, "Q8_0", 288)])
def test_elsewhere_the_older_kernels_run(capability, kind, d):
    """Before Hopper; and where the scale of what is not there might be NaN."""
    with compiling_for(capability):
        for op, operands in ops_of(kind, d, d, 4, 2, False, tokens=1):
            [launch] = launches_of(op, operands)
            assert launch.kernel.__name__.startswith("packed_")
