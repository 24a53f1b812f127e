"""latent_attention: attention whose values are the first dims of its keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern import Dropout, attention, latent_attention
from jaxkern.testing.checks import bf16, case, f32, i32

CASES = [
    case(
        "everything",
        query=f32(2, 2, 3, 6),
        latent=f32(2, 5, 6),
        kv_lengths=i32(2, low=2, high=6),
        q_offset=i32(2, low=0, high=4),
        value_dim=4,
        scale=0.4,
        causal=True,
        window=3,
        softcap=2.0,
    ),
    case(
        "plain_bf16",
        query=bf16(1, 1, 2, 6),
        latent=bf16(1, 3, 6),
        value_dim=6,
        scale=0.4,
        causal=False,
    ),
    case(
        "deepseek_v3_decode",
        full=True,
        query=bf16(2, 1, 128, 576),
        latent=bf16(2, 100, 576),
        kv_lengths=i32(2, low=1, high=101),
        value_dim=512,
        scale=192**-0.5,
        causal=False,
    ),
]


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def test_is_attention_whose_values_are_a_part_of_the_keys():
    query, latent = draw(2, 3, 4, 10), draw(2, 7, 10, seed=1)
    lengths = jnp.array([7, 4])
    options: dict = dict(
        kv_lengths=lengths, q_offset=lengths - 3, causal=True, return_lse=True
    )

    def whole(query, latent):
        key = latent[:, :, None]
        return attention(query, key, key[..., :6], scale=0.3, **options)

    def ours(query, latent):
        return latent_attention(query, latent, value_dim=6, scale=0.3, **options)

    def results(f):
        y, pull = jax.vjp(f, query, latent)
        return y, pull(jax.tree.map(jnp.cos, y))

    found, expected = results(ours), results(whole)
    for y, e in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(y, e, atol=2e-6)
    assert np.abs(found[1][1][:, :, 6:]).max() > 0.01


def test_absorbed_projections_give_multi_head_attention():
    """Keys and values made from the latent, head by head, in float64."""
    rng = np.random.default_rng(0)
    n, c, r, d = 3, 8, 4, 5
    latent, q = rng.standard_normal((6, c + r)), rng.standard_normal((n, d + r))
    up_key, up_value = rng.standard_normal((2, n, c, d))
    absorbed = np.concatenate([np.einsum("nd,ncd->nc", q[:, :d], up_key), q[:, d:]], 1)
    scale = (d + r) ** -0.5
    out = latent_attention(
        jnp.float32(absorbed)[None, None],
        jnp.float32(latent)[None],
        value_dim=c,
        scale=scale,
    )[0, 0]
    for i in range(n):
        key = np.concatenate([latent[:, :c] @ up_key[i], latent[:, c:]], 1)
        p = np.exp(scale * key @ q[i])
        expected = (p / p.sum()) @ (latent[:, :c] @ up_value[i])
        np.testing.assert_allclose(out[i] @ up_value[i], expected, rtol=2e-4)


def test_errors():
    query, latent = draw(1, 1, 2, 6), draw(1, 3, 6)
    with pytest.raises(ValueError, match="value_dim is 7, not 1 to 6"):
        latent_attention(query, latent, value_dim=7, scale=1.0)
    with pytest.raises(TypeError, match="`latent` must have 3 dims"):
        latent_attention(query, latent[None], value_dim=2, scale=1.0)
    with pytest.raises(TypeError, match="dim `h`"):
        latent_attention(query, latent[..., :5], value_dim=2, scale=1.0)
    with pytest.raises(ValueError, match="ambiguous"):
        latent_attention(
            query, latent, value_dim=2, scale=1.0, kv_lengths=2, causal=True
        )
    with pytest.raises(ValueError, match="softcap"):
        latent_attention(query, latent, value_dim=2, scale=1.0, softcap=0.0)


def test_lengths_that_are_cut_alone_on_an_explicit_mesh():
    """The generic check draws one operand that is cut alone for each operator, by its
    name: the lengths of none of these. Their gradients raised."""
    query, latent = jnp.asarray(draw(4, 2, 4, 8)), jnp.asarray(draw(4, 6, 8))
    lengths, at = jnp.array([3, 4, 5, 6]), jnp.array([1, 2, 3, 4])

    def loss(query, latent, lengths, at):
        options = dict(scale=0.3, causal=True, q_offset=at, kv_lengths=lengths)
        rows = latent[:, :, None]
        each = [
            latent_attention(query, latent, value_dim=4, **options),
            attention(query, rows, rows, **options),
        ]
        return sum(jnp.sum(jnp.sin(x)) for x in each)

    grad = jax.jit(jax.grad(loss, (0, 1)))
    expected = grad(query, latent, lengths, at)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows, cut = (NamedSharding(mesh, spec) for spec in (P(), P("x")))
        found = grad(
            *(jax.device_put(x, rows) for x in (query, latent)),
            *(jax.device_put(x, cut) for x in (lengths, at)),
        )
        assert all(x.sharding.is_equivalent_to(rows, x.ndim) for x in found)
    for x, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, e, atol=1e-5)


def test_dropout_is_that_of_attention_and_caches_have_none():
    """The checks of every op are of primitives, and that of latent_attention has no
    dropout: none of them would see the options lost on the way."""
    query, latent = draw(1, 3, 2, 4), draw(1, 3, 4, seed=1)
    key = jax.random.key(7)
    options: dict = dict(scale=0.4, causal=True)

    def whole(query, latent, rate):
        k, v = latent[:, :, None], latent[:, :, None, :2]
        return attention(query, k, v, dropout=Dropout(rate, key), **options)

    def of_latent(query, latent, rate):
        dropout = Dropout(rate, key)
        return latent_attention(query, latent, value_dim=2, dropout=dropout, **options)

    def both(f, rate):
        return jax.vjp(lambda *x: f(*x, rate), query, latent)[1](jnp.ones((1, 3, 2, 2)))

    expected = both(whole, 0.5)
    for x, e in zip(both(of_latent, 0.5), expected, strict=True):
        np.testing.assert_array_equal(x, e)
    assert not np.allclose(expected[1], both(of_latent, 0.0)[1])
    with pytest.raises(
        TypeError, match=r"^latent_attention: `dropout` must be Dropout"
    ):
        latent_attention(query, latent, value_dim=2, scale=0.4, dropout=0.5)
    for f in ("paged_attention", "quantized_cache_attention", "cached_attention"):
        with pytest.raises(TypeError, match=rf"{f}.*unexpected.*dropout"):
            getattr(jaxkern, f)(query, latent, latent, dropout=Dropout(0.5, key))
