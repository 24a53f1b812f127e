"""Experts of plain rows for one token: lane by lane, and as machine code."""

import functools
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern import dequantize, quantize_fp8
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.dependent_launch import READ_EARLIER, WAIT
from jaxkern.gpu.device import compiling_for
from jaxkern.triton.moe import moe_ffn as few_tokens
from jaxkern.triton.moe import plain_rows
from tests.primitives.moe.test_expert_slots import PLAIN, hidden_of, sum_of
from tests.triton.quant import lanes
from tests.triton.test_every_kernel import launches_of, spec

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
E = 3
CASES = [
    # bytes of a weight, columns, rows, ids of which E is the shared one's, programs
    (2, 512, 48, [2, 0, -1, 4], 1),
    (2, 128, 16, [1, E, 1], 2),
    (1, 768, 32, [1, E, 7, 0, 2], 2),
    (1, 512, 16, [2, -1], 7),  # fewer rows than warps
]


def drawn(rng, itemsize, *shape) -> tuple[Any, Any, Any]:
    """(weights, their scales or None, the same in float64)."""
    w = jnp.asarray(rng.standard_normal(shape) / 4, jnp.float32)
    if itemsize == 2:
        w = np.asarray(w.astype(jnp.bfloat16))
        return w, None, w.astype(float)
    q = quantize_fp8(w, block=(1, 0))
    codes, scales = np.asarray(q.codes), np.asarray(q.scales[..., 0])
    return codes.view(np.uint8), scales, np.asarray(dequantize(q), float)


def by_lanes(f, operands: dict[str, Any], y):
    """y as every program of the one launch writes it; `operands` by pointers' names."""
    with compiling_for(90):
        [launch] = launches_of(lambda given: f(**given), (operands["given"],))
    present = {n: a for n, a in operands["pointers"].items() if a is not None}
    arrays = lanes.side_by_side(present | {"y_ptr": y})
    for place in np.ndindex(*launch.grid):
        lanes.run(launch, arrays, tuple(map(int, place)))
    return arrays["y_ptr"]


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("itemsize, d, f, ids, programs", CASES)
def test_lanes_give_gate_and_up(monkeypatch, itemsize, d, f, ids, programs, both):
    monkeypatch.setattr(plain_rows, "num_sms", lambda: programs)
    monkeypatch.setattr(plain_rows, "pays", lambda w, f: True)
    rng = np.random.default_rng([d, f])
    shared, ids = E in ids, np.array([ids], np.int32)
    x = rng.standard_normal((1, d)).astype(ml_dtypes.bfloat16)
    gate, gate_scales, g = drawn(rng, itemsize, E, f, d)
    up, up_scales, u = drawn(rng, itemsize, E, f, d)
    of_all, all_scales, b = drawn(rng, itemsize, 2, f, d)
    if not shared:
        of_all = all_scales = b = None
    if both:
        gate, up = np.stack([gate, up], 1), None
        if itemsize == 1:
            gate_scales, up_scales = np.stack([gate_scales, up_scales], 1), None
    given = dict(x=x, ids=ids, gate=gate, up=up, gate_scales=gate_scales)
    given |= dict(up_scales=up_scales, shared=of_all, shared_scales=all_scales)
    pointers = {f"{n}_ptr": a for n, a in given.items()}
    y = np.full((*ids.shape, f), np.nan, np.float32)
    operands = dict(given=given, pointers=pointers)
    y = by_lanes(functools.partial(few_tokens.hidden_of, **PLAIN), operands, y)
    b = None if b is None else b.reshape(2 * f, d)
    truth = hidden_of(x.astype(float), ids, g, u, (None, None), b, PLAIN)
    assert np.linalg.norm(y - truth) <= 1e-6 * np.linalg.norm(truth)
    assert not y[(ids < 0) | (ids > E - (not shared))].any()


@pytest.mark.parametrize("itemsize, d, f, ids, programs", CASES)
def test_lanes_give_the_weighted_sum(monkeypatch, itemsize, d, f, ids, programs):
    monkeypatch.setattr(plain_rows, "num_sms", lambda: programs)
    monkeypatch.setattr(plain_rows, "pays", lambda w, f: True)
    rng = np.random.default_rng([d, f, 1])
    shared, ids = E in ids, np.array([ids], np.int32)
    x = rng.standard_normal((*ids.shape, d)).astype(ml_dtypes.bfloat16)
    weights = rng.uniform(0, 1, ids.shape).astype(np.float32)
    residual = rng.standard_normal((1, f)).astype(ml_dtypes.bfloat16)
    down, scales, w = drawn(rng, itemsize, E, f, d)
    of_all, all_scales, b = drawn(rng, itemsize, f, d)
    if not shared:
        of_all = all_scales = b = None
    given: dict[str, Any] = dict(hidden=x, ids=ids, weights=weights, down=down)
    given |= dict(scales=scales, residual=residual)
    given |= dict(shared=of_all, shared_scales=all_scales)
    pointers = dict(x_ptr=x, early_ids_ptr=ids, weights_ptr=weights)
    pointers |= dict(early_down_ptr=down, early_scales_ptr=scales)
    pointers |= dict(early_shared_ptr=of_all, early_shared_scales_ptr=all_scales)
    pointers |= dict(residual_ptr=residual)
    y = np.full((1, f), np.nan, np.float32)
    operands = dict(given=given, pointers=pointers)
    y = by_lanes(few_tokens.result_of, operands, y)
    known = np.asarray(residual, float)
    truth = sum_of(x.astype(float), ids, weights, w, None, known, b)
    assert np.linalg.norm(y - truth) <= 1e-6 * np.linalg.norm(truth)


@pytest.mark.parametrize("f, d", [(768, 2048), (1280, 2048)])
def test_nothing_spills_on_hopper(f, d):
    """Qwen3-30B-A3B, and a wider one."""
    e, k = 128, 8
    ids = spec(1, k, dtype="int32")
    f32 = functools.partial(spec, dtype="float32")
    gate, down = spec(e, 2, f, d, dtype="uint8"), spec(e, d, f, dtype="uint8")
    hidden = dict(x=spec(1, d), ids=ids, gate=gate, up=None, gate_scales=f32(e, 2, f))
    result = dict(hidden=spec(1, k, f), ids=ids, weights=f32(1, k), down=down)
    result |= dict(scales=f32(e, d))
    with compiling_for(90):
        for f_, given, ahead in (
            (few_tokens.hidden_of, hidden, WAIT),
            (few_tokens.result_of, result, READ_EARLIER),
        ):
            [launch] = launches_of(lambda given, f_=f_: f_(**given), (given,))
            constants = dict(launch.constants) | {"AHEAD": ahead}
            launch = launch._replace(constants=tuple(constants.items()))
            assert launch.kernel.__name__.startswith("plain_")
            assert launch.stack_bytes == 0 and launch.registers <= 128
            assert "UBLKCP" in launch.sass


@pytest.mark.parametrize(
    "capability, tokens, f, dtype",
    [
        (80, 1, 768, "uint8"),
        (90, 2, 768, "uint8"),
        (90, 1, 512, "uint8"),  # a power of 2
        (90, 1, 720, "uint8"),  # of no whole units of a warp
        (90, 1, 768, "bfloat16"),
    ],
)
def test_elsewhere_the_older_kernels_run(capability, tokens, f, dtype):
    scales = None if dtype == "bfloat16" else spec(16, 2048, dtype="float32")
    ids, weights = spec(tokens, 8, dtype="int32"), spec(tokens, 8)
    given = dict(hidden=spec(tokens, 8, f), ids=ids, weights=weights)
    given |= dict(down=spec(16, 2048, f, dtype=dtype), scales=scales)
    with compiling_for(capability):
        [launch] = launches_of(lambda given: few_tokens.result_of(**given), (given,))
    assert launch.kernel.__name__ == "result_kernel"
