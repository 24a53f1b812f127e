"""grouped_matmul_fp8 against a loop over groups in float64, of operands that NumPy
rounds."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern import (
    FP8Tensor,
    dequantize,
    explain,
    grouped_matmul_fp8,
    quantize_fp8,
    quantized_matmul_id,
)
from jaxkern.primitives.moe.grouped_matmul_fp8 import (
    Rows,
    encoded_rows,
    permuted,
    scaled_grouped_matmul_p,
)
from jaxkern.testing import sharding_checks
from jaxkern.testing.check_op import ON_MESHES
from jaxkern.testing.checks import Spec, case, uniform
from tests.primitives.moe.test_grouped_matmul import loop, sizes
from tests.primitives.quant.test_fp8 import finite_codes

SUMS = {"preferred_element_type": jnp.dtype("float32"), "straight_through": True}
CASES = [
    case(  # of which no dim can be cut: cuts are a test of the full run
        "plain",
        x=finite_codes(5, 3),
        x_scale=uniform(5),
        w=finite_codes(3, 5, 3),
        w_scale=uniform(3, 5),
        group_sizes=sizes(3, 0, 1),
        **SUMS,
    ),
    case(
        "empty",
        full=True,
        x=finite_codes(0, 3),
        x_scale=uniform(0),
        w=finite_codes(3, 5, 3),
        w_scale=uniform(3, 5),
        group_sizes=sizes(0, 0, 0),
        **SUMS,
    ),
    case(
        "qwen3_30b_on_one_of_8_devices",
        full=True,
        x=finite_codes(64, 2048),
        x_scale=uniform(64),
        w=finite_codes(16, 768, 2048),
        w_scale=uniform(16, 768),
        group_sizes=Spec(
            (16,), np.int32, lambda rng, s: rng.multinomial(60, np.ones(16) / 16)
        ),
        **SUMS,
    ),
]
RNG = np.random.default_rng(0)
SIZES = [3, 0, 7, 2]  # of 13 rows


def draw(*shape, dtype=jnp.bfloat16, scale=1.0):
    return jnp.asarray(scale * RNG.standard_normal(shape), dtype)


def rounded(a, dtype="float8_e4m3fn"):
    """By NumPy: each row with the least power of two that fits."""
    a = np.asarray(a).astype(np.float64)
    largest = float(ml_dtypes.finfo(dtype).max)
    amax = np.abs(a).max(-1, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(np.where(amax > 0, amax, largest) / largest))
    return (a / scale).astype(dtype).astype(np.float64) * scale


def near(found, expected, dtype):
    bound = 2**-8 if dtype == jnp.bfloat16 else 2**-20
    error = np.abs(np.asarray(found, np.float64) - expected)
    assert error.max() <= 1.01 * bound * np.abs(expected).max()


def gradients(dy, x, w):
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    for g, rows in enumerate(loop(x, w, SIZES)[1]):
        dx[rows], dw[g] = dy[rows] @ w[g], dy[rows].T @ x[rows]
    return dx, dw


@jax.jit
def three_products(x, w, dy):
    y, pull = jax.vjp(lambda x, w: grouped_matmul_fp8(x, w, jnp.asarray(SIZES)), x, w)
    return y, *pull(dy)


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.full)]
)
def test_three_products_of_rounded_operands(dtype):
    """Rows of very unlike sizes: one scale for all would leave nothing of the small."""
    unlike = jnp.asarray(2.0 ** np.arange(-6, 7)[:, None], dtype)
    x, w, dy = draw(13, 64), draw(4, 5, 64), draw(13, 5)
    x, w, dy = (a.astype(dtype) for a in (x * unlike.astype(x.dtype), w, dy))
    y, *slopes = three_products(x, w, dy)
    x8, w8, dy8 = rounded(x), rounded(w), rounded(dy, "float8_e5m2")
    expected = (loop(x8, w8, SIZES)[0], *gradients(dy8, x8, w8))
    for found, e in zip((y, *slopes), expected, strict=True):
        assert found.dtype == dtype
        near(found, e, dtype)
    for row, e in zip(y[:12], expected[0], strict=False):
        near(row, e, dtype)
    np.testing.assert_array_equal(y[12:], 0)
    exact = loop(*(np.float64(a) for a in (x, w)), SIZES)[0]
    assert np.abs(expected[0] - exact).max() > 0.01  # it did round


@pytest.mark.parametrize(
    "block",
    [
        (1, 0),
        *(pytest.param(b, marks=pytest.mark.full) for b in ((0, 0), (2, 0), (1, 64))),
    ],
)
def test_weights_are_taken_as_they_are_stored(block):
    w = quantize_fp8(draw(4, 5, 64), block=block)
    x, dy = draw(13, 64), draw(13, 5)

    @jax.jit
    def product_and_gradients(x, scales, dy):
        def product(x, scales):
            stored = FP8Tensor(w.codes, scales, w.block)
            return grouped_matmul_fp8(x, stored, jnp.asarray(SIZES))

        y, pull = jax.vjp(product, x, scales)
        return y, *pull(dy)

    y, dx, dscales = product_and_gradients(x, w.scales, dy)
    values = np.float64(dequantize(w))
    near(y, loop(rounded(x), values, SIZES)[0], jnp.bfloat16)
    # of decoded weights in bfloat16, with a cotangent that nothing rounds
    near(dx, gradients(np.float64(dy), rounded(x), values)[0], jnp.bfloat16)
    np.testing.assert_array_equal(dscales, 0)


def test_what_is_not_finite_stays_in_its_row():
    x = draw(13, 64).at[1, 3].set(jnp.nan).at[12].set(jnp.inf)
    w = draw(4, 5, 64).at[2, 4, 0].set(jnp.inf)
    dy = jnp.ones((13, 5), jnp.bfloat16).at[12].set(jnp.nan)
    y, dx, dw = three_products(x, w, dy)
    lost = ~np.isfinite(np.asarray(y, np.float32))
    expected = np.zeros((13, 5), bool)
    expected[1], expected[3:10, 4] = True, True
    np.testing.assert_array_equal(lost, expected)
    np.testing.assert_array_equal(y[12], 0)
    assert jnp.isfinite(dx[:3]).all() and not jnp.isfinite(dx[3:10]).any()
    np.testing.assert_array_equal(dx[12], 0)
    assert jnp.isfinite(dw[2]).all() and not jnp.isfinite(dw[0, :, 3]).any()


@pytest.mark.full
def test_derivatives_are_straight_through():
    """The jvp, and the gradient of a gradient, where q has derivative 1."""
    f32 = jnp.float32
    x, v = (draw(13, 16, dtype=f32) for _ in "ab")
    w, u = (draw(4, 3, 16, dtype=f32) for _ in "ab")

    def f(x, w):
        return grouped_matmul_fp8(x, w, jnp.asarray(SIZES))

    x8, w8 = rounded(x), rounded(w)
    dot = jax.jvp(f, (x, w), (v, u))[1]
    expected = loop(np.float64(v), w8, SIZES)[0] + loop(x8, np.float64(u), SIZES)[0]
    np.testing.assert_allclose(dot, expected, rtol=1e-4, atol=1e-5)

    def loss(x, w):
        return jnp.sum(f(x, w))  # cotangents of one are 8-bit floats

    hessian = jax.jvp(jax.grad(loss, (0, 1)), (x, w), (v, u))[1]
    ones = np.ones((13, 3))
    slopes = gradients(ones, np.float64(v), np.float64(u))
    for found, e in zip(hessian, slopes, strict=True):
        np.testing.assert_allclose(found, e, rtol=1e-4, atol=1e-5)


def test_until_the_backward_pass_the_codes_are_kept():
    x, w = draw(13, 64), draw(4, 5, 64)

    @jax.jit
    def forward(x, w):
        f = lambda x, w: grouped_matmul_fp8(x, w, jnp.asarray(SIZES))  # noqa: E731
        return jax.tree.leaves(jax.vjp(f, x, w)[1])

    kept = [a for a in forward(x, w) if a.shape in (x.shape, w.shape)]
    assert sum(a.dtype == jnp.uint8 for a in kept) == 2
    for a in kept:
        if a.dtype != jnp.uint8:  # nothing that is rounded
            np.testing.assert_array_equal(a, x if a.shape == x.shape else w)


@pytest.mark.full
def test_rows_of_a_vmap():
    x, w = draw(3, 13, 16), draw(4, 3, 16)
    sizes_of = jnp.asarray([SIZES, [13, 0, 0, 0], [0, 1, 2, 3]])
    together = jax.vmap(grouped_matmul_fp8, (0, None, 0))(x, w, sizes_of)
    for y, *one in zip(together, x, sizes_of, strict=True):
        np.testing.assert_array_equal(y, grouped_matmul_fp8(one[0], w, one[1]))


def test_rows_name_the_experts_of_stored_weights():
    w = quantize_fp8(draw(3, 4, 64), block=(1, 0))
    x, ids = draw(3, 64), np.asarray([2, 0, 0, 5, -1, 2])
    options = dict(top_k=2, compute_dtype="float8_e4m3fn")
    y = jax.jit(lambda x: quantized_matmul_id(x, w, ids, **options))(x)
    values, x8 = np.float64(dequantize(w)), rounded(x)
    expected = [
        values[i] @ x8[r // 2] if 0 <= i < 3 else np.zeros(4) for r, i in enumerate(ids)
    ]
    near(y, np.stack(expected), jnp.bfloat16)
    assert "scaled_grouped_matmul" in str(
        jax.make_jaxpr(lambda x: quantized_matmul_id(x, w, ids, **options))(x)
    )


@pytest.mark.full
def test_the_scales_of_rows_are_powers_of_two():
    x = draw(3, 5, 64).at[1, 2].set(0)
    rows = encoded_rows(x)
    assert rows.codes.shape == x.shape and rows.scales.shape == x.shape[:-1]
    assert np.all(np.log2(rows.scales) % 1 == 0) and rows.scales[1, 2] == 1
    as_floats = np.asarray(rows.codes).view(ml_dtypes.float8_e4m3fn)
    decoded = as_floats.astype(np.float64) * np.asarray(rows.scales)[..., None]
    np.testing.assert_array_equal(decoded, rounded(x))


@pytest.mark.parametrize("d", [8, 6])
def test_rows_by_their_numbers(d):
    codes, scales = RNG.integers(0, 256, (5, d)).astype(np.uint8), RNG.random(5)
    index = np.asarray([4, 0, 0, 2], np.int32)
    rows = Rows(jnp.asarray(codes), jnp.asarray(scales, jnp.float32))
    found = jax.jit(permuted)(rows, jnp.asarray(index))
    np.testing.assert_array_equal(found.codes, codes[index])
    np.testing.assert_array_equal(found.scales, scales.astype(np.float32)[index])


@pytest.mark.full
def test_the_sums_are_what_is_preferred():
    x, w, group_sizes = draw(13, 64), draw(4, 5, 64), jnp.asarray(SIZES)
    f = functools.partial(grouped_matmul_fp8, preferred_element_type="float32")
    y = jax.jit(f)(x, w, group_sizes)
    assert y.dtype == jnp.float32
    near(y, loop(rounded(x), rounded(w), SIZES)[0], jnp.float32)


def test_what_is_not_understood_is_refused():
    x, group_sizes = draw(13, 256), jnp.asarray(SIZES)
    w = draw(4, 128, 256)
    codes = jnp.zeros(w.shape, jnp.uint8)
    blocks = FP8Tensor(codes, jnp.ones((4, 1, 2)), (128, 128))
    stored = FP8Tensor(codes, jnp.ones((4, 128, 1)), (1, 0))
    with pytest.raises(ValueError, match=r"scales of whole rows.* got \(128, 128\)"):
        grouped_matmul_fp8(x, blocks, group_sizes)
    with pytest.raises(ValueError, match="stored in e4m3fn, got 'e5m2'"):
        e5m2 = FP8Tensor(stored.codes, stored.scales, (1, 0), "e5m2")
        grouped_matmul_fp8(x, e5m2, group_sizes)
    with pytest.raises(TypeError, match=r"`x` must be \[r, 256\] as `w` is"):
        grouped_matmul_fp8(x[:, :8], stored, group_sizes)
    with pytest.raises(TypeError, match=r"must be \[e, f, d\] with a size"):
        grouped_matmul_fp8(x, stored, group_sizes[:3])
    with pytest.raises(TypeError, match="grouped_matmul_fp8: `preferred_element_type`"):
        grouped_matmul_fp8(x, w, group_sizes, preferred_element_type=jnp.int32)


@pytest.mark.full
@pytest.mark.parametrize("check", [*ON_MESHES, sharding_checks.check_kernel_sharding])
def test_every_dim_can_be_cut(check):
    operands = dict(
        x=finite_codes(8, 8),
        x_scale=uniform(8),
        w=finite_codes(4, 8, 8),
        w_scale=uniform(4, 8),
        group_sizes=sizes(3, 0, 2, 1),
    )
    check(scaled_grouped_matmul_p, case("cut", **operands, **SUMS))


def test_explain_names_the_product_of_codes():
    text = str(
        explain(grouped_matmul_fp8, draw(13, 64), draw(4, 5, 64), jnp.ones(4, int))
    )
    assert "scaled_grouped_matmul" in text
