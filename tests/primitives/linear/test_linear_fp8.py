"""linear with operands of 8 bits: the same numbers as float64 of the rounded ones."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import backend, linear, quantize_fp8
from jaxkern.models.remat import saves
from jaxkern.primitives.float8 import largest_float8
from jaxkern.primitives.linear.policy import policy
from jaxkern.primitives.linear.scaled_float8 import (
    GRADIENTS,
    OPERANDS,
    rounded_gradient,
    scale_of,
)
from jaxkern.testing.checks import bf16, case, f16, f32

SUMS = {"preferred_element_type": jnp.dtype("float32"), "straight_through": True}
CASES = [
    case("plain", x=f32(2, 3, 8), w=f32(5, 8), **SUMS),
    case("odd", x=bf16(1, 7, 9), w=bf16(3, 9), **SUMS),
    case("large", x=f16(1, 4, 16, scale=1e4), w=f32(2, 16, scale=1e-30), **SUMS),
    case("empty", x=f32(0, 3, 4), w=f32(2, 4), **SUMS),
    case("smollm2_down", x=bf16(1, 9, 1536), w=bf16(576, 1536), full=True, **SUMS),
]
RNG = np.random.default_rng(0)
fp8 = functools.partial(linear, compute_dtype="float8_e4m3fn")


def draw(*shape, dtype=jnp.bfloat16, scale=1.0):
    return jnp.asarray(scale * RNG.standard_normal(shape), dtype)


def rounded(a, dtype):
    """By NumPy: the nearest 8-bit floats with the least power of two that fits."""
    a = np.asarray(a).astype(np.float64)
    dtype = np.dtype(dtype)
    largest = float(ml_dtypes.finfo(dtype).max)
    scale = 2.0 ** np.ceil(np.log2(np.abs(a).max() / largest))
    return (a / scale).astype(dtype).astype(np.float64) * scale


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (2, 1, 3, 64)])
def test_three_products_of_rounded_operands(dtype, shape):
    x, w, dy = draw(*shape, dtype=dtype), draw(7, 64, dtype=dtype), draw(*shape[:-1], 7)
    y, pull = jax.vjp(jax.jit(fp8), x, w)
    dx, dw = pull(dy.astype(dtype))
    x8, w8 = (rounded(a, jnp.float8_e4m3fn) for a in (x, w))
    dy8 = rounded(dy, jnp.float8_e5m2)
    rows = dy8.reshape(-1, 7), x8.reshape(-1, 64)
    bound = 2**-8 if dtype == jnp.bfloat16 else 2**-20
    for found, expected in ((y, x8 @ w8.T), (dx, dy8 @ w8), (dw, rows[0].T @ rows[1])):
        assert found.dtype == dtype
        error = np.abs(np.asarray(found, np.float64) - expected)
        assert error.max() <= 1.01 * bound * np.abs(expected).max()
    plain = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    assert np.abs(x8 @ w8.T - plain).max() > 0.01  # it did round


def test_the_scale_is_the_least_power_of_two_that_fits():
    for form in (OPERANDS, GRADIENTS):
        largest = largest_float8(form)
        for x in (1.0, -largest, 1.001 * largest, 3e38, 1e-20, 0.7):
            x = float(np.float32(x))
            scale = float(scale_of(jnp.full((2, 2), x, jnp.float32), form))
            assert np.log2(scale) % 1 == 0
            assert abs(x) <= largest * scale < 2 * abs(x) * (1 + 1e-6), (x, scale)
    assert float(scale_of(jnp.full(1, 2e-38), OPERANDS)) == 2.0**-110
    assert float(scale_of(jnp.zeros(3), OPERANDS)) == 1
    assert float(scale_of(jnp.zeros((0, 3)), OPERANDS)) == 1


def test_zeros_infinities_and_nan():
    x, w = draw(4, 16), draw(3, 16)
    np.testing.assert_array_equal(fp8(jnp.zeros((4, 16)), w), 0)
    for bad in (np.inf, -np.inf, np.nan):
        broken = x.at[1, 2].set(bad)
        assert np.isnan(np.float32(fp8(broken, w))).all()
        dw = jax.grad(lambda w: fp8(broken, w).astype(jnp.float32).sum())(w)  # noqa: B023
        assert np.isnan(np.float32(dw)).all()
        _, pull = jax.vjp(fp8, x, w)
        for gradient in pull(jnp.ones((4, 3), jnp.bfloat16).at[0, 0].set(bad)):
            assert np.isnan(np.float32(gradient)).all()


def test_bias_policy_and_preferred_dtype():
    x, w, bias = draw(4, 16), draw(3, 16), draw(3)
    x8, w8 = (rounded(a, jnp.float8_e4m3fn) for a in (x, w))
    exact = x8 @ w8.T
    wide = fp8(x, w, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(wide, exact, rtol=1e-6, atol=1e-6)
    y = fp8(x, w, bias)
    once = (exact + np.asarray(bias, np.float64)).astype(np.float32)
    np.testing.assert_array_equal(y, jnp.asarray(once).astype(jnp.bfloat16))
    with policy("f32", output="float32"):
        inside = fp8(x, w)
        with_f16 = linear(x, w, compute_dtype="float16")
    np.testing.assert_array_equal(inside, wide)
    assert with_f16.dtype == jnp.float32
    narrow = linear(x.astype(jnp.float32), w, compute_dtype="bfloat16")
    np.testing.assert_allclose(
        narrow, np.float64(np.float32(x)) @ np.float64(np.float32(w)).T, rtol=1e-5
    )


def test_what_is_not_understood_is_refused():
    x, w = draw(4, 16), draw(3, 16)
    with pytest.raises(ValueError, match=r"must be float8_e4m3fn or .* float8_e5m2"):
        linear(x, w, compute_dtype=jnp.float8_e5m2)
    with pytest.raises(ValueError, match=r"got int8\. 8-bit products have one scale"):
        linear(x, w, compute_dtype="int8")
    with pytest.raises(ValueError, match="float8_e4m3fn takes arrays"):
        fp8(x, quantize_fp8(w))
    with pytest.raises(TypeError, match=r"got \(4, 16\) and \(3, 8\)"):
        fp8(x, w[:, :8])


def test_examples_of_a_vmap_have_scales_of_their_own():
    """Folded into the rows, the largest of all would take the small one's digits."""
    sizes = np.array([1.0, 1e-6, 1e5])[:, None, None]
    x = jnp.asarray(sizes * RNG.standard_normal((3, 4, 16)), jnp.float32)
    w, dy = draw(5, 16), jnp.asarray(sizes[::-1] * RNG.standard_normal((3, 4, 5)))

    def both(x, w, dy):
        y, pull = jax.vjp(fp8, x, w)
        return y, *pull(dy.astype(y.dtype))

    alone = [both(*each, dy_) for *each, dy_ in zip(x, [w] * 3, dy, strict=True)]
    mapped = jax.vmap(both, (0, None, 0))(x, w, dy)
    for found, expected in zip(mapped, zip(*alone, strict=True), strict=True):
        np.testing.assert_allclose(found, jnp.stack(expected), rtol=1e-5)
    y, pull = jax.vjp(lambda x: jax.vmap(fp8, (0, None))(x, w), x)  # grad of vmap
    np.testing.assert_allclose(pull(dy.astype(y.dtype))[0], mapped[1], rtol=1e-5)


def test_derivatives_are_straight_through():
    x, w = draw(4, 16, dtype=jnp.float32), draw(3, 16, dtype=jnp.float32)
    v, u = draw(4, 16, dtype=jnp.float32), draw(3, 16, dtype=jnp.float32)
    x8, w8 = (rounded(a, jnp.float8_e4m3fn) for a in (x, w))
    _, dot = jax.jvp(fp8, (x, w), (v, u))
    expected = v @ w8.T + x8 @ np.float64(u).T
    np.testing.assert_allclose(dot, expected, rtol=1e-4, atol=1e-5)

    def loss(x, w):
        return jnp.sum(fp8(x, w))  # cotangents of one are 8-bit floats

    hessian = jax.jvp(jax.grad(loss, (0, 1)), (x, w), (v, u))[1]
    ones = np.ones((4, 3))
    np.testing.assert_allclose(hessian[0], ones @ np.float64(u), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(hessian[1], ones.T @ np.float64(v), rtol=1e-4, atol=1e-5)
    again = jax.grad(lambda x, w: jnp.vdot(jax.grad(loss, 1)(x, w), u))(x, w)
    u8 = rounded(u, jnp.float8_e5m2)  # it came back through a product, so it is rounded
    assert np.abs(np.float64(again) - ones @ u8).max() <= 0.13 * np.abs(u8).max() * 3


def test_the_identity_that_rounds_what_comes_back():
    y, ct = draw(3, 5, dtype=jnp.float32), draw(3, 5, dtype=jnp.float32)
    out, pull = jax.vjp(rounded_gradient, y)
    np.testing.assert_array_equal(out, y)
    np.testing.assert_array_equal(pull(ct)[0], rounded(ct, jnp.float8_e5m2))
    np.testing.assert_array_equal(jax.jvp(rounded_gradient, (y,), (ct,))[1], ct)
    rows = jax.vmap(jax.vmap(rounded_gradient), in_axes=1, out_axes=1)
    _, pull = jax.vjp(rows, y)
    each = [[rounded(e[None], jnp.float8_e5m2)[0] for e in row] for row in ct]
    np.testing.assert_array_equal(pull(ct)[0], each)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("cuts", [P("a"), P(None, "b"), P("a", "b")])
def test_the_largest_element_is_that_of_all_devices(kind, cuts):
    """One element on one device sets the scale of every one."""
    x, w, dy = draw(2, 4, 16), draw(6, 16), draw(2, 4, 6)
    x, dy = x.at[1, 3, 2].set(300), dy.at[1, 3, 2].set(70)

    def both(x, w, dy):
        y, pull = jax.vjp(fp8, x, w)
        return y, *pull(dy)

    expected = jax.jit(both)(x, w, dy)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        put = [jax.device_put(a, NamedSharding(mesh, cuts)) for a in (x, dy)]
        whole = jax.device_put(w, NamedSharding(mesh, P()))
        found = jax.jit(both)(put[0], whole, put[1])
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2**-7, atol=0.05)


def test_checkpoint_keeps_the_operands_in_8_bits():
    x, w = draw(4, 16), draw(16, 16)

    def layer(x, w):
        return jnp.sum(fp8(jnp.tanh(fp8(jnp.sin(x), w)), w).astype(jnp.float32))

    policy = saves("linear_fp8", "linear_fp8_fwd")
    kept = jax.checkpoint(layer, policy=policy)
    found, expected = (jax.jit(jax.grad(f, (0, 1)))(x, w) for f in (kept, layer))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=0.05, atol=0.05)
    kept_for = {f: jax.tree.leaves(jax.vjp(f, x, w)[1]) for f in (kept, layer)}
    codes = [a for a in kept_for[kept] if a.dtype == jnp.uint8]
    assert len(codes) == 4  # two of x and two of w


def test_products_for_cuda_are_those_that_xla_makes_in_fp8():
    """A convert from 8 bits, times one number, straight into the product."""

    def both(x, w, dy):
        y, pull = jax.vjp(fp8, x, w)
        return y, *pull(dy)

    args = draw(2, 8, 32), draw(16, 32), draw(2, 8, 16)
    with backend("xla"):
        traced = jax.jit(both).trace(*args)
    lowered = traced.lower(lowering_platforms=("cuda",))
    lines = lowered.as_text().splitlines()
    made = {s[0]: line for line in lines if "=" in line and (s := line.split())}
    products = [line for line in lines if "dot_general" in line]
    assert len(products) == 3
    forms = []
    for line in products:
        assert line.endswith("bf16>")
        for name in line.split("dot_general ")[1].split(", contracting")[0].split(", "):
            inner = made[name]
            values, scale = inner.split("multiply ")[1].split(" :")[0].split(", ")
            assert "broadcast_in_dim" in made[scale] and "dims = []" in made[scale]
            behind = lines[lines.index(made[values]) :]  # what the platform chooses
            convert = next(s for s in behind if "stablehlo.convert" in s and "f8" in s)
            forms += re.findall(r"x(f8\w+)>\) -> .*bf16>", convert)
    assert sorted(forms) == 4 * ["f8E4M3FN"] + 2 * ["f8E5M2"]
