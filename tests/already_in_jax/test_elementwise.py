"""Elementwise work that JAX has already: what the origin systems promise holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

from jaxkern import embedding

INF, NAN = np.inf, np.nan
RNG = np.random.default_rng(0)
X = jnp.float32(RNG.uniform(0.5, 2, (3, 4)))
Z = jnp.float32(RNG.uniform(-2, 2, (3, 4)))
DY = jnp.float32(RNG.standard_normal((3, 4)))


@pytest.mark.parametrize(
    "f, y, dx",
    [
        (jnp.exp, lambda x: np.exp(x), lambda x, dy: dy * np.exp(x)),
        (jnp.log, lambda x: np.log(x), lambda x, dy: dy / x),
        (jnp.sqrt, lambda x: np.sqrt(x), lambda x, dy: dy / (2 * np.sqrt(x))),
        (lax.rsqrt, lambda x: x**-0.5, lambda x, dy: -dy / 2 * x**-1.5),
        (jnp.sin, np.sin, lambda x, dy: dy * np.cos(x)),
        (jnp.cos, np.cos, lambda x, dy: -dy * np.sin(x)),
        (jnp.tanh, np.tanh, lambda x, dy: (1 - np.tanh(x) ** 2) * dy),
        (
            jax.nn.sigmoid,
            lambda x: 1 / (1 + np.exp(-x)),
            lambda x, dy: dy * np.exp(-x) / (1 + np.exp(-x)) ** 2,
        ),
    ],
    ids=["exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid"],
)
def test_functions_and_their_backward_formulas(f, y, dx):
    x, dy = np.float64(X), np.float64(DY)
    actual, vjp = jax.vjp(f, X)
    np.testing.assert_allclose(actual, y(x), 1e-5, 1e-6)
    np.testing.assert_allclose(vjp(DY)[0], dx(x, dy), 1e-5, 1e-6)


def test_silu_and_its_backward_formula():
    x, dy = np.float64(Z), np.float64(DY)
    s = 1 / (1 + np.exp(-x))
    y, vjp = jax.vjp(jax.nn.silu, Z)
    np.testing.assert_allclose(y, x * s, 1e-5, 1e-6)
    np.testing.assert_allclose(vjp(DY)[0], dy * s * (1 + x * (1 - s)), 1e-5, 1e-6)


@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_elu_and_its_derivative_at_zero(alpha):
    z = jnp.asarray([-2.0, 0.0, 3.0, 1e30])
    y, vjp = jax.vjp(lambda z: jax.nn.elu(z, alpha), z)
    np.testing.assert_allclose(y, [alpha * np.expm1(-2), 0, 3, 1e30], 1e-6)
    slope = [alpha * np.exp(-2), alpha, 1, 1]
    np.testing.assert_allclose(vjp(jnp.ones(4))[0], slope, 1e-6)


def test_relu_has_the_derivative_zero_at_zero():
    slope = jax.grad(lambda x: jax.nn.relu(x).sum())(jnp.asarray([-1.0, 0.0, 2.0]))
    np.testing.assert_array_equal(slope, [0, 0, 1])


@pytest.mark.parametrize(
    "f, x, expected",
    [
        (jnp.exp, [89.0, -INF], [INF, 0]),
        (jnp.log, [0.0, -1.0], [-INF, NAN]),
        (jnp.sqrt, [0.0, -1.0], [0, NAN]),
        (lax.rsqrt, [0.0, INF], [INF, 0]),
    ],
)
def test_domain_errors_are_ieee(f, x, expected):
    np.testing.assert_array_equal(f(jnp.asarray(x)), expected)


def test_the_gradient_of_sqrt_at_zero_is_infinite_or_nan():
    vjp = jax.vjp(jnp.sqrt, jnp.zeros(3))[1]
    np.testing.assert_array_equal(vjp(jnp.asarray([1.0, -1, 0]))[0], [INF, -INF, NAN])


def test_divide_and_its_gradients_with_broadcasting():
    a, b, dy = np.float64(Z), np.float64(X[0]), np.float64(DY)
    y, vjp = jax.vjp(jnp.divide, Z, X[0])
    np.testing.assert_allclose(y, a / b, 1e-5)
    da, db = vjp(DY)
    np.testing.assert_allclose(da, dy / b, 1e-5)
    np.testing.assert_allclose(db, (-dy * a / b**2).sum(0), 1e-4, 1e-5)


@pytest.mark.parametrize(
    "f, da, db",
    [
        (jnp.add, lambda a, b: 1, lambda a, b: 1),
        (jnp.subtract, lambda a, b: 1, lambda a, b: -1),
        (jnp.multiply, lambda a, b: b, lambda a, b: a),
        (jnp.power, lambda a, b: b * a ** (b - 1), lambda a, b: a**b * np.log(a)),
    ],
    ids=["add", "subtract", "multiply", "power"],
)
def test_binary_functions_broadcast_and_their_gradients_sum(f, da, db):
    a, b, dy = np.float64(X), np.float64(X[:, :1]), np.float64(DY)
    y, vjp = jax.vjp(f, X, X[:, :1])
    numpy = getattr(np, f.__name__)
    np.testing.assert_allclose(y, numpy(a, b), 1e-5)
    actual = vjp(DY)
    np.testing.assert_allclose(actual[0], dy * da(a, b), 1e-4, 1e-5)
    total = (dy * db(a, b)).sum(1, keepdims=True)
    np.testing.assert_allclose(actual[1], total, 1e-4, 1e-5)


def test_power_has_finite_gradients_at_zero():
    grads = jax.grad(lambda a, b: a**b, (0, 1))(0.0, 2.0)
    np.testing.assert_array_equal(grads, [0, 0])


def test_scalars_do_not_change_the_dtype_and_half_precision_rounds_once():
    x = jnp.asarray([1.0, 3.0], jnp.bfloat16)
    for y in (x + 0.1, x * 0.1, x / 3.0):
        assert y.dtype == jnp.bfloat16
    exact = np.float32(x) * np.float32(jnp.bfloat16(0.1))
    np.testing.assert_array_equal(x * 0.1, exact.astype(jnp.bfloat16))


def test_a_cast_rounds_half_to_even():
    x = jnp.asarray([1 + 2.0**-8, 1 + 3 * 2.0**-8])  # halfway between two bfloat16
    np.testing.assert_array_equal(x.astype(jnp.bfloat16), [1, 1 + 2.0**-6])
    x = jnp.asarray([1 + 2.0**-11, 65519.0, 65520.0])
    np.testing.assert_array_equal(x.astype(jnp.float16), [1, 65504, INF])
    half = jnp.arange(8, dtype=jnp.float16) / 3
    np.testing.assert_array_equal(half.astype(jnp.float32), np.float32(half))


def test_checkify_finds_an_integer_division_by_zero():
    checked = checkify.checkify(jnp.floor_divide, errors=checkify.div_checks)
    error, _ = checked(jnp.asarray([4, 2]), jnp.asarray([2, 0]))
    assert "division by zero" in error.get()


def test_rows_of_a_table_times_a_scale():
    table = jnp.float32(RNG.standard_normal((5, 4)))
    y = embedding(jnp.asarray([3, 0]), table) * 4**0.5
    np.testing.assert_array_equal(y, table[jnp.asarray([3, 0])] * 2)


def test_a_bias_is_added_to_every_row_and_its_gradient_is_the_column_sum():
    y, vjp = jax.vjp(jnp.add, X, Z[0])
    np.testing.assert_array_equal(y, np.asarray(X) + np.asarray(Z[0]))
    np.testing.assert_allclose(vjp(DY)[1], np.float64(DY).sum(0), 1e-5)


def test_outer_product_and_its_gradients():
    left, right, dy = X[:, 0], Z[0], np.float64(DY)
    y, vjp = jax.vjp(jnp.outer, left, right)
    np.testing.assert_array_equal(y, left[:, None] * right)
    dleft, dright = vjp(DY)
    np.testing.assert_allclose(dleft, dy @ np.float64(right), 1e-5, 1e-6)
    np.testing.assert_allclose(dright, np.float64(left) @ dy, 1e-5, 1e-6)


def test_row_sum_and_its_gradient():
    y, vjp = jax.vjp(lambda x: x.sum(1), X)
    np.testing.assert_allclose(y, np.float64(X).sum(1), 1e-6)
    dx = vjp(DY[:, 0])[0]
    np.testing.assert_array_equal(dx, np.broadcast_to(DY[:, :1], (3, 4)))
    ones = jnp.ones((1, 4096), jnp.bfloat16)  # sums in float32: 256 + 1 = 256 else
    np.testing.assert_array_equal(jnp.sum(ones, 1), [4096])


def test_where_selects_and_stops_the_other_gradient():
    grad = jax.grad(lambda x: jnp.where(x > 1, x, 0).sum())(X)
    np.testing.assert_array_equal(grad, np.asarray(X) > 1)


def test_complex_functions():
    z = jnp.asarray([3 + 4j, -1j], jnp.complex64)
    np.testing.assert_allclose(jnp.real(z * jnp.conj(z)), [25, 1])
    for f, numpy in ((jnp.exp, np.exp), (jnp.tanh, np.tanh), (jnp.multiply, None)):
        y, e = (f(z, z), z * z) if numpy is None else (f(z), numpy(np.complex128(z)))
        np.testing.assert_allclose(y, e, 1e-5)
        assert y.dtype == jnp.complex64


def test_a_function_of_one_number_is_traced_with_its_derivative():
    def f(x):
        return jnp.where(x > 1, x**3, x)

    slope = jax.grad(lambda x: f(x).sum())(X)
    np.testing.assert_allclose(slope, np.where(X > 1, 3 * np.asarray(X) ** 2, 1), 1e-5)


def test_scan_and_its_gradients():
    def f(start, xs):
        return lax.scan(lambda s, x: (s * x, s), start, xs)[0]

    start, xs = jnp.float32(2), jnp.asarray([3.0, 5.0])
    np.testing.assert_allclose(f(start, xs), 30)
    dstart, dxs = jax.grad(f, (0, 1))(start, xs)
    np.testing.assert_allclose(dstart, 15)
    np.testing.assert_allclose(dxs, [10, 6])


def test_options_are_static_and_compiled_once_for_each_value():
    traced = []

    @functools.partial(jax.jit, static_argnames="rows")
    def first(x, *, rows):
        traced.append(rows)
        return x[:rows]

    for rows in (2, 1, 2):
        np.testing.assert_array_equal(first(X, rows=rows), X[:rows])
    assert traced == [2, 1]
