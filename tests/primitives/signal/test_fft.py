"""fft: NumPy's values for every length, norm and layout; gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import fft
from jaxkern.testing.checks import bf16, case, f32

CASES = [
    case("plain", real=f32(8, 7), imaginary=f32(8, 7), inverse=True),
    case("even", real=f32(2, 4, 8), imaginary=f32(2, 4, 8), norm="none"),
    case("bf16", full=True, real=bf16(2, 3, 9), imaginary=bf16(2, 3, 9), norm="ortho"),
    case("long", full=True, real=f32(4, 4093), imaginary=f32(4, 4093), norm="none"),
]
INVERSES = [False, True]


def draw(*shape, seed=0):
    rng = np.random.default_rng([seed, *shape])
    return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)


def numpy_fft(x, inverse, norm):
    if norm == "none":  # NumPy's direction without a scale
        norm = "forward" if inverse else "backward"
    return (np.fft.ifft if inverse else np.fft.fft)(x, norm=norm)


@pytest.mark.parametrize("norm", ["none", "backward", "ortho", "forward"])
@pytest.mark.parametrize("inverse", INVERSES)
def test_equals_numpy(norm, inverse):
    x = draw(3, 12)
    y = fft(jnp.asarray(x, jnp.complex64), inverse=inverse, norm=norm)
    np.testing.assert_allclose(y, numpy_fft(x, inverse, norm), atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 7, 16, 17, 64, 97, 360])
def test_every_length(n):
    x = draw(2, n)
    y = fft(jnp.asarray(x, jnp.complex64))
    np.testing.assert_allclose(y, np.fft.fft(x), rtol=1e-4, atol=1e-5 * n)


@pytest.mark.parametrize("inverse", INVERSES)
def test_formula(inverse):
    n = 5
    x = draw(n)
    sign = 2j if inverse else -2j
    matrix = np.exp(sign * np.pi / n * np.outer(np.arange(n), np.arange(n)))
    y = fft(jnp.asarray(x, jnp.complex64), inverse=inverse, norm="none")
    np.testing.assert_allclose(y, matrix @ x, atol=1e-5)


def test_the_unscaled_round_trip_multiplies_by_n():
    """What one origin calls "backward" scales in neither direction: "none" here."""
    x = jnp.asarray(draw(6), jnp.complex64)
    for norm, factor in {"none": 6, "backward": 1, "ortho": 1, "forward": 1}.items():
        back = fft(fft(x, norm=norm), inverse=True, norm=norm)
        np.testing.assert_allclose(back, factor * x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ["none", "ortho"])
def test_layouts(norm):
    x = draw(2, 6)
    expected = numpy_fft(x, False, norm)
    split = jnp.asarray(np.concatenate([x.real, x.imag], -1), jnp.float32)
    y = fft(split, norm=norm, layout="split")
    np.testing.assert_allclose(y[:, :6] + 1j * y[:, 6:], expected, atol=1e-5)
    interleaved = jnp.asarray(np.stack([x.real, x.imag], -1), jnp.float32)
    y = fft(interleaved, norm=norm, layout="interleaved")
    np.testing.assert_allclose(y[..., 0] + 1j * y[..., 1], expected, atol=1e-5)


@pytest.mark.parametrize("inverse", INVERSES)
def test_gradient_is_that_of_numpy_s_transform_in_jax(inverse):
    x, weights = (jnp.asarray(draw(7, seed=i), jnp.complex64) for i in (0, 1))
    theirs = jnp.fft.ifft if inverse else jnp.fft.fft

    def loss(f):
        return lambda x: jnp.sum(jnp.abs(f(x) * weights) ** 3)

    expected = jax.grad(loss(lambda x: theirs(x, norm="ortho")))(x)
    g = jax.grad(loss(lambda x: fft(x, inverse=inverse, norm="ortho")))(x)
    np.testing.assert_allclose(g, expected, rtol=1e-4, atol=1e-4)


def test_the_adjoint_of_the_unscaled_transform_is_its_inverse():
    x, dy = (jnp.asarray(draw(2, 10, seed=i).real, jnp.float32) for i in (0, 1))

    def f(x):
        return fft(x, norm="none", layout="split")

    (dx,) = jax.linear_transpose(f, x)(dy)
    back = fft(dy, inverse=True, norm="none", layout="split")
    np.testing.assert_allclose(dx, back, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jnp.vdot(dx, x), jnp.vdot(dy, f(x)), rtol=1e-4)


def test_a_cut_transform_is_gathered():
    x = jnp.asarray(draw(3, 8), jnp.complex64)
    mesh = jax.make_mesh(
        (2,), ("m",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    cut = jax.device_put(x, NamedSharding(mesh, P(None, "m")))
    np.testing.assert_allclose(jax.jit(fft)(cut), fft(x), rtol=1e-5, atol=1e-5)


def test_float64_and_half_precision():
    with jax.enable_x64(True):
        x = draw(11)
        y = fft(jnp.asarray(x))
        assert y.dtype == jnp.complex128
        np.testing.assert_allclose(y, np.fft.fft(x), atol=1e-13)
    x = jnp.asarray(draw(64).real, jnp.bfloat16)
    y = fft(x, layout="split")
    exact = fft(x.astype(jnp.float32), layout="split")
    np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))


def test_every_error_says_what_to_do():
    x = jnp.zeros((2, 3))
    with pytest.raises(ValueError, match=r"`norm` must be one of .*, got 'Backward'"):
        fft(x, norm="Backward")
    with pytest.raises(ValueError, match=r"`layout` must be one of .*, got 'block'"):
        fft(x, layout="block")
    with pytest.raises(TypeError, match=r"must be \[..., n, 2\], got shape \(2, 3\)"):
        fft(x, layout="interleaved")
    with pytest.raises(TypeError, match=r"must be \[..., 2 \* n\], got shape \(2, 3\)"):
        fft(x, layout="split")
    with pytest.raises(TypeError, match=r"must be real for layout 'split'"):
        fft(x + 0j, layout="split")


@pytest.mark.parametrize("layout", ["complex", "split"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_gradient_where_the_transformed_dim_is_cut(layout, kind):
    # the n of CASES was odd, so that no check cut it
    real, imaginary = np.random.default_rng(0).standard_normal((2, 4, 16))
    x = jnp.asarray(real + 1j * imaginary if layout == "complex" else real)

    def loss(x):
        return jnp.sum(jnp.sin(jnp.abs(fft(x, layout=layout))))

    expected = jax.jit(jax.value_and_grad(loss))(x)
    mesh = jax.make_mesh((2,), ("m",), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        cut = jax.device_put(x, NamedSharding(mesh, P(None, "m")))
        actual = jax.jit(jax.value_and_grad(loss))(cut)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)
