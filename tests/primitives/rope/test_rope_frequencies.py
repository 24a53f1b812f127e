"""rope_frequencies: every scaling against its published formula in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    YarnScaling,
    rope,
    rope_cos_sin,
    rope_frequencies,
)


def plain(dim, theta):
    return np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])


def llama3(dim, theta, factor, low, high, original):
    """By wave length, as the model's own source branches."""
    out = []
    for f in plain(dim, theta):
        wave = 2 * math.pi / f
        if wave < original / high:
            out.append(f)
        elif wave > original / low:
            out.append(f / factor)
        else:
            smooth = (original / wave - low) / (high - low)
            out.append((1 - smooth) * f / factor + smooth * f)
    return np.array(out)


def yarn(dim, theta, factor, original, fast=32.0, slow=1.0, truncate=True):
    """Section 3.2 of the paper, the ends of the ramp as in Hugging Face."""

    def pair(turns):
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    keep = 1 - np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    f = plain(dim, theta)
    return f / factor * (1 - keep) + f * keep


SCALED = {
    "plain": (128, 5e5, None, plain(128, 5e5)),
    "linear": (64, 1e4, LinearScaling(4.0), plain(64, 1e4) / 4),
    "llama3_1": (
        128,
        5e5,
        Llama3Scaling(),
        llama3(128, 5e5, 8.0, 1.0, 4.0, 8192),
    ),
    "llama3_2_1b": (
        64,
        5e5,
        Llama3Scaling(factor=32.0),
        llama3(64, 5e5, 32.0, 1.0, 4.0, 8192),
    ),
    "yarn_qwen3": (128, 1e6, YarnScaling(4.0, 32768), yarn(128, 1e6, 4.0, 32768)),
    "yarn_gpt_oss": (
        64,
        15e4,
        YarnScaling(32.0, 4096, truncate=False),
        yarn(64, 15e4, 32.0, 4096, truncate=False),
    ),
    "yarn_betas": (
        64,
        1e4,
        YarnScaling(16.0, 2048, beta_fast=8.0, beta_slow=2.0),
        yarn(64, 1e4, 16.0, 2048, 8.0, 2.0),
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_formula(name):
    dim, theta, scaling, expected = SCALED[name]
    f = rope_frequencies(dim, theta=theta, scaling=scaling)
    assert f.dtype == jnp.float32
    np.testing.assert_allclose(f, expected, rtol=1e-6)


def test_scalings_keep_fast_pairs_and_slow_the_others():
    f = plain(128, 5e5)
    for scaling in (Llama3Scaling(), YarnScaling(8.0, 8192)):
        scaled = np.asarray(rope_frequencies(128, theta=5e5, scaling=scaling))
        np.testing.assert_allclose(scaled[0], f[0], rtol=1e-6)
        np.testing.assert_allclose(scaled[-1], f[-1] / 8, rtol=1e-6)
        assert (np.diff(scaled) < 0).all()


@pytest.mark.parametrize("length", [100, 2048, 2049, 5000, 16384])
def test_dynamic(length):
    dim, theta, factor, original = 64, 1e4, 2.0, 2048
    L = max(length, original)
    base = theta * (factor * L / original - (factor - 1)) ** (dim / (dim - 2))
    scaling = DynamicScaling(factor, original)
    f = rope_frequencies(dim, theta=theta, scaling=scaling, length=length)
    np.testing.assert_allclose(f, plain(dim, base), rtol=3e-6)


def test_dynamic_length_of_each_sequence_is_traced():
    scaling = DynamicScaling(2.0, 16)
    positions = jnp.array([[0, 1, 2], [40, 41, 42]])
    cos, sin = jax.jit(lambda p: rope_cos_sin(p, 8, scaling=scaling))(positions)
    for row, length in enumerate((3, 43)):
        f = np.asarray(rope_frequencies(8, scaling=scaling, length=length), np.float64)
        angle = np.asarray(positions[row])[:, None] * f
        np.testing.assert_allclose(cos[row], np.cos(angle), atol=1e-5)
        np.testing.assert_allclose(sin[row], np.sin(angle), atol=1e-5)
    given = rope_cos_sin(positions, 8, scaling=scaling, length=jnp.array([3, 43]))
    np.testing.assert_allclose(given[0], cos, atol=1e-6)
    shared = rope_cos_sin(positions, 8, scaling=scaling, length=43)
    np.testing.assert_allclose(shared[0][1], cos[1], atol=1e-6)
    assert np.abs(shared[0][0] - cos[0]).max() > 1e-3


def test_longrope():
    short, long = tuple(1 + 0.1 * i for i in range(4)), tuple(1.0 + i for i in range(4))
    scaling = LongRopeScaling(short, long, original_length=16, factor=32.0)
    for length, factors in ((16, short), (17, long)):
        f = rope_frequencies(8, scaling=scaling, length=length)
        np.testing.assert_allclose(f, plain(8, 1e4) / factors, rtol=1e-6)
    magnitude = math.sqrt(1 + math.log(32) / math.log(16))
    positions = jnp.array([[3, 15], [3, 16]])  # texts of 16 and 17 tokens
    cos, sin = jax.jit(lambda p: rope_cos_sin(p, 8, scaling=scaling))(positions)
    for row, factors in enumerate((short, long)):
        angle = np.asarray(positions[row])[:, None] * plain(8, 1e4) / factors
        np.testing.assert_allclose(cos[row], magnitude * np.cos(angle), atol=2e-5)
        np.testing.assert_allclose(sin[row], magnitude * np.sin(angle), atol=2e-5)
    with pytest.raises(ValueError, match=r"4 short and 4 long factors for 8 pairs"):
        rope_frequencies(16, scaling=scaling, length=1)


def test_attention_factors():
    assert YarnScaling(1.0, 2048).magnitude == 1.0
    assert math.isclose(YarnScaling(32.0, 4096).magnitude, 1.3465735902799727)
    deepseek = YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert deepseek.magnitude == 1.0
    half = YarnScaling(40.0, 4096, mscale=0.5, mscale_all_dim=1.0)
    expected = (1 + 0.05 * math.log(40)) / (1 + 0.1 * math.log(40))
    assert math.isclose(half.magnitude, expected)
    assert YarnScaling(4.0, 1024, attention_factor=1.25).magnitude == 1.25
    assert LongRopeScaling((1.0,), (1.0,), 4096).magnitude == 1.0
    x = jnp.ones((1, 2, 1, 8))
    y = rope(x, jnp.array([0, 0]), scaling=YarnScaling(32.0, 4096))
    np.testing.assert_allclose(y, 1.3465736 * x, rtol=1e-6)


def test_frequency_factors_divide_and_switch_off():
    factors = jnp.array([1.0, 2.0, 8.0, 1e30])
    f = rope_frequencies(8, frequency_factors=factors)
    np.testing.assert_allclose(f, plain(8, 1e4) / factors, rtol=1e-6)
    x = jnp.ones((1, 1, 1, 8))
    y = rope(x, jnp.array([100000]), frequency_factors=factors)
    np.testing.assert_array_equal(y[..., [3, 7]], x[..., [3, 7]])
    with pytest.raises(TypeError, match=r"`frequency_factors` must have shape \(4,\)"):
        rope_frequencies(8, frequency_factors=factors[:3])


def test_error_at_far_positions_is_that_of_float32():
    positions = np.array([1000, 32767, 131071])
    cos, sin = rope_cos_sin(jnp.asarray(positions), 128, theta=5e5)
    angle = positions[:, None] * plain(128, 5e5)
    for p, c, s, a in zip(positions, cos, sin, angle, strict=True):
        np.testing.assert_allclose(c, np.cos(a), atol=p * 2.0**-23)
        np.testing.assert_allclose(s, np.sin(a), atol=p * 2.0**-23)


def test_scalings_are_hashable_static_arguments():
    f = jax.jit(rope_frequencies, static_argnums=0, static_argnames=("scaling",))
    for scaling in (Llama3Scaling(), YarnScaling(4.0, 1024), LinearScaling(2.0)):
        np.testing.assert_allclose(
            f(8, scaling=scaling), rope_frequencies(8, scaling=scaling), rtol=1e-6
        )


def test_no_positions():
    cos, sin = rope_cos_sin(jnp.zeros((2, 0), int), 8, scaling=DynamicScaling(2.0, 16))
    assert cos.shape == sin.shape == (2, 0, 4)
    with pytest.raises(TypeError, match=r"got a scalar"):
        rope_cos_sin(jnp.array(3), 8)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"theta": 0.0}, "theta"),
        ({"theta": -1e4}, "theta"),
        ({"scaling": LinearScaling(0.0)}, "factor"),
        ({"scaling": YarnScaling(2.0, 0)}, "original_length"),
        ({"scaling": Llama3Scaling(math.nan)}, "factor"),
    ],
)
def test_what_must_be_positive(options, name):
    with pytest.raises(ValueError, match=f"^rope: `{name}` must be positive, got"):
        rope_frequencies(8, **options)
