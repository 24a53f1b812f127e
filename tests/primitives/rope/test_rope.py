"""apply_rope and rope: every pairing, partial rotaries, the transpose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import apply_rope, attention, rope, rope_cos_sin
from jaxkern.testing.checks import bf16, case, f16, f32


def shapes(*x, r, spec=f32):
    *lead, t, _, _ = x
    return dict(x=spec(*x), cos=f32(*lead, t, r), sin=f32(*lead, t, r), pair_offset=r)


CASES = {
    "apply_rope": [
        case("plain", **shapes(2, 3, 2, 8, r=4)),
        case("interleaved", **shapes(2, 8, 2, 8, r=3), pairing="interleaved"),
        case("proportional", **shapes(2, 2, 1, 8, r=2) | {"pair_offset": 4}),
        case("sharded", **shapes(8, 8, 8, 8, r=2)),
        case("odd", **shapes(37, 3, 11, r=5)),
        case("deepseek", **shapes(3, 2, 12, r=2), pairing="interleaved", at_end=True),
        case("at_end", **shapes(3, 2, 11, r=2) | {"pair_offset": 3}, at_end=True),
        case("empty", **shapes(2, 0, 3, 8, r=4)),
        case("nothing_rotates", **shapes(2, 3, 1, 8, r=0)),
        case("llama3_8b", **shapes(1, 64, 32, 128, r=64, spec=bf16)),
        case("llama3_8b_decode", **shapes(4, 1, 32, 128, r=64, spec=bf16)),
        case("smollm2_gguf", **shapes(1, 16, 9, 64, r=32), pairing="interleaved"),
        case("qwen3_next", **shapes(1, 16, 16, 256, r=32, spec=bf16)),
        case("gpt_neox_20b", **shapes(1, 8, 64, 96, r=12, spec=f16)),
    ],
}


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def formula(x, positions, pairs, frequencies):
    """Turns the dims (a, b) of each pair, one number at a time, in float64."""
    y = np.array(x, np.float64)
    for (a, b), f in zip(pairs, frequencies, strict=True):
        cos, sin = (g(positions * f)[..., None] for g in (np.cos, np.sin))  # [... t 1]
        y[..., a] = x[..., a] * cos - x[..., b] * sin
        y[..., b] = x[..., b] * cos + x[..., a] * sin
    return y


H = 12
PARTIAL = {  # options of rope, the pairs they turn, and the exponents of theta
    "neox": ({}, [(i, i + 6) for i in range(6)], [2 * i / 12 for i in range(6)]),
    "interleaved": (
        dict(pairing="interleaved"),
        [(2 * i, 2 * i + 1) for i in range(6)],
        [2 * i / 12 for i in range(6)],
    ),
    "partial": (  # GPT-NeoX, Qwen3-Next, ggml: the first rotary_dim dims
        dict(rotary_dim=8),
        [(i, i + 4) for i in range(4)],
        [2 * i / 8 for i in range(4)],
    ),
    "partial_interleaved": (
        dict(rotary_dim=8, pairing="interleaved"),
        [(2 * i, 2 * i + 1) for i in range(4)],
        [2 * i / 8 for i in range(4)],
    ),
    "proportional": (  # Gemma 4: pairs and exponents of the whole head
        dict(rotary_dim=4, pair_offset=6, freq_dim=12),
        [(i, i + 6) for i in range(2)],
        [2 * i / 12 for i in range(2)],
    ),
    "at_end": (  # the last 8 of 12 dims
        dict(rotary_dim=8, at_end=True),
        [(4 + i, 8 + i) for i in range(4)],
        [2 * i / 8 for i in range(4)],
    ),
    "at_end_interleaved": (  # DeepSeek
        dict(rotary_dim=8, pairing="interleaved", at_end=True),
        [(4 + 2 * i, 5 + 2 * i) for i in range(4)],
        [2 * i / 8 for i in range(4)],
    ),
    "far_pairs_at_end": (
        dict(rotary_dim=4, pair_offset=6, at_end=True),
        [(4 + i, 10 + i) for i in range(2)],
        [2 * i / 4 for i in range(2)],
    ),
    "far_pairs": (
        dict(rotary_dim=8, pair_offset=6),
        [(i, i + 6) for i in range(4)],
        [2 * i / 8 for i in range(4)],
    ),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_formula(name):
    options, pairs, exponents = PARTIAL[name]
    x = draw(2, 5, 3, H)
    positions = np.array([[0, 1, 2, 3, 4], [7, 8, 100, 3, 0]])
    frequencies = [500.0**-e for e in exponents]
    expected = formula(x, positions, pairs, frequencies)
    y = rope(jnp.float32(x), jnp.asarray(positions), theta=500.0, **options)
    np.testing.assert_allclose(y, expected, atol=3e-5)
    still = sorted(set(range(H)) - {dim for pair in pairs for dim in pair})
    np.testing.assert_array_equal(y[..., still], np.float32(x)[..., still])


def test_positions_may_be_shared_traced_and_without_batch():
    x = jnp.asarray(draw(2, 5, 3, 8), jnp.float32)
    shared = rope(x, jnp.arange(5))
    each = jax.jit(rope)(x, jnp.broadcast_to(jnp.arange(5), (2, 5)))
    np.testing.assert_allclose(shared, each, atol=1e-6)
    np.testing.assert_allclose(rope(x[1], jnp.arange(5)), shared[1], atol=1e-6)


def test_scores_depend_on_distance_alone():
    q, k = (jnp.asarray(draw(1, 4, 2, 16, seed=i), jnp.float32) for i in range(2))
    v = jnp.asarray(draw(1, 4, 2, 4), jnp.float32)

    def attend(start):
        positions = start + jnp.arange(4)
        return attention(rope(q, positions), rope(k, positions), v)

    np.testing.assert_allclose(attend(0), attend(1000), atol=1e-4)
    moved = attention(rope(q, 3 + jnp.arange(4)), rope(k, jnp.arange(4)), v)
    assert np.abs(moved - attend(0)).max() > 1e-2


def test_position_zero_is_the_identity_in_every_dtype():
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        x = jnp.asarray(draw(1, 3, 2, 8), dtype)
        y = rope(x, jnp.zeros(3, int))
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, x)


def test_half_precision_is_rounded_once():
    x = jnp.asarray(draw(1, 64, 2, 64), jnp.bfloat16)
    exact = rope(x.astype(jnp.float32), jnp.arange(64))
    y = rope(x, jnp.arange(64))
    np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize("pairing", ["neox", "interleaved"])
def test_transpose_turns_back(pairing):
    x, dy = (jnp.asarray(draw(3, 2, 8, seed=i), jnp.float32) for i in range(2))
    cos, sin = rope_cos_sin(jnp.array([3, 5, 7]), 6)

    def f(x):
        return apply_rope(x, cos, sin, pairing=pairing)

    (dx,) = jax.linear_transpose(f, x)(dy)
    np.testing.assert_allclose(
        dx, apply_rope(dy, cos, -sin, pairing=pairing), atol=1e-6
    )
    np.testing.assert_allclose(jnp.vdot(dx, x), jnp.vdot(dy, f(x)), rtol=1e-5)
    (back,) = jax.vjp(f, x)[1](f(x))  # a rotation: its transpose is its inverse
    np.testing.assert_allclose(back, x, atol=1e-6)


@pytest.mark.parametrize("pairing", ["neox", "interleaved"])
def test_gradient_of_the_tables(pairing):
    x, dy = draw(2, 3, 2, 6), draw(2, 3, 2, 6, seed=1)
    cos, sin = draw(3, 2), draw(3, 2, seed=1)
    pairs = [(0, 2), (1, 3)] if pairing == "neox" else [(0, 1), (2, 3)]
    a, b = ([p[side] for p in pairs] for side in (0, 1))
    dcos = (dy[..., a] * x[..., a] + dy[..., b] * x[..., b]).sum((0, 2))
    dsin = (dy[..., b] * x[..., a] - dy[..., a] * x[..., b]).sum((0, 2))

    def f(cos, sin):
        y = apply_rope(jnp.float32(x), cos, sin, pairing=pairing)
        return jnp.vdot(jnp.float32(dy), y)

    grads = jax.grad(f, (0, 1))(jnp.float32(cos), jnp.float32(sin))
    np.testing.assert_allclose(grads[0], dcos, atol=1e-5)
    np.testing.assert_allclose(grads[1], dsin, atol=1e-5)


def test_every_error_says_what_to_do():
    x = jnp.zeros((1, 3, 2, 8))
    cos, sin = rope_cos_sin(jnp.arange(3), 8)
    with pytest.raises(ValueError, match=r"pairing 'norm' is not"):
        apply_rope(x, cos, sin, pairing="norm")
    with pytest.raises(ValueError, match=r"pair_offset belongs to pairing='neox'"):
        apply_rope(x, cos, sin, pairing="interleaved", pair_offset=4)
    with pytest.raises(
        ValueError, match=r"4 pairs at distance 6 do not fit a head of 8"
    ):
        apply_rope(x, cos, sin, pair_offset=6)
    with pytest.raises(ValueError, match=r"4 pairs at distance 2 do not fit"):
        apply_rope(x, cos, sin, pair_offset=2)
    with pytest.raises(TypeError, match=r"`cos` and `sin` both"):
        apply_rope(x, cos, sin[..., :2])
    with pytest.raises(TypeError, match=r"dim `t` is 3 in `x` but 2 in `cos`"):
        apply_rope(x, cos[:2], sin[:2])
    with pytest.raises(ValueError, match=r"rotary_dim 5 is not even"):
        rope(x, jnp.arange(3), rotary_dim=5)
