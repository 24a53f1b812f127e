"""Experts slot by slot against their formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    dequantize,
    interleave,
    quantize_fp8,
    quantize_gguf,
    quantize_microscaled,
)
from jaxkern.primitives.moe.expert_slots import (
    are_alike,
    expert_hidden,
    expert_sum,
    slots_of,
)
from jaxkern.testing.checks import bf16, case, f32, i32, u8, uniform
from tests.primitives.quant.block_bytes import quiet_bytes
from tests.primitives.quant.test_fp8 import finite_codes
from tests.primitives.quant.test_microscaled import byte_values

GPT_OSS = dict(alpha=1.702, limit=7.0, up_offset=1.0)
PLAIN = dict(alpha=1.0, limit=None, up_offset=0.0)
IDS = i32(2, 2, low=-1, high=5)  # some are no expert's, 3 is the shared one's


def small_e8m0(*shape):
    """Scales of weights below 0.2, so that second derivatives are of size 1."""
    return byte_values(*shape, low=119, high=123)


def small_e4m3fn(*shape):
    """Likewise."""
    return byte_values(*shape, low=0x08, high=0x18)


CASES = {
    "dense_expert_hidden": [
        case(
            "shared",
            full=True,
            **dict(x=f32(2, 8), ids=IDS, gate_w=f32(3, 1, 6, 8), up_w=f32(3, 6, 8)),
            **dict(shared_w=f32(2, 6, 8), gate_bias=f32(3, 1, 6), up_bias=f32(3, 6)),
            **GPT_OSS,
        ),
        case(
            "plain",
            full=True,
            **dict(x=bf16(1, 8), ids=i32(1, 2, high=3), gate_w=bf16(3, 2, 6, 8)),
            **dict(up_w=None, shared_w=None, gate_bias=bf16(3, 2, 6), up_bias=None),
            **PLAIN,
        ),
    ],
    "dense_expert_sum": [
        case(
            "shared",
            full=True,
            **dict(x=f32(2, 2, 6), ids=IDS, weights=f32(2, 2), down_w=f32(3, 8, 6)),
            **dict(shared_w=f32(8, 6), down_bias=f32(3, 8), residual=f32(2, 8)),
        ),
        case(
            "plain",
            full=True,
            **dict(x=bf16(1, 2, 6), ids=i32(1, 2, high=3), weights=f32(1, 2)),
            **dict(down_w=bf16(3, 8, 6), shared_w=None, down_bias=None),
            **dict(residual=None),
        ),
    ],
    "fp8_expert_hidden": [
        case(
            "shared",
            full=True,
            **dict(x=f32(2, 8), ids=IDS, gate_codes=finite_codes(3, 1, 6, 8)),
            **dict(gate_scales=uniform(3, 1, 6), up_codes=finite_codes(3, 6, 8)),
            **dict(up_scales=uniform(3, 6), shared_codes=finite_codes(2, 6, 8)),
            **dict(shared_scales=uniform(2, 6), gate_bias=f32(3, 1, 6)),
            **dict(up_bias=f32(3, 6), format="e4m3fn"),
            **GPT_OSS,
        ),
        case(
            "plain",
            full=True,
            **dict(x=bf16(1, 8), ids=i32(1, 2, high=3), up_codes=None, up_scales=None),
            **dict(gate_codes=finite_codes(3, 2, 6, 8), gate_scales=uniform(3, 2, 6)),
            **dict(shared_codes=None, shared_scales=None, gate_bias=None, up_bias=None),
            **PLAIN | dict(format="e4m3fn"),
        ),
    ],
    "fp8_expert_sum": [
        case(
            "shared",
            full=True,
            **dict(x=f32(2, 2, 6), ids=IDS, weights=f32(2, 2), format="e4m3fn"),
            **dict(down_codes=finite_codes(3, 8, 6), down_scales=uniform(3, 8)),
            **dict(shared_codes=finite_codes(8, 6), shared_scales=uniform(8)),
            **dict(down_bias=f32(3, 8), residual=f32(2, 8)),
        ),
        case(
            "plain",
            full=True,
            **dict(x=bf16(1, 2, 6), ids=i32(1, 2, high=3), weights=f32(1, 2)),
            **dict(down_codes=finite_codes(3, 8, 6), down_scales=uniform(3, 8)),
            **dict(shared_codes=None, shared_scales=None, down_bias=None),
            **dict(residual=None, format="e4m3fn"),
        ),
    ],
    "interleaved_expert_hidden": [
        case(
            "q4_0",
            full=True,
            **dict(x=bf16(2, 32), ids=IDS, gate_tiles=quiet_bytes(3, 1, 1, 288)),
            **dict(
                up_tiles=quiet_bytes(3, 1, 288), shared_tiles=quiet_bytes(2, 1, 288)
            ),
            **dict(gate_bias=f32(3, 1, 1, 16), up_bias=f32(3, 1, 16), qtype="Q4_0"),
            **GPT_OSS,
        ),
        case(
            "both_halves",
            full=True,
            **dict(x=bf16(1, 32), ids=i32(1, 2, high=3), up_tiles=None, up_bias=None),
            **dict(gate_tiles=quiet_bytes(3, 2, 1, 288), gate_bias=None, qtype="Q4_0"),
            **PLAIN | dict(shared_tiles=None),
        ),
    ],
    "interleaved_expert_sum": [
        case(
            "q4_0",
            full=True,
            **dict(x=bf16(2, 2, 32), ids=IDS, weights=f32(2, 2), qtype="Q4_0"),
            **dict(down_tiles=quiet_bytes(3, 1, 288), residual=f32(2, 1, 16)),
            **dict(shared_tiles=quiet_bytes(1, 288), down_bias=f32(3, 1, 16)),
        )
    ],
    "microscaled_expert_hidden": [
        case(
            "mxfp4",
            full=True,
            **dict(x=bf16(2, 64), ids=IDS, gate_codes=u8(3, 1, 4, 32)),
            **dict(gate_scales=small_e8m0(3, 1, 4, 2), up_codes=u8(3, 4, 32)),
            **dict(up_scales=small_e8m0(3, 4, 2), shared_codes=u8(2, 4, 32)),
            **dict(shared_scales=small_e8m0(2, 4, 2), gate_bias=f32(3, 1, 4)),
            **dict(up_bias=f32(3, 4), format="mxfp4"),
            **GPT_OSS,
        ),
        case(
            "both_halves",
            full=True,
            **dict(
                x=bf16(1, 64),
                ids=i32(1, 2, high=3),
                up_codes=None,
                up_scales=None,
            ),
            **dict(gate_codes=u8(3, 2, 4, 32), gate_scales=small_e8m0(3, 2, 4, 2)),
            **dict(shared_codes=None, shared_scales=None, gate_bias=None),
            **PLAIN | dict(up_bias=None, format="mxfp4"),
        ),
    ],
    "microscaled_expert_sum": [
        case(
            "mxfp4",
            full=True,
            **dict(x=bf16(2, 2, 64), ids=IDS, weights=f32(2, 2), format="mxfp4"),
            **dict(down_codes=u8(3, 4, 32), down_scales=small_e8m0(3, 4, 2)),
            **dict(shared_codes=u8(4, 32), shared_scales=small_e8m0(4, 2)),
            **dict(down_bias=f32(3, 4), residual=f32(2, 4)),
        ),
        case(
            "nvfp4",
            full=True,
            **dict(x=bf16(1, 2, 32), ids=i32(1, 2, high=3), weights=f32(1, 2)),
            **dict(down_codes=u8(3, 4, 16), down_scales=small_e4m3fn(3, 4, 2)),
            **dict(shared_codes=None, shared_scales=None, down_bias=None),
            **dict(residual=None, format="nvfp4"),
        ),
    ],
}


def hidden_of(x, ids, gate, up, biases, shared, options):
    """In float64, slot by slot; `shared` `[2*f, d]` or None, biases or None."""
    limit = np.inf if options["limit"] is None else options["limit"]
    y = np.zeros((*ids.shape, gate.shape[1]))
    for t, j in np.ndindex(ids.shape):
        if 0 <= (e := ids[t, j]) < len(gate):
            parts = [
                w[e] @ x[t] + (0 if b is None else b[e])
                for w, b in zip((gate, up), biases, strict=True)
            ]
        elif e == len(gate) and shared is not None:
            parts = np.split(shared @ x[t], 2)
        else:
            continue
        z, u = np.minimum(parts[0], limit), np.clip(parts[1], -limit, limit)
        y[t, j] = z / (1 + np.exp(-options["alpha"] * z)) * (u + options["up_offset"])
    return y


def sum_of(x, ids, weights, down, bias, residual, shared):
    """In float64, slot by slot."""
    y = np.zeros((len(ids), down.shape[1]))
    y = y if residual is None else y + residual
    for t, j in np.ndindex(ids.shape):
        if 0 <= (e := ids[t, j]) < len(down):
            y[t] += weights[t, j] * (
                down[e] @ x[t, j] + (0 if bias is None else bias[e])
            )
        elif e == len(down) and shared is not None:
            y[t] += weights[t, j] * (shared @ x[t, j])
    return y


PACK = {
    "dense": lambda w: w,
    "fp8": lambda w: quantize_fp8(w, block=(1, 0)),
    "interleaved": lambda w: interleave(quantize_gguf(w, "Q8_0")),
    "microscaled": lambda w: quantize_microscaled(w, format="mxfp4"),
}


def wide(w):
    if w is None:
        return None
    return np.asarray(w if isinstance(w, jax.Array) else dequantize(w), np.float64)


@pytest.mark.parametrize(
    "kind",
    ["dense", *(pytest.param(k, marks=pytest.mark.full) for k in [*PACK][1:])],
)
def test_values_match_the_formula(kind):
    e, f, d, t, k = 3, 32, 64, 2, 4
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape) / 4, jnp.float32)

    ids = jnp.asarray([[2, -1, 0, 3], [1, 1, 4, 3]], jnp.int32)
    x, weights, residual = draw(t, d), draw(t, k), draw(t, d)
    halves, biases = (draw(e, f, d), draw(e, f, d)), (draw(e, f), draw(e, f))
    gate, up, down = (PACK[kind](w) for w in (*halves, draw(e, d, f)))
    both, bias = (jnp.concatenate(parts, axis=1) for parts in (halves, biases))
    one = expert_hidden(x, ids, PACK[kind](both), None, bias, None, **PLAIN)
    two = expert_hidden(x, ids, gate, up, *biases, **PLAIN)
    np.testing.assert_array_equal(one, two)
    for options, shared, bias in (
        (GPT_OSS, None, draw(e, d)),
        (PLAIN, [PACK[kind](draw(2 * f, d)), PACK[kind](draw(d, f))], None),
    ):
        wide_in, back = shared or (None, None)
        given = biases if bias is not None else (None, None)
        y = expert_hidden(x, ids, gate, up, *given, wide_in, **options)
        plain = np.asarray(x, np.float64), np.asarray(ids)
        truth = hidden_of(
            *plain, wide(gate), wide(up), list(map(wide, given)), wide(wide_in), options
        )
        np.testing.assert_allclose(y, truth, atol=1e-6)
        added = residual if shared else None
        z = expert_sum(y, ids, weights, down, bias, added, back)
        operands = map(wide, (weights, down, bias, added, back))
        truth = sum_of(np.asarray(y, np.float64), np.asarray(ids), *operands)
        np.testing.assert_allclose(z, truth, atol=1e-6)


def test_what_one_kernel_reads():
    """One container and one layout of it; a factor of each expert has no op."""
    w = jnp.ones((2, 32, 64))
    q8, q4 = (interleave(quantize_gguf(w, q)) for q in ("Q8_0", "Q4_0"))
    fp4 = quantize_microscaled(w, format="nvfp4")
    assert are_alike(w, w, w) and are_alike(q8, q8)
    assert not are_alike(q8, q4) and not are_alike(w, q8)
    assert not are_alike(w, w.astype(jnp.bfloat16))
    assert slots_of(fp4) is None and slots_of(quantize_gguf(w, "Q8_0")) is None
    blocks, rows, whole = (quantize_fp8(w, block=b) for b in ((32, 32), (1, 0), (0, 0)))
    assert slots_of(blocks) is None and are_alike(rows, whole)
