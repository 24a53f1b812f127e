"""sandwich_rms_norm: both norms, the sum between them, one and three readers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain, multi_rms_norm, rms_norm, rms_norm_add, sandwich_rms_norm
from jaxkern.testing.checks import bf16, case, f16, f32
from tests.primitives.norm.test_rms_norm import formula as norm


def shapes(*x, spec=f32):
    weights = {n: spec(x[-1]) for n in ("weight", "next_weight")}
    return dict(x=spec(*x), residual=spec(*x)) | weights


def triple(*x, spec=f32):
    weights = {f"next_weight{i}": spec(x[-1]) for i in (1, 2, 3)}
    return dict(x=spec(*x), residual=spec(*x), weight=spec(x[-1])) | weights


CASES = {
    "sandwich_rms_norm": [
        case("plain", **shapes(4, 2, 8), eps=0.1, offset=1.0),
        case("mixed", x=f16(3, 7), residual=f32(3, 7), next_weight=f32(7)),
        case("gemma3_4b", full=True, **shapes(4, 2560, spec=bf16), offset=1.0),
    ],
    "sandwich_triple_rms_norm": [
        case("plain", **triple(4, 2, 8), eps=0.1, offset=1.0),
        case(
            "no_scales",
            full=True,
            **triple(3, 7, spec=bf16) | {"weight": None, "next_weight3": None},
            eps=1e-6,
            offset=0.0,
        ),
        case("gemma4_26b", full=True, **triple(4, 2816), eps=1e-6, offset=0.0),
    ],
}


def norm_gradient(x, dxhat, eps):
    r = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    return r * dxhat - x * r**3 * (dxhat * x).mean(-1, keepdims=True)


@pytest.mark.parametrize("number", [1, 3])
def test_values_and_gradients_match_the_formula(number):
    rng = np.random.default_rng(0)
    x, residual, dtotal = rng.normal(size=(3, 5, 9))
    weight, next_weights = rng.normal(size=9), rng.normal(size=(number, 9))
    dys = rng.normal(size=(number, 5, 9))
    results, vjp = jax.vjp(
        lambda *operands: sandwich_rms_norm(*operands, eps=0.1, offset=1.0),
        *map(jnp.float32, (x, residual, weight, *next_weights)),
    )
    *ys, y_total = results
    total = residual + norm(x, eps=0.1) * (weight + 1)
    np.testing.assert_allclose(y_total, total, atol=4e-6)
    for y, w in zip(ys, next_weights, strict=True):
        np.testing.assert_allclose(y, norm(total, eps=0.1) * (w + 1), atol=1e-5)

    gradients = vjp((*jnp.float32(dys), jnp.float32(dtotal)))
    dx, dresidual, dweight, *dnext = gradients
    dtotalhat = sum(dy * (w + 1) for dy, w in zip(dys, next_weights, strict=True))
    dsum = dtotal + norm_gradient(total, dtotalhat, 0.1)
    np.testing.assert_allclose(dresidual, dsum, atol=2e-5)
    expected = norm_gradient(x, dsum * (weight + 1), 0.1)
    np.testing.assert_allclose(dx, expected, atol=2e-5)
    np.testing.assert_allclose(dweight, (dsum * norm(x, eps=0.1)).sum(0), atol=3e-5)
    for dw, dy in zip(dnext, dys, strict=True):
        np.testing.assert_allclose(dw, (dy * norm(total, eps=0.1)).sum(0), atol=3e-5)


def test_it_is_rms_norm_add_then_the_norms():
    rng = np.random.default_rng(1)
    x, residual = jnp.float32(rng.normal(size=(2, 3, 8)))
    weight, *next_weights = jnp.float32(rng.normal(size=(4, 8)))
    total = rms_norm_add(x, residual, weight)
    expected = (*multi_rms_norm(total, *next_weights), total)
    results = sandwich_rms_norm(x, residual, weight, *next_weights)
    for y, e in zip(results, expected, strict=True):
        np.testing.assert_allclose(y, e, atol=1e-6)
    y, _ = sandwich_rms_norm(x, residual, weight, None)
    np.testing.assert_allclose(y, rms_norm(total), atol=1e-6)


def test_the_sum_is_not_rounded_before_the_second_norm():
    x = jnp.asarray([[3.0, 4.0]], jnp.bfloat16)  # normed: 3 sqrt(2) / 5, 4 sqrt(2) / 5
    residual = jnp.asarray([[-0.84375, -1.125]], jnp.bfloat16)  # nearly its negative
    y, total = sandwich_rms_norm(x, residual, None, None, eps=0.0)
    exact = np.asarray([0.6 * 2**0.5 - 0.84375, 0.8 * 2**0.5 - 1.125])
    assert y.dtype == total.dtype == jnp.bfloat16
    exact_y = exact / np.sqrt((exact**2).mean())
    np.testing.assert_allclose(np.float32(y[0]), exact_y, rtol=2**-8)


def test_it_is_one_op_forward_and_backward():
    def loss(x, w):
        return sum(y.sum() for y in sandwich_rms_norm(x, x, w, w))

    rows = explain(jax.grad(loss, (0, 1)), jnp.ones((2, 8)), jnp.ones(8)).rows
    names = [row.op for row in rows]
    assert names == ["sandwich_rms_norm_fwd", "sandwich_rms_norm_bwd"]


def test_every_error_says_what_to_do():
    x, w = jnp.ones((2, 8)), jnp.ones(8)
    with pytest.raises(TypeError, match="takes 1 or 3 weights of the next norms, got"):
        sandwich_rms_norm(x, x, w)
    with pytest.raises(TypeError, match="sandwich_rms_norm: dim `d` is 8 in `x` but 3"):
        sandwich_rms_norm(x, x, w, w[:3])
