import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain
from jaxkern.interop.jax_nn import (
    dot_product_attention,
    ragged_dot,
    ragged_dot_general,
)
from tests.interop.signatures import signature_of

RNG = np.random.default_rng(0)
B, T, S, N, K, H = 2, 5, 7, 4, 2, 8


def draw(*shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def heads(batch=(B,)):
    return draw(*batch, T, N, H), draw(*batch, S, K, H), draw(*batch, S, K, H)


def random_mask(*shape):
    """Every query sees the first key."""
    return jnp.asarray(RNG.random(shape) < 0.5).at[..., 0].set(True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "local_window_size": 2, "scale": 0.3},
        {"local_window_size": (1, 3)},
        {"bias": draw(1, N, T, S), "mask": random_mask(B, 1, T, S)},
        {"bias": draw(N, 1, S)},
        {
            "query_seq_lengths": jnp.array([3, 5]),
            "key_value_seq_lengths": jnp.array([7, 2]),
        },
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_values_and_gradients_of_attention(options):
    def run(f):
        def loss(*qkv):
            out = f(*qkv, **options)
            return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))

    operands = heads()
    found = run(dot_product_attention)(*operands)
    expected = run(jax.nn.dot_product_attention)(*operands)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
        *(found, expected),
    )


def test_residual_and_no_batch():
    q, k, v = heads(())
    found = dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    expected = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, return_residual=True
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_implementation_is_the_backend():
    q, k, v = heads()
    found = explain(
        lambda *x: dot_product_attention(*x, implementation="xla"),
        *(q, k, v),
        platform="cuda",
    )
    assert found.rows[0].runs.startswith("xla")
    with pytest.raises(ValueError, match=r"`implementation` must .* 'cudnn'"):
        dot_product_attention(q, k, v, implementation="cudnn")
    with pytest.raises(ValueError, match=r"batch dims differ .*\(1, 7, 2, 8\)"):
        dot_product_attention(q, k[:1], v)


@pytest.mark.parametrize(
    "precision",
    [None, (jax.lax.Precision.HIGHEST,) * 2, jax.lax.DotAlgorithmPreset.F32_F32_F32],
)
def test_ragged_dot(precision):
    lhs, rhs = draw(10, 6), draw(3, 6, 4)
    sizes = jnp.array([4, 0, 5])

    def run(f):
        def loss(lhs, rhs):
            y = f(lhs, rhs, sizes, precision)[:9]  # jax leaves the others undefined
            return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum(), y

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

    found, expected = run(ragged_dot)(lhs, rhs), run(jax.lax.ragged_dot)(lhs, rhs)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
        *(found, expected),
    )


def test_ragged_dot_of_two_dtypes_and_what_it_lacks():
    lhs, rhs, sizes = draw(4, 6, dtype="bfloat16"), draw(2, 6, 3), jnp.array([2, 2])
    assert ragged_dot(lhs, rhs, sizes).dtype == jnp.float32
    narrow = ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="ragged_dot: `precision` must"):
        ragged_dot(lhs, rhs, sizes, precision=("high", "highest"))


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (dot_product_attention, jax.nn.dot_product_attention),
        (ragged_dot, jax.lax.ragged_dot),
        (ragged_dot_general, jax.lax.ragged_dot_general),
    ],
)
def test_signatures(ours, theirs):
    assert signature_of(ours) == signature_of(theirs)
