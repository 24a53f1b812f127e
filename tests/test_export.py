"""Operators serialise with jax.export: several platforms, symbolic sizes, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern as jk

pytest.importorskip("flatbuffers")  # jax.export needs it to serialise
pytestmark = pytest.mark.smoke


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    "f, specs",
    [
        (jk.rms_norm, lambda b: [f32(b, 16), f32(16)]),
        (
            lambda q, k: jk.attention(q, k, k, causal=True),
            lambda b: [f32(b, 8, 4, 16), f32(b, 8, 2, 16)],
        ),
        (lambda x: jk.swiglu(x, x), lambda b: [f32(b, 16)]),
        (lambda x: jk.top_k(x, 3)[0], lambda b: [f32(b, 16)]),
        pytest.param(
            lambda x, w: jk.linear_cross_entropy(
                x, w, jnp.zeros_like(x[:, 0], jnp.int32), reduction="none"
            ),
            lambda b: [f32(b, 16), f32(9, 16)],
            marks=pytest.mark.full,
        ),
    ],
    ids=["rms_norm", "attention", "swiglu", "top_k", "linear_cross_entropy"],
)
def test_export_with_a_symbolic_batch(f, specs):
    (b,) = jax.export.symbolic_shape("b")
    exported = jax.export.export(jax.jit(f), platforms=("cpu", "cuda", "METAL"))(
        *specs(b)
    )
    loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s.shape), jnp.float32) for s in specs(3)]
    np.testing.assert_allclose(loaded.call(*args), f(*args), rtol=1e-5, atol=1e-6)
    expected, pull = jax.vjp(f, *args)
    actual = loaded.vjp().call(*args, expected)
    for a, e in zip(actual, pull(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)
