"""moe_weighted_reduce against its formula and gradients in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import moe_weighted_reduce
from jaxkern.testing.checks import bf16, case, f32

CASES = [
    case(
        "plain",
        expert_out=f32(8, 3, 5),
        weights=f32(8, 3),
        shared=f32(8, 5),
        shared_gate=f32(8),
        residual=f32(8, 5),
    ),
    case("empty", expert_out=f32(0, 2, 4), weights=f32(0, 2)),
    case("one", expert_out=bf16(1, 16), weights=f32(1), shared=bf16(16)),
    case("qwen3_30b", expert_out=bf16(64, 8, 2048), weights=f32(64, 8), full=True),
]


def test_values_and_gradients_match_the_formula():
    rng = np.random.default_rng(0)
    y, w, shared, gate, residual, dy = (
        rng.standard_normal(s)
        for s in [(2, 4, 3, 5), (2, 4, 3), (2, 4, 5), (2, 4), (2, 4, 5), (2, 4, 5)]
    )
    s = 1 / (1 + np.exp(-gate))
    with jax.enable_x64(True):
        out, vjp = jax.vjp(moe_weighted_reduce, y, w, shared, gate, residual)
        grads = vjp(jnp.asarray(dy))
    expected = np.einsum("btkd,btk->btd", y, w) + s[..., None] * shared + residual
    np.testing.assert_allclose(out, expected, rtol=1e-12)
    for g, e in zip(
        grads,
        (
            np.einsum("btd,btk->btkd", dy, w),
            np.einsum("btd,btkd->btk", dy, y),
            s[..., None] * dy,
            s * (1 - s) * (shared * dy).sum(-1),
            dy,
        ),
        strict=True,
    ):
        np.testing.assert_allclose(g, e, rtol=1e-12)


def test_a_shared_expert_without_a_gate_is_added():
    y = moe_weighted_reduce(jnp.ones((2, 3)), jnp.ones(2), jnp.full(3, 0.25))
    np.testing.assert_array_equal(y, [2.25, 2.25, 2.25])


def test_the_result_has_the_dtype_of_the_residual():
    """And is rounded once: bfloat16 sums would lose the small terms."""
    y = jnp.asarray([[256.0], [0.5], [0.5]], jnp.bfloat16)
    weights = jnp.ones(3)
    assert moe_weighted_reduce(y, weights).dtype == jnp.bfloat16
    out = moe_weighted_reduce(y, weights, residual=jnp.asarray([1.0]))
    assert out.dtype == jnp.float32 and out[0] == 258


def test_a_gate_needs_a_shared_expert():
    with pytest.raises(ValueError, match="`shared_gate` needs `shared`"):
        moe_weighted_reduce(jnp.ones((2, 3)), jnp.ones(2), None, jnp.ones(()))
