"""Triton's mixture of experts for a few tokens: interpreted, and compiled."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import dequantize, explain, moe_ffn, quantize_fp8
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.dependent_launch import READ_EARLIER
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch import compiled
from jaxkern.triton.moe import moe_ffn as few_tokens
from jaxkern.triton.moe.expert_slots import dense, fp8
from tests.primitives.moe.test_expert_slots import GPT_OSS, hidden_of, sum_of
from tests.primitives.moe.test_moe_ffn import dense_loop
from tests.triton.interpreted import (
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

CASES = [(1, 8, 4, 64, 48), (5, 3, 6, 50, 33), (2, 1, 2, 1100, 7)]


@starts_it
def test_interpreted_kernels():
    check_in_its_own_process(__file__, len(CASES) * 4 + 1)


@alone
@pytest.mark.parametrize("activation", ["swiglu", "geglu_tanh"])
@pytest.mark.parametrize("t, k, e, d, f", CASES)
def test_values(t, k, e, d, f, activation):
    rng = np.random.default_rng([t, d])
    shapes = (t, d), (t, k), (e, f, d), (e, f, d), (e, d, f)
    x, weights, gate, up, down = (
        jnp.asarray(rng.standard_normal(s) / 4, jnp.float32) for s in shapes
    )
    ids = rng.integers(-1, e + 1, (t, k))  # some are no expert's
    with interpreted():
        y = few_tokens.moe_ffn_few(
            x, jnp.asarray(ids), weights, gate, up, down, activation=activation
        )
    x, weights, gate, up, down = (
        np.asarray(a, np.float64) for a in (x, weights, gate, up, down)
    )
    truth = dense_loop(x, ids, weights, gate, up, down, activation)
    assert np.linalg.norm(y - truth) <= 1e-6 * np.linalg.norm(truth)


@alone
@pytest.mark.parametrize("t, k, e, d, f", CASES)
def test_values_with_all_that_stands_around(t, k, e, d, f):
    """Biases, a shared expert, what is added, and the gate of gpt-oss."""
    rng = np.random.default_rng([t, d])
    ids = rng.integers(-1, e + 2, (t, k))
    ids[0, -1] = e  # the shared one
    x, weights, residual = (rng.standard_normal(s) for s in ((t, d), (t, k), (t, d)))
    gate, up, down = (rng.standard_normal(s) / 4 for s in [(e, f, d)] * 2 + [(e, d, f)])
    biases = [rng.standard_normal(s) for s in ((e, f), (e, f), (e, d))]
    shared = [rng.standard_normal(s) / 4 for s in ((2 * f, d), (d, f))]
    given = (x, weights, gate, up, down, *biases, *shared, residual)
    rounded = [jnp.asarray(a, jnp.float32) for a in given]
    [x, weights, gate, up, down, gb, ub, db, both, back, residual] = rounded
    with interpreted():
        wide = both.reshape(2, f, d), gb[:, None], ub
        y = dense.dense_expert_hidden(x, ids, gate[:, None], up, *wide, **GPT_OSS)
        packed = jnp.stack([gate, up], 1), None, wide[0], jnp.stack([gb, ub], 1), None
        same = dense.dense_expert_hidden(x, ids, *packed, **GPT_OSS)
        z = dense.dense_expert_sum(y, ids, weights, down, back, db, residual)
    wide = [np.asarray(a, np.float64) for a in rounded]
    x, weights, gate, up, down, gb, ub, db, both, back, residual = wide
    truth = hidden_of(x, ids, gate, up, (gb, ub), both, GPT_OSS)
    assert np.linalg.norm(y - truth) <= 1e-6 * np.linalg.norm(truth)
    np.testing.assert_array_equal(same, y)
    truth = sum_of(np.asarray(y, np.float64), ids, weights, down, db, residual, back)
    assert np.linalg.norm(z - truth) <= 1e-6 * np.linalg.norm(truth)


@alone
@pytest.mark.parametrize("t, k, e, d, f", CASES)
def test_values_of_eight_bits_with_a_scale_for_each_row(t, k, e, d, f):
    """Those of an expert that every token passes among them."""
    rng = np.random.default_rng([t, d])
    ids = rng.integers(-1, e + 2, (t, k))
    ids[0, -1] = e  # the shared one
    shapes = (t, d), (t, k), (t, d), (e, f), (e, f), (e, d)
    given = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]
    x, weights, residual, gb, ub, db = given
    every = [
        quantize_fp8(jnp.asarray(rng.standard_normal(s) / 4, jnp.float32), block=(1, 0))
        for s in [(e, f, d)] * 2 + [(e, d, f), (2, f, d), (d, f)]
    ]
    codes, scales = [w.codes for w in every], [w.scales[..., 0] for w in every]
    options = dict(GPT_OSS, format="e4m3fn")
    with interpreted():
        apart = codes[0][:, None], scales[0][:, None], codes[1], scales[1]
        of_all = codes[3], scales[3]
        y = fp8.fp8_expert_hidden(x, ids, *apart, *of_all, gb[:, None], ub, **options)
        both = jnp.stack(codes[:2], 1), jnp.stack(scales[:2], 1), None, None, *of_all
        biases = jnp.stack([gb, ub], 1), None
        same = fp8.fp8_expert_hidden(x, ids, *both, *biases, **options)
        down_arrays = codes[2], scales[2], codes[4], scales[4]
        z = fp8.fp8_expert_sum(
            y, ids, weights, *down_arrays, db, residual, format="e4m3fn"
        )
    x, weights, residual, gb, ub, db = (np.asarray(a, np.float64) for a in given)
    gate, up, down, both, back = (np.asarray(dequantize(w), np.float64) for w in every)
    both = both.reshape(2 * f, d)
    truth = hidden_of(x, ids, gate, up, (gb, ub), both, GPT_OSS)
    assert np.linalg.norm(y - truth) <= 1e-6 * np.linalg.norm(truth)
    np.testing.assert_array_equal(same, y)
    truth = sum_of(np.asarray(y, np.float64), ids, weights, down, db, residual, back)
    assert np.linalg.norm(z - truth) <= 1e-6 * np.linalg.norm(truth)


@alone
def test_the_sum_of_long_rows_has_steps():
    rng = np.random.default_rng(0)
    shapes = (2, 3, 2100), (2, 3), (2, 4, 9, 2100), (9, 2100), (2, 9)
    given = [jnp.asarray(rng.standard_normal(s) / 4, jnp.float32) for s in shapes]
    hidden, weights, (down, narrow), back, residual = given
    ids = np.array([[1, 4, -1], [3, 2, 0]])
    narrow, of_all = (quantize_fp8(w, block=(1, 0)) for w in (narrow, back))
    arrays = [a for w in (narrow, of_all) for a in (w.codes, w.scales[..., 0])]
    with interpreted():
        y = dense.dense_expert_sum(hidden, ids, weights, down, back, None, residual)
        z = fp8.fp8_expert_sum(
            hidden, ids, weights, *arrays, None, residual, format="e4m3fn"
        )
    hidden, weights, residual = (
        np.asarray(a, np.float64) for a in (hidden, weights, residual)
    )
    for found, of_one, of_each in (
        (y, back, down),
        (z, dequantize(of_all), dequantize(narrow)),
    ):
        kept = np.float64(of_each), None, residual, np.float64(of_one)
        truth = sum_of(hidden, ids, weights, *kept)
        assert np.linalg.norm(found - truth) <= 1e-6 * np.linalg.norm(truth)


@starts_it
@pytest.mark.skipif(bridge.missing() is not None, reason="triton is not installed")
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_and_fit(capability):
    spec = jax.ShapeDtypeStruct
    x, ids = spec((1, 2048), jnp.bfloat16), spec((1, 8), jnp.int32)
    gate, down = (spec((256, *s), jnp.bfloat16) for s in [(512, 2048), (2048, 512)])
    weights = spec((1, 8), jnp.bfloat16)
    with compiling_for(capability):
        operands = x, ids, weights, gate, gate, down
        for activation in ("swiglu", "geglu"):

            def f(*operands, activation=activation):
                return moe_ffn(*operands, activation=activation)

            rows: Any = explain(f, *operands, platform="cuda").rows
            [row] = rows
            assert row.op == "moe_ffn_few" and len(row.launches) == 2
            for launch in row.launches:
                assert compiled(launch, capability).asm["cubin"]
                assert launch.stack_bytes == 0
            if capability >= 90:
                waits = dict(row.launches[1].constants) | {"AHEAD": READ_EARLIER}
                launch = row.launches[1]._replace(constants=tuple(waits.items()))
                assert launch.stack_bytes == 0
