"""Experts of one token by whole numbers on Hopper against float64, and in a chain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend
from jaxkern.lowering.chained import chained
from jaxkern.primitives.moe.expert_slots import expert_hidden, expert_sum
from jaxkern.primitives.moe.norm_route import norm_route_p
from tests.gpu.truth import on_hopper, poison, relative_error
from tests.primitives.moe.test_expert_slots import GPT_OSS, PLAIN, hidden_of, sum_of
from tests.triton.moe.test_expert_slots import drawn

pytestmark = on_hopper

SIZES = {  # experts, dims, channels
    "MXFP4": (5, 2880, 672),  # more tiles than programs; neither is whole steps
    "NVFP4_256": (6, 768, 512),
    "Q4_K": (6, 2304, 512),
    "Q5_K": (6, 768, 256),
    "Q6_K": (6, 512, 1024),
    "Q8_0": (6, 1280, 256),
    "AFFINE4_64_BF16": (6, 512, 256),
}


def layer_of(rng, form, shared, e, d, f):
    """(arrays, the same in float64) of gate, up, down and the shared expert's two."""
    shapes = [(e, f, d), (e, f, d), (e, d, f)]
    shapes += [(2 * f, d), (d, f)] if shared else []
    made = [drawn(rng, form, *s) for s in shapes]
    arrays = [jax.tree.map(jnp.asarray, w) for w, _ in made]
    nothing = [None] * (5 - len(made))
    return [*arrays, *nothing], [*(values for _, values in made), *nothing]


def size_of(w):
    """What the products of experts have for normal x, on average."""
    return np.sqrt(np.square(w).sum(-1).mean())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("form", SIZES)
def test_one_token(form, shared):
    e, d, f = SIZES[form]
    rng = np.random.default_rng([d, shared])
    (gate, up, down, both, back), (g, u, w, b, v) = layer_of(rng, form, shared, e, d, f)
    k = 9 if shared else 4
    ids = rng.permutation(np.arange(-1, e + 3))[None, :k].astype(np.int32)
    ids[0, :2], ids[0, -1] = (e - 1, e + 1), e  # of none; shared, if there is one
    x = jnp.asarray(rng.standard_normal((1, d)) / size_of(g), jnp.bfloat16)
    weights = jnp.asarray(rng.uniform(0, 1, (1, k)) / size_of(w), jnp.float32)
    biases = [None] * 3
    if not shared:
        sizes = (e, f), (e, f), (e, d)
        biases = [rng.standard_normal(s).astype(np.float32) for s in sizes]
    residual = None if shared else jnp.asarray(rng.standard_normal((1, d)), x.dtype)
    options = PLAIN if shared else GPT_OSS
    poison(jnp.zeros((1, k, f), x.dtype), x)
    hidden = functools.partial(expert_hidden, **options)
    with backend("triton", strict=True):
        y = jax.jit(hidden)(x, ids, gate, up, *biases[:2], both)
        z = jax.jit(expert_sum)(y, ids, weights, down, biases[2], residual, back)
    x, weights, y, residual = (
        None if a is None else np.asarray(a, np.float64)
        for a in (x, weights, y, residual)
    )
    truth = hidden_of(x, ids, g, u, biases[:2], b, options)
    assert relative_error(y, truth) < 4e-3
    truth = sum_of(y, ids, weights, w, biases[2], residual, v)
    assert relative_error(z, truth) < 4e-3


@pytest.mark.parametrize("form", ["MXFP4", "Q4_K"])
def test_layers_in_a_chain_are_the_same_numbers(form):
    """The sum asks for its weights while gate and up run: by ids that are there."""
    e, d, f = 16, 768, 512
    rng = np.random.default_rng(0)
    (gate, up, down, both, back), _ = layer_of(rng, form, True, e, d, f)
    choice = dict(eps=1e-5, shared=True, k=4, score="softmax", normalize=True)
    choice |= dict(num_groups=1, top_groups=1, group_score="max", scaling_factor=1.0)
    norm, router = jnp.ones(d), jnp.asarray(rng.standard_normal((e, d)), jnp.float32)

    def layers(x, norm, router, *w):
        gate, up, down, both, back = w
        for _ in range(8):
            normal, weights, ids = norm_route_p(
                *(x, norm, router, None, None, None), **choice
            )
            y = expert_hidden(normal, ids, gate, up, None, None, both, **PLAIN)
            x = expert_sum(y, ids, weights, down, None, x, back)
        return x

    operands = norm, router, gate, up, down, both, back
    apart, together = jax.jit(layers), jax.jit(chained(layers))
    x = jnp.asarray(rng.standard_normal((1, d)), jnp.bfloat16)
    assert "jaxkern_launch_chain" in together.lower(x, *operands).as_text()
    for _ in range(50):
        x = jnp.asarray(rng.standard_normal((1, d)), jnp.bfloat16)
        found, expected = together(x, *operands), apart(x, *operands)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
