"""qkv_rope: the slices of a product, two of them by apply_rope, and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import apply_rope, qkv_rope
from jaxkern.testing.checks import bf16, case, f32


def shapes(*qkv, r, spec=f32):
    *lead, t, _, _ = qkv
    tables = dict(cos=f32(*lead, t, r), sin=f32(*lead, t, r), pair_offset=r)
    return dict(qkv=spec(*qkv)) | tables


CASES = [
    case("plain", **shapes(2, 3, 4, 8, r=4), kv_heads=1),
    case("interleaved", **shapes(2, 4, 6, r=2), kv_heads=2, pairing="interleaved"),
    case("partial", **shapes(2, 5, 11, r=3) | {"pair_offset": 5}, kv_heads=1),
    case("no_keys", **shapes(2, 2, 4, r=2), kv_heads=0),
    case("llama", full=True, **shapes(1, 64, 48, 128, r=64, spec=bf16), kv_heads=8),
]


def draw(*shape, seed=0):
    return jnp.float32(np.random.default_rng([seed, *shape]).standard_normal(shape))


@pytest.mark.parametrize("pairing", ["neox", "interleaved"])
def test_values_and_gradients_are_those_of_the_slices(pairing):
    qkv, cos, sin = draw(2, 3, 7, 8), draw(3, 3), draw(3, 3, seed=1)

    def sliced(qkv):
        q, k, v = qkv[:, :, :3], qkv[:, :, 3:5], qkv[:, :, 5:]
        return *(apply_rope(x, cos, sin, pairing=pairing) for x in (q, k)), v

    expected, pull = jax.vjp(sliced, qkv)
    found, own_pull = jax.vjp(
        lambda qkv: qkv_rope(qkv, cos, sin, kv_heads=2, pairing=pairing), qkv
    )
    cotangents = tuple(draw(*y.shape, seed=2) for y in expected)
    for y, e in zip(found, expected, strict=True):
        np.testing.assert_array_equal(y, e)
    np.testing.assert_allclose(own_pull(cotangents)[0], pull(cotangents)[0], rtol=1e-6)


def test_refusals():
    qkv, table = jnp.ones((3, 4, 8)), jnp.ones((3, 4))
    with pytest.raises(ValueError, match=r"qkv_rope: `kv_heads` .* 4 heads .* got 3"):
        qkv_rope(qkv, table, table, kv_heads=3)
    with pytest.raises(ValueError, match=r"qkv_rope: `kv_heads` .* got -1"):
        qkv_rope(qkv, table, table, kv_heads=-1)
    with pytest.raises(ValueError, match="qkv_rope: pairing 'halves'"):
        qkv_rope(qkv, table, table, kv_heads=1, pairing="halves")
    with pytest.raises(TypeError, match="qkv_rope: `x` must have dims"):
        qkv_rope(qkv[0], table, table, kv_heads=1)
