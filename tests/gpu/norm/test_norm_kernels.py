"""Kernels of the fused norms on a GPU: long and odd rows, every operand, refusals."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    add_rms_norm_quantized,
    backend,
    explain,
    gated_rms_norm,
    group_norm,
    l2_norm,
    moe_rms_norm_add,
    multi_rms_norm,
    rms_norm,
    rms_norm_add,
    rms_norm_mul,
    rms_norm_quantized,
    sandwich_rms_norm,
)
from tests.gpu.truth import as_tuple, check_against_float64, on_a_gpu, poison

pytestmark = on_a_gpu
DTYPES = ["bfloat16", "float16", "float32"]
WIDTHS = [1, 13, 128, 1000, 1025, 2816, 4096]
LONG = [8193, 10007, 12288, 16384, 131072]


def draws(dtype, seed=0):
    rng = np.random.default_rng(seed)
    return lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)


def terms_of(d, norms=1):
    """The size of what cancels in a gradient: all of it in a row of one element.

    There it is rstd dy, and the mean of 1 / (x^2 + eps) is sqrt(pi / 2 / eps). Through
    two norms in a row it is rstd_1 rstd_2 dy.
    """
    return (math.pi / 2 / 1e-6) ** (0.25 * norms) if d == 1 else 1e-2


def rows_of(d):
    """More than the programs of a backward pass."""
    return 300 if d < 2000 else 137 if d < 20000 else 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [*WIDTHS, 5000, 8192, *LONG])
def test_norms_beside_a_second_tensor(d, dtype):
    draw, n = draws(dtype, d), rows_of(d)
    x, other, weight = draw(n, d), draw(n, d), draw(d)

    def gate_first(*operands):
        return gated_rms_norm(*operands, norm_before_gate=False)

    for f in (gated_rms_norm, gate_first, rms_norm_mul):
        check_against_float64(f, x, other, weight, slack=2)
    check_against_float64(gate_first, x, other, slack=2)
    check_against_float64(gated_rms_norm, x, other, slack=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [*WIDTHS, 5376, 8192, *LONG])
def test_sums_of_a_norm_and_a_residual(d, dtype):
    draw, n = draws(dtype, d), rows_of(d)
    x, residual, weight = draw(n, d), draw(n, d), draw(d)
    check_against_float64(rms_norm_add, x, residual, weight)
    check_against_float64(rms_norm_add, x, residual)
    check_against_float64(rms_norm_add, x, residual, weight, draw(d), slack=2)
    check_against_float64(rms_norm_add, x, residual, weight, draw(1), slack=2)
    check_against_float64(
        sandwich_rms_norm, x, residual, weight, draw(d), slack=4, least=terms_of(d, 2)
    )
    check_against_float64(multi_rms_norm, x, weight, draw(d), least=terms_of(d))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [*WIDTHS, *LONG])
def test_norms_with_three_readers(d, dtype):
    draw, n = draws(dtype, d), rows_of(d)
    x, residual, weights = draw(n, d), draw(n, d), [draw(d) for _ in range(4)]
    check_against_float64(multi_rms_norm, x, *weights[:3], least=terms_of(d))
    check_against_float64(
        sandwich_rms_norm, x, residual, *weights, slack=4, least=terms_of(d, 2)
    )
    check_against_float64(
        lambda x, w: multi_rms_norm(x, None, w, None, offset=1.0), x, weights[0]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "d, e",
    [
        (1, 1),
        (13, 3),
        (1000, 2),
        (2816, 8),
        (8192, 5),
        (8193, 3),
        (10007, 1),
        (16384, 8),
        (131072, 2),
    ],
)
def test_experts_are_mixed_normed_and_added(d, e, dtype):
    draw, n = draws(dtype, d), 2 * rows_of(d)  # more than the programs
    outputs, experts, residual = draw(n, e, d), draw(n, e), draw(n, d)
    weight, residual_weight = draw(d), draw(d)
    check_against_float64(moe_rms_norm_add, outputs, experts, residual, weight, slack=4)
    check_against_float64(
        lambda *a: moe_rms_norm_add(*a, normalize_residual=True, offset=1.0),
        outputs,
        experts,
        residual,
        weight,
        residual_weight,
        slack=4,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 31, 4097])
def test_short_rows_for_inference(rows, d, dtype):
    draw = draws(dtype, d)
    x, weight = draw(rows, d), draw(d)
    u, w = (np.asarray(v, np.float64) for v in (x, weight))
    truth = u / np.sqrt((u * u).mean(-1, keepdims=True) + 1e-6)
    step = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    cases = [
        (rms_norm, (x,), truth),
        (rms_norm, (x, weight.astype("float32")), truth * w),
        (lambda *a: rms_norm(*a, offset=1.0), (x, weight), truth * (w + 1)),
    ]
    for f, operands, expected in cases:
        poison(x)
        with backend("triton", strict=True):
            y = np.asarray(jax.jit(f)(*operands), np.float64)
        np.testing.assert_allclose(y, expected, rtol=step, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [*WIDTHS, 8193, 40001])
def test_l2_norm_of_long_and_odd_rows(d, dtype):
    check_against_float64(l2_norm, draws(dtype, d)(rows_of(d), d), slack=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape, groups",
    [
        ((8, 320, 32, 32), 32),
        ((5, 96, 71, 71), 32),
        ((8, 1280, 8, 8), 32),
        ((3, 15, 7), 5),
        ((2, 4), 2),
        ((2, 6, 1, 1), 6),
        ((160, 20, 64, 101), 1),
        ((1, 32, 256, 256), 32),
        ((2, 6, 601, 601), 2),
        ((1, 5, 1023, 1025), 1),
    ],
)
def test_group_norm_of_images(shape, groups, dtype):
    draw = draws(dtype)
    x, weight, bias = draw(*shape), draw(shape[1]), draw(shape[1])
    whole = x.size == shape[0] * groups  # groups of one element: all cancels
    least = 1e-5**-0.5 if whole else 1e-2

    def without_weight(x, b):
        return group_norm(x, None, b, groups=groups)

    def with_weight(*operands):
        return group_norm(*operands, groups=groups)

    check_against_float64(with_weight, x, weight, bias, slack=2, least=least)
    check_against_float64(without_weight, x, bias, slack=2, least=least)


@pytest.mark.parametrize("shape", [(8, 64, 50, 50), (1, 64, 300, 300)])
def test_images_far_from_zero_keep_their_variance(shape):
    x = 1000 + draws("float32")(*shape)
    check_against_float64(lambda x: group_norm(x, groups=32), x, slack=20)


def test_what_xla_does_faster_is_refused_in_words():
    x = jnp.zeros((1, 32, 256, 256))
    text = str(explain(jax.grad(lambda x: group_norm(x, groups=32).sum()), x))
    assert "group_norm_fwd on cuda runs triton" in text
    assert "32 groups of 65536 elements do not fill" in text
    token = jnp.zeros((2, 3, 65536)), jnp.zeros((2, 3)), jnp.zeros((2, 65536))
    assert "do not stay in the caches" in str(explain(moe_rms_norm_add, *token))


def decoded(codes, scales, block):
    if codes.dtype == jnp.uint8:
        codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    wide = jnp.repeat(scales, block, axis=-1)[..., : codes.shape[-1]]
    return np.asarray(codes.astype(jnp.float32) * wide, np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 13, 128, 1000, 1025, 2816, 5000, 16384, 40001])
@pytest.mark.parametrize("block", [None, 128, 32])
@pytest.mark.parametrize("format", ["e4m3fn", "int8"])
def test_quantised_norms_are_within_half_a_step(format, block, d, dtype):
    draw = draws(dtype, d)
    x, residual, weight = draw(37, d).at[5].set(0), draw(37, d).at[5].set(0), draw(d)
    width = min(block or d, d)
    poison(x)
    with backend("triton", strict=True):
        codes, scales, total = jax.jit(
            lambda *a: add_rms_norm_quantized(*a, format=format, block=block)
        )(x, residual, weight)
        alone = jax.jit(lambda *a: rms_norm_quantized(*a, format=format, block=block))(
            x, weight
        )
    u, w = (np.asarray(v, np.float64) for v in (x, weight))
    both = u + np.asarray(residual, np.float64)
    np.testing.assert_array_equal(
        total, (x.astype(jnp.float32) + residual).astype(dtype)
    )
    for rows, found in ((u, alone), (both, (codes, scales))):
        y = rows / np.sqrt((rows * rows).mean(-1, keepdims=True) + 1e-6) * w
        step = np.repeat(np.asarray(found[1], np.float64), width, -1)[:, :d]
        half = step / 2
        if format == "e4m3fn":  # 3 digits behind the first, 2**-9 at the least
            half = np.maximum(np.abs(y) / 16, step / 1024)
        error = np.abs(decoded(*found, width) - y)
        assert (error <= half * 1.001 + 1e-5 * np.abs(y)).all()
        assert (np.asarray(found[1])[5] == 1).all()
        largest = np.abs(decoded(*found, width)).max(-1)
        np.testing.assert_allclose(largest, np.abs(y).max(-1), rtol=1e-4, atol=1e-6)


def test_residual_and_weights_of_other_dtypes():
    low, wide = draws("bfloat16"), draws("float32", 1)
    operands = low(5, 1000), wide(5, 1000), wide(1000), low(1000)
    check_against_float64(sandwich_rms_norm, *operands, slack=2)
    check_against_float64(rms_norm_add, *operands[:3], slack=2)
    check_against_float64(gated_rms_norm, *operands[:3], slack=2)


def test_a_bad_row_spoils_no_other():
    draw = draws("float32")
    x, other, weight = draw(6, 1030), draw(6, 1030), draw(1030)
    good = [0, 2, 3, 5]
    for f in (gated_rms_norm, rms_norm_mul, rms_norm_add):
        for bad in (jnp.nan, jnp.inf):
            with backend("triton", strict=True):
                y = jax.jit(f)(x.at[1, 7].set(bad).at[4, 1029].set(bad), other, weight)
            with backend("xla"):
                expected = f(x, other, weight)
            for row in good:
                np.testing.assert_allclose(y[row], expected[row], rtol=1e-4, atol=1e-5)
            assert jnp.isnan(y[jnp.asarray([1, 4])]).any(-1).all()


def test_nothing_gives_nothing():
    x, weight = jnp.zeros((0, 16)), jnp.ones(16)
    with backend("triton", strict=True):
        slope = jax.grad(lambda x, w: gated_rms_norm(x, x, w).sum(), (0, 1))
        dx, dweight = slope(x, weight)
    assert dx.shape == x.shape and (dweight == 0).all()


@pytest.mark.parametrize("f", [gated_rms_norm, rms_norm_add, sandwich_rms_norm])
@pytest.mark.parametrize("n, d", [(137, 16384), (37, 40001)])
def test_gradients_of_long_rows_are_the_same_each_time(f, n, d):
    draw = draws("bfloat16")
    operands = draw(n, d), draw(n, d), draw(d)
    if f is sandwich_rms_norm:
        operands += (draw(d),)

    def loss(*operands):
        return sum(y.astype(jnp.float32).sum() for y in as_tuple(f(*operands)))

    with backend("triton", strict=True):
        slope = jax.jit(jax.grad(loss, argnums=range(len(operands))))
        first, second = slope(*operands), slope(*operands)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
