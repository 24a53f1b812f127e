"""head_norm_rope: norm, then rotation, of every head; the tails; one rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import apply_rope, head_norm_rope, rms_norm, rope_cos_sin
from jaxkern.testing.checks import bf16, case, f16, f32
from tests.primitives.norm.test_rms_norm import formula as norm


def shapes(*x, r, spec=f32):
    *lead, t, _, h = x
    tables = dict(cos=f32(*lead, t, r), sin=f32(*lead, t, r), pair_offset=r)
    return dict(x=spec(*x), weight=spec(h)) | tables


CASES = [
    case("plain", **shapes(2, 3, 2, 8, r=3), offset=1.0),
    case("no_weight", **shapes(3, 2, 6, r=2) | {"weight": None}, pairing="interleaved"),
    case("at_end", **shapes(2, 2, 1, 6, r=2), at_end=True),
    case(
        "proportional",
        full=True,
        **shapes(2, 2, 1, 8, r=2, spec=f16) | {"pair_offset": 4},
    ),
    case("qwen3_8b", full=True, **shapes(1, 16, 32, 128, r=64, spec=bf16)),
    case("qwen3_next", full=True, **shapes(1, 8, 16, 256, r=32, spec=bf16)),
]
PAIRS = {  # options, and the pairs of a head of 12 dims
    "neox": (dict(), [(i, i + 6) for i in range(6)]),
    "partial": (dict(), [(i, i + 4) for i in range(4)]),
    "proportional": (dict(pair_offset=6), [(i, i + 6) for i in range(2)]),
    "interleaved": (
        dict(pairing="interleaved"),
        [(2 * i, 2 * i + 1) for i in range(6)],
    ),
    "partial interleaved": (
        dict(pairing="interleaved"),
        [(2 * i, 2 * i + 1) for i in range(3)],
    ),
    "at_end": (dict(at_end=True), [(4 + i, 8 + i) for i in range(4)]),
    "at_end interleaved": (
        dict(pairing="interleaved", at_end=True),
        [(6 + 2 * i, 7 + 2 * i) for i in range(3)],
    ),
}


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def turned(x, cos, sin, pairs):
    """x `[..., t, n, h]` with each pair turned by its column of the tables."""
    y = np.array(x)
    for i, (a, b) in enumerate(pairs):
        c, s = cos[..., :, None, i], sin[..., :, None, i]
        y[..., a] = x[..., a] * c - x[..., b] * s
        y[..., b] = x[..., b] * c + x[..., a] * s
    return y


@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "no_weight"])
@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients_match_the_formula(name, weighted):
    options, pairs = PAIRS[name]
    x, dy = draw(2, 3, 2, 12), draw(2, 3, 2, 12, seed=1)
    weight = draw(12) if weighted else None
    cos, sin = draw(2, 3, len(pairs)), draw(2, 3, len(pairs), seed=1)
    scale = 1.0 if weight is None else weight + 1
    y, vjp = jax.vjp(
        lambda *operands: head_norm_rope(*operands, eps=0.1, offset=1.0, **options),
        *(None if a is None else jnp.float32(a) for a in (x, weight, cos, sin)),
    )
    normed = norm(x, eps=0.1) * scale
    np.testing.assert_allclose(y, turned(normed, cos, sin, pairs), atol=1e-5)

    dx, dweight, dcos, dsin = vjp(jnp.float32(dy))
    dnormed = turned(dy, cos, -sin, pairs)
    r = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1)
    dxhat = dnormed * scale
    expected = r * dxhat - x * r**3 * (dxhat * x).mean(-1, keepdims=True)
    np.testing.assert_allclose(dx, expected, atol=2e-5)
    if weighted:
        np.testing.assert_allclose(dweight, (dnormed * x * r).sum((0, 1, 2)), atol=2e-5)
    a, b = ([p[side] for p in pairs] for side in (0, 1))
    expected = (dy[..., a] * normed[..., a] + dy[..., b] * normed[..., b]).sum(-2)
    np.testing.assert_allclose(dcos, expected, atol=2e-5)
    expected = (dy[..., b] * normed[..., a] - dy[..., a] * normed[..., b]).sum(-2)
    np.testing.assert_allclose(dsin, expected, atol=2e-5)


def test_it_is_norm_then_rotation():
    x, weight = jnp.float32(draw(2, 3, 2, 8)), jnp.float32(draw(8))
    cos, sin = rope_cos_sin(jnp.asarray([3, 4, 9]), 6)  # shared by the batch
    expected = apply_rope(rms_norm(x, weight), cos, sin)
    np.testing.assert_allclose(head_norm_rope(x, weight, cos, sin), expected, atol=1e-6)
    rotated_first = rms_norm(apply_rope(x, cos, sin), weight)
    assert np.abs(rotated_first - expected).max() > 0.1


def test_half_precision_is_rounded_once():
    x = jnp.asarray(draw(1, 8, 2, 16), jnp.bfloat16)
    weight = jnp.asarray(draw(16), jnp.bfloat16)
    tables = rope_cos_sin(jnp.arange(8), 16)
    y = head_norm_rope(x, weight, *tables)
    exact = head_norm_rope(x.astype(jnp.float32), weight, *tables)
    np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))


def test_large_half_precision_values_do_not_overflow():
    x = jnp.full((1, 1, 1, 4), 6e4, jnp.float16)
    tables = rope_cos_sin(jnp.zeros(1, int), 4)
    np.testing.assert_array_equal(head_norm_rope(x, None, *tables), np.ones(x.shape))


def test_every_error_says_what_to_do():
    x, weight = jnp.zeros((1, 3, 2, 8)), jnp.zeros(8)
    cos, sin = rope_cos_sin(jnp.arange(3), 8)
    with pytest.raises(ValueError, match=r"head_norm_rope: pairing 'norm' is not"):
        head_norm_rope(x, weight, cos, sin, pairing="norm")
    with pytest.raises(ValueError, match=r"head_norm_rope: 4 pairs at distance 6 do"):
        head_norm_rope(x, weight, cos, sin, pair_offset=6)
    with pytest.raises(TypeError, match=r"head_norm_rope: dim `h` is 8 in `x` but 4"):
        head_norm_rope(x, weight[:4], cos, sin)
