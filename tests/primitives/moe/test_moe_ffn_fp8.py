"""moe_ffn_fp8 against a loop over tokens and experts in float64, of operands that NumPy
rounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import FP8Tensor, dequantize, explain, moe_ffn, moe_ffn_fp8, quantize_fp8
from tests.primitives.moe.test_expert_slots import GPT_OSS, PLAIN
from tests.primitives.moe.test_grouped_matmul_fp8 import rounded

T, K, E, D, F = 13, 2, 4, 64, 48
IDS = np.random.default_rng(3).integers(-1, E + 1, (T, K)).astype(np.int32)


def draw(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@functools.cache
def experts(block=(1, 0)):
    shapes = (E, F, D), (E, F, D), (E, D, F)
    drawn = (draw(i, *s) / s[-1] ** 0.5 for i, s in enumerate(shapes))
    return tuple(quantize_fp8(w, block=block) for w in drawn)


def activated(gate, up, alpha, limit, up_offset):
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-alpha * gate)) * (up + up_offset)


def loop(x, weights, kept, biases=None, act=None, **options):
    """y, of x and hidden in 8 bits."""
    x8, weights = rounded(x), np.float64(weights)
    gate, up, down = (np.float64(dequantize(w)) for w in kept)
    zeros = np.zeros((E, F)), np.zeros((E, F)), np.zeros((E, D))
    gate_bias, up_bias, down_bias = map(np.float64, biases or zeros)
    act = act or functools.partial(activated, **(options or PLAIN))
    y = np.zeros(x.shape)
    for t, j in np.ndindex(IDS.shape):
        if 0 <= (e := IDS[t, j]) < E:
            hidden = act(gate[e] @ x8[t] + gate_bias[e], up[e] @ x8[t] + up_bias[e])
            y[t] += weights[t, j] * (down[e] @ rounded(hidden[None])[0] + down_bias[e])
    return y


def near(found, expected, bound):
    error = np.linalg.norm(np.asarray(found, np.float64) - expected)
    assert error <= bound * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(PLAIN, id="plain", marks=pytest.mark.full),
        pytest.param(GPT_OSS, id="gpt_oss"),
    ],
)
def test_equals_the_loop_over_rounded_operands(options):
    x, weights, (gate, up, down) = draw(5, T, D), draw(6, T, K), experts()
    biases = draw(7, E, F), draw(8, E, F), draw(9, E, D)
    f = jax.jit(functools.partial(moe_ffn_fp8, **options))
    given = biases if options is GPT_OSS else ()
    y = f(x, IDS, weights, gate, up, down, *given)
    expected = loop(x, weights, (gate, up, down), given or None, **options)
    near(y, expected, 1e-5)
    exact = moe_ffn(x, IDS, weights, gate, up, down, *given, **options)
    assert np.linalg.norm(y - exact) > 0.01 * np.linalg.norm(exact)  # it did round
    near(y, np.float64(exact), 0.06)
    both = jax.tree.map(lambda *a: jnp.concatenate(a, 1), gate, up)
    packed = (jnp.concatenate(biases[:2], 1), None, biases[2]) if given else ()
    same = f(x, IDS, weights, both, None, down, *packed)
    near(same, np.float64(y), 1e-6)


@pytest.mark.full
def test_other_activations_leading_dims_and_dtypes():
    x, weights = draw(5, T, D), draw(6, T, K)
    gate, _, down = experts((0, 0))
    options = dict(activation="relu2", gated=False)
    f = jax.jit(functools.partial(moe_ffn_fp8, **options))
    y = f(x, IDS, weights, gate, None, down)
    relu2 = lambda z, _: np.maximum(z, 0) ** 2  # noqa: E731
    near(y, loop(x, weights, (gate, gate, down), act=relu2), 1e-5)
    lead = (x[None].astype(jnp.bfloat16), IDS[None], weights[None])
    narrow = jax.jit(moe_ffn_fp8)(*lead, *experts())
    assert narrow.dtype == jnp.bfloat16 and narrow.shape == (1, T, D)
    near(narrow[0], loop(lead[0][0], weights, experts()), 0.02)


def test_gradients_are_straight_through():
    """Of x and of the weights of experts: those of the layer of decoded weights at the
    products that were multiplied."""
    x, weights, kept = draw(5, T, D), draw(6, T, K), experts()
    dy = draw(10, T, D)

    def layer(x, weights):
        return moe_ffn_fp8(x, IDS, weights, *kept)

    @jax.jit
    def both(x, weights, dy):
        y, pull = jax.vjp(layer, x, weights)
        return y, *pull(dy)

    y, dx, dweights = both(x, weights, dy)
    np.testing.assert_array_equal(y, jax.jit(layer)(x, weights))
    gate, up, down = (np.float64(dequantize(w)) for w in kept)
    x8, expected = rounded(x), np.zeros((T, D))
    slopes, wide, dy = np.zeros((T, K)), np.float64(weights), np.float64(dy)
    for t, j in np.ndindex(IDS.shape):
        if 0 <= (e := IDS[t, j]) < E:
            z, u = gate[e] @ x8[t], up[e] @ x8[t]
            s = 1 / (1 + np.exp(-z))
            slopes[t, j] = down[e] @ rounded((z * s * u)[None])[0] @ dy[t]
            dhidden = wide[t, j] * dy[t] @ down[e]
            dz, du = dhidden * u * s * (1 + z * (1 - s)), dhidden * z * s
            expected[t] += dz @ gate[e] + du @ up[e]
    near(dx, expected, 1e-5)
    near(dweights, slopes, 1e-5)


@pytest.mark.full
def test_a_vmap_and_a_row_that_is_not_finite():
    x, weights = draw(5, 2, T, D).at[1, 3, 2].set(jnp.nan), draw(6, 2, T, K)
    ids = jnp.stack([IDS, np.where(IDS == 2, 0, IDS)])
    f = jax.jit(jax.vmap(lambda *a: moe_ffn_fp8(*a, *experts())))
    together = f(x, ids, weights)
    for i in range(2):
        alone = jax.jit(moe_ffn_fp8)(x[i], ids[i], weights[i], *experts())
        np.testing.assert_array_equal(together[i], alone)
    lost = ~np.isfinite(np.asarray(together))
    expected = np.zeros(lost.shape, bool)
    expected[1, 3] = (np.asarray(ids[1, 3]) >= 0).any()
    np.testing.assert_array_equal(lost, expected)


def test_no_tokens_and_explain():
    empty = moe_ffn_fp8(
        jnp.zeros((0, D)), jnp.zeros((0, K), jnp.int32), jnp.zeros((0, K)), *experts()
    )
    assert empty.shape == (0, D)
    text = str(explain(moe_ffn_fp8, draw(5, T, D), IDS, draw(6, T, K), *experts()))
    for op in ("encode_rows_fp8", "swiglu_rows_fp8", "scaled_grouped_matmul"):
        assert op in text
    assert "permute_tokens " not in text.replace("unpermute_tokens", "")
    assert "dequantize" not in text


def test_what_is_not_understood_is_refused():
    x, weights, (gate, up, down) = draw(5, T, D), draw(6, T, K), experts()
    blocks = quantize_fp8(jnp.ones((E, D, F)), block=(16, 16))
    with pytest.raises(ValueError, match=r"moe_ffn_fp8: `down` must have scales of wh"):
        moe_ffn_fp8(x, IDS, weights, gate, up, blocks)
    other = FP8Tensor(up.codes, up.scales, up.block, "e5m2")
    with pytest.raises(ValueError, match="`up` must be stored in e4m3fn, got 'e5m2'"):
        moe_ffn_fp8(x, IDS, weights, gate, other, down)
    with pytest.raises(TypeError, match="moe_ffn_fp8: `gate` must be FP8Tensor"):
        moe_ffn_fp8(x, IDS, weights, dequantize(gate), up, down)
    with pytest.raises(TypeError, match="moe_ffn_fp8: `up` must be"):
        moe_ffn_fp8(x, IDS, weights, gate, down, down)
    with pytest.raises(TypeError, match="moe_ffn_fp8: `ids` and `weights` must be"):
        moe_ffn_fp8(x, IDS[:3], weights, gate, up, down)
    with pytest.raises(ValueError, match="moe_ffn_fp8: gated=False has no `up`"):
        moe_ffn_fp8(x, IDS, weights, gate, up, down, gated=False, activation="relu2")
    with pytest.raises(ValueError, match="moe_ffn_fp8: `activation` must be one of"):
        moe_ffn_fp8(x, IDS, weights, gate, up, down, activation="silly")
    with pytest.raises(TypeError, match="moe_ffn_fp8: `gate_bias` must have a number"):
        moe_ffn_fp8(x, IDS, weights, gate, up, down, jnp.ones((E, 3)))
