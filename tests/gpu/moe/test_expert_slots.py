"""Experts slot by slot on a GPU against float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    backend,
    explain,
    interleave,
    quantize_fp8,
    quantize_gguf,
    quantize_microscaled,
)
from jaxkern.primitives.moe.expert_slots import expert_hidden, expert_sum
from tests.gpu.quant.row_checks import normal, on_the_cpu, rounded
from tests.gpu.truth import on_a_gpu, poison, relative_error
from tests.primitives.moe.test_expert_slots import GPT_OSS, PLAIN, hidden_of, sum_of

pytestmark = on_a_gpu

E = 6
FORMS = {
    "fp8": functools.partial(quantize_fp8, block=(1, 0)),
    "Q4_K": lambda w: interleave(quantize_gguf(w, "Q4_K")),
    "Q6_K": lambda w: interleave(quantize_gguf(w, "Q6_K")),
    "Q8_0": lambda w: interleave(quantize_gguf(w, "Q8_0")),
    "mxfp4": functools.partial(quantize_microscaled, format="mxfp4"),
    "nvfp4": functools.partial(quantize_microscaled, format="nvfp4", two_level=False),
}
SIZES = {  # dims and channels that nothing divides, as far as the container has them
    "bf16": (520, 200),
    "fp8": (520, 200),
    "Q4_K": (768, 512),
    "Q6_K": (512, 256),
    "Q8_0": (544, 352),
    "mxfp4": (2880, 672),
    "nvfp4": (672, 224),
}


@functools.cache
def drawn(form, *shape, seed):
    """(weights on the GPU, their values in float64)."""
    w = normal(shape, seed) / shape[-1] ** 0.5
    if form != "bf16":
        return on_the_cpu(FORMS[form], w)
    return jnp.asarray(w, jnp.bfloat16), rounded(w)


@pytest.mark.parametrize("tokens, k", [(1, 4), (8, 9)])
@pytest.mark.parametrize("form", SIZES)
def test_a_few_tokens(form, tokens, k):
    d, f = SIZES[form]
    rng = np.random.default_rng([tokens, d])
    (gate, g), (up, u) = (drawn(form, E, f, d, seed=i) for i in range(2))
    (down, w), (both, b) = drawn(form, E, d, f, seed=2), drawn(form, 2 * f, d, seed=3)
    back, v = drawn(form, d, f, seed=4)
    x = jnp.asarray(rng.standard_normal((tokens, d)), jnp.bfloat16)
    residual = jnp.asarray(rng.standard_normal((tokens, d)), jnp.bfloat16)
    ids = rng.integers(-1, E + 2, (tokens, k)).astype(np.int32)
    ids[:, -1] = E  # the shared one
    weights = jnp.asarray(rng.uniform(0, 1, (tokens, k)), jnp.float32)
    gate_bias, up_bias, bias = (
        rng.standard_normal(s).astype(np.float32) for s in ((E, f), (E, f), (E, d))
    )
    wide = [np.asarray(a, np.float64) for a in (x, weights, residual)]
    cases: list[tuple[Any, ...]] = [
        (PLAIN, (None, None, both), None, None, back),
        (GPT_OSS, (gate_bias, up_bias, None), bias, residual, None),
    ]
    for options, around, added, before, shared in cases:
        poison(jnp.zeros((tokens, k, f), x.dtype), residual)
        hidden = functools.partial(expert_hidden, **options)
        with backend("triton", strict=True):
            y = jax.jit(hidden)(x, ids, gate, up, *around)
            z = jax.jit(expert_sum)(y, ids, weights, down, added, before, shared)
        one = None if around[2] is None else b
        truth = hidden_of(wide[0], ids, g, u, around[:2], one, options)
        assert relative_error(y, truth) < 4e-3
        given = None if before is None else wide[2], None if shared is None else v
        found = np.asarray(y, np.float64)
        truth = sum_of(found, ids, wide[1], w, added, *given)
        assert relative_error(z, truth) < 4e-3


@pytest.mark.parametrize("tokens, k", [(1, 4), (8, 3)])
@pytest.mark.parametrize("form", SIZES)
def test_gate_and_up_of_one_array(form, tokens, k):
    d, f = SIZES[form]
    rng = np.random.default_rng([tokens, f])
    w, truth_of_w = drawn(form, E, 2 * f, d, seed=5)
    x = jnp.asarray(rng.standard_normal((tokens, d)), jnp.bfloat16)
    ids = rng.integers(-1, E + 2, (tokens, k)).astype(np.int32)
    bias = rng.standard_normal((E, 2 * f)).astype(np.float32)
    wide = np.asarray(x, np.float64)
    g, u = truth_of_w[:, :f], truth_of_w[:, f:]
    for options, added in ((PLAIN, None), (GPT_OSS, bias)):
        poison(jnp.zeros((tokens, k, f), x.dtype))
        hidden = functools.partial(expert_hidden, **options)
        with backend("triton", strict=True):
            y = jax.jit(hidden)(x, ids, w, None, added, None)
        halves = (None, None) if added is None else (bias[:, :f], bias[:, f:])
        truth = hidden_of(wide, ids, g, u, halves, None, options)
        assert relative_error(y, truth) < 4e-3


def test_no_tokens_are_the_reference():
    x, ids = jnp.zeros((0, 64), jnp.bfloat16), jnp.zeros((0, 2), jnp.int32)
    w = jnp.zeros((E, 32, 64), jnp.bfloat16)
    hidden = functools.partial(expert_hidden, **PLAIN)
    assert hidden(x, ids, w, w, None, None).shape == (0, 2, 32)
    assert "there are no elements" in str(explain(hidden, x, ids, w, w, None, None))
