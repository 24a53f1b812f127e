"""moe_rms_norm_add: the mixture, both forms, gradients, one rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import moe_rms_norm_add, rms_norm
from jaxkern.testing.checks import bf16, case, f16, f32
from tests.primitives.norm.test_rms_norm import formula as norm
from tests.primitives.norm.test_sandwich_rms_norm import norm_gradient


def shapes(*lead, e, d, spec=f32):
    return dict(
        expert_out=spec(*lead, e, d),
        expert_weights=f32(*lead, e),
        residual=spec(*lead, d),
        weight=spec(d),
    )


CASES = [
    case(
        "both_norms",
        **shapes(4, 2, e=3, d=8),
        residual_weight=f32(8),
        normalize_residual=True,
        offset=1.0,
    ),
    case("plain", **shapes(3, e=2, d=7, spec=f16) | {"weight": None}, eps=0.1),
    case("gemma4_26b", full=True, **shapes(4, e=8, d=2816, spec=bf16)),
]


@pytest.mark.parametrize("normalize_residual", [False, True])
def test_values_and_gradients_match_the_formula(normalize_residual):
    rng = np.random.default_rng(0)
    outputs, experts = rng.normal(size=(5, 3, 9)), rng.normal(size=(5, 3))
    residual, dy = rng.normal(size=(2, 5, 9))
    weight, residual_weight = rng.normal(size=(2, 9))

    def f(outputs, experts, residual, weight, residual_weight):
        return moe_rms_norm_add(
            outputs,
            experts,
            residual,
            weight,
            residual_weight if normalize_residual else None,
            normalize_residual=normalize_residual,
            eps=0.1,
            offset=1.0,
        )

    operands = outputs, experts, residual, weight, residual_weight
    y, vjp = jax.vjp(f, *map(jnp.float32, operands))
    mixed = np.einsum("te,ted->td", experts, outputs)
    added = residual
    if normalize_residual:
        added = norm(residual, residual_weight, eps=0.1, offset=1.0)
    expected = added + norm(mixed, weight, eps=0.1, offset=1.0)
    np.testing.assert_allclose(y, expected, atol=1e-5)

    doutputs, dexperts, dresidual, dweight, dresidual_weight = vjp(jnp.float32(dy))
    dmixed = norm_gradient(mixed, dy * (weight + 1), 0.1)
    expected = np.einsum("te,td->ted", experts, dmixed)
    np.testing.assert_allclose(doutputs, expected, atol=2e-5)
    expected = np.einsum("ted,td->te", outputs, dmixed)
    np.testing.assert_allclose(dexperts, expected, atol=2e-5)
    np.testing.assert_allclose(dweight, (dy * norm(mixed, eps=0.1)).sum(0), atol=2e-5)
    if normalize_residual:
        expected = norm_gradient(residual, dy * (residual_weight + 1), 0.1)
        np.testing.assert_allclose(dresidual, expected, atol=2e-5)
        expected = (dy * norm(residual, eps=0.1)).sum(0)
        np.testing.assert_allclose(dresidual_weight, expected, atol=2e-5)
    else:
        np.testing.assert_allclose(dresidual, dy, atol=1e-6)


def test_the_mixture_is_not_rounded_before_the_norm():
    outputs = jnp.asarray([[[1.0, 0.0], [-1.0, 2**-7]]], jnp.bfloat16)
    experts = jnp.asarray([[1.0, 1 - 2**-9]])  # mixed: 2**-9, 2**-7 (1 - 2**-9)
    residual = jnp.zeros((1, 2))
    y = moe_rms_norm_add(outputs, experts, residual, eps=0.0)
    mixed = np.asarray([[2**-9, 2**-7 * (1 - 2**-9)]])
    assert y.dtype == jnp.float32  # that of the residual stream
    np.testing.assert_allclose(y, norm(mixed, eps=0.0), rtol=1e-6)


def test_no_expert_leaves_the_residual():
    residual = jnp.asarray([[3.0, 4.0]])
    y = moe_rms_norm_add(jnp.zeros((1, 0, 2)), jnp.zeros((1, 0)), residual)
    np.testing.assert_array_equal(y, residual)
    y = moe_rms_norm_add(
        jnp.zeros((1, 0, 2)), jnp.zeros((1, 0)), residual, normalize_residual=True
    )
    np.testing.assert_allclose(y, rms_norm(residual), rtol=1e-6)


def test_every_error_says_what_to_do():
    outputs, experts, residual = jnp.ones((2, 3, 8)), jnp.ones((2, 3)), jnp.ones((2, 8))
    with pytest.raises(ValueError, match="residual_weight scales a norm"):
        moe_rms_norm_add(outputs, experts, residual, None, jnp.ones(8))
    with pytest.raises(TypeError, match="dim `e` is 3 in `expert_out` but 2 in"):
        moe_rms_norm_add(outputs, experts[:, :2], residual)
