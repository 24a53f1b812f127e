"""Packed experts of many tokens on a GPU against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain, interleave, quantize_gguf, quantize_microscaled
from jaxkern.primitives.moe.expert_slots import expert_hidden, expert_sum
from jaxkern.triton.moe.slot_order import slot_order
from tests.gpu.quant.row_checks import normal, on_the_cpu, rounded
from tests.gpu.truth import on_hopper, poison, relative_error
from tests.primitives.moe.test_expert_slots import GPT_OSS

pytestmark = on_hopper

E = 6
FORMS = {
    **{
        qtype: lambda w, qtype=qtype: interleave(quantize_gguf(w, qtype))
        for qtype in ("Q4_K", "Q5_K", "Q6_K", "Q8_0")
    },
    "mxfp4": functools.partial(quantize_microscaled, format="mxfp4"),
    "MXFP4": lambda w: interleave(quantize_microscaled(w, format="mxfp4")),
    "NVFP4_256": lambda w: interleave(
        quantize_microscaled(w, format="nvfp4", two_level=False)
    ),
}
SIZES = {  # dims and channels that nothing divides, as far as the container has them
    **{"Q4_K": (768, 512), "Q5_K": (512, 256), "Q6_K": (512, 256), "Q8_0": (544, 352)},
    **{"mxfp4": (2880, 672), "MXFP4": (608, 224), "NVFP4_256": (768, 256)},
}


@functools.cache
def drawn(form, *shape, seed):
    """(weights on the GPU, their values in float64)."""
    return on_the_cpu(FORMS[form], normal(shape, seed) / shape[-1] ** 0.5)


def skewed(tokens, k, seed):
    """Half of the slots are of one expert, few of others, none of one, some of none."""
    rng = np.random.default_rng(seed)
    share = np.array([0.02, 0.02, 0.5, 0.0, 0.16, 0.25, 0.01, 0.04])
    return rng.choice(np.arange(-1, E + 1), (tokens, k), p=share).astype(np.int32)


def products(x, ids, w, bias):
    """w[ids] x + bias of x `[slots, d]` in float64, zero for an id outside."""
    y = np.zeros((ids.size, w.shape[1]))
    for e in range(E):
        rows = np.flatnonzero(ids.ravel() == e)
        y[rows] = x[rows] @ w[e].T + bias[e]
    return y


def wide(x):
    return np.asarray(x, np.float64)


def check(found, f, *weights):
    """An error may be 1.5 times that of weights and result rounded to bfloat16."""
    truth = f(*weights)
    plain = relative_error(rounded(f(*map(rounded, weights))), truth)
    assert relative_error(found, truth) <= 1.5 * plain


@pytest.mark.parametrize("tokens, k", [(9, 4), (301, 4)])
@pytest.mark.parametrize("form", SIZES)
def test_many_tokens(form, tokens, k):
    d, f = SIZES[form]
    rng = np.random.default_rng([tokens, d])
    (gate, g), (up, u) = (drawn(form, E, f, d, seed=i) for i in range(2))
    down, w = drawn(form, E, d, f, seed=2)
    x = jnp.asarray(rng.standard_normal((tokens, d)), jnp.bfloat16)
    ids = skewed(tokens, k, d)
    weights = jnp.asarray(rng.uniform(0, 1, ids.shape), jnp.float32)
    biases = [rng.standard_normal(s).astype(np.float32) for s in ((E, f),) * 2]
    bias = rng.standard_normal((E, d)).astype(np.float32)
    hidden = functools.partial(expert_hidden, **GPT_OSS)
    poison(jnp.zeros((tokens, k, f), x.dtype), x)
    found = explain(hidden, x, ids, gate, up, *biases)
    assert "grouped_hidden_kernel" in str(found)
    y = jax.jit(hidden)(x, ids, gate, up, *biases)
    z = jax.jit(expert_sum)(y, ids, weights, down, bias, x)
    rows = np.repeat(wide(x), k, axis=0)
    known = ((ids >= 0) & (ids < E)).reshape(-1, 1)

    def gated(g, u):
        a = np.minimum(products(rows, ids, g, biases[0]), 7.0)
        b = np.clip(products(rows, ids, u, biases[1]), -7.0, 7.0)
        return np.where(known, a / (1 + np.exp(-1.702 * a)) * (b + 1), 0)

    def summed(w):
        slots = products(wide(y).reshape(-1, f), ids, w, bias).reshape(tokens, k, d)
        return (wide(weights)[..., None] * slots).sum(1) + wide(x)

    check(y.reshape(-1, f), gated, g, u)
    check(z, summed, w)
    again = jax.jit(expert_sum)(y, ids, weights, down, bias, x)
    np.testing.assert_array_equal(np.asarray(again, "f4"), np.asarray(z, "f4"))


def test_gate_and_up_in_one_array():
    d, f = SIZES["mxfp4"]
    x = jnp.asarray(normal((40, d), 5), jnp.bfloat16)
    ids = skewed(40, 4, 7)
    (gate, _), (up, _) = (drawn("mxfp4", E, f, d, seed=i) for i in range(2))
    both = jax.tree.map(lambda *a: jnp.concatenate(a, axis=1), gate, up)
    hidden = jax.jit(functools.partial(expert_hidden, **GPT_OSS))
    found, truth = (
        hidden(x, ids, both, None, None, None),
        hidden(x, ids, gate, up, None, None),
    )
    np.testing.assert_array_equal(np.asarray(found, "f4"), np.asarray(truth, "f4"))


@pytest.mark.parametrize("tokens, k, experts", [(1, 3, 5), (700, 8, 256)])
def test_slots_in_order(tokens, k, experts):
    rng = np.random.default_rng(tokens)
    ids = rng.integers(-1, experts + 1, (tokens, k)).astype(np.int32)
    order, sizes = jax.jit(functools.partial(slot_order, experts=experts))(ids)
    named = np.where((ids < 0) | (ids >= experts), experts, ids).ravel()
    np.testing.assert_array_equal(order, np.argsort(named, kind="stable"))
    np.testing.assert_array_equal(sizes, np.bincount(named, minlength=experts + 1)[:-1])
