"""branched_rms_norm: rms_norm and its operand, whose gradients are one sum."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern import branched_rms_norm, rms_norm
from jaxkern.testing.checks import bf16, case, f32

CASES = [
    case("plain", x=f32(8, 4, 16), weight=f32(16)),
    case("no_weight", x=f32(3, 7), offset=1.0, full=True),
    case("narrow", x=bf16(4, 32), weight=f32(32), eps=1e-5, full=True),
    case("empty", x=f32(0, 16), weight=f32(16)),
]


def test_gradients_of_both_paths_are_rounded_once():
    """Sums of two rounded gradients pass every check of values within a tolerance."""
    rng = np.random.default_rng(0)
    x, dy, dx = (
        jnp.asarray(rng.standard_normal((64, 96)), jnp.bfloat16) for _ in "xyz"
    )
    w = jnp.asarray(rng.standard_normal(96), jnp.float32)

    @jax.jit
    def both(x, w, dy, dx):
        (y, beside), pull = jax.vjp(branched_rms_norm, x, w)
        return y, beside, *pull((dy.astype(y.dtype), dx.astype(x.dtype)))

    y, beside, found, dweight = both(x, w, dy, dx)
    _, _, exact, dweight32 = both(x.astype("float32"), w, dy, dx)
    np.testing.assert_array_equal(y, jax.jit(rms_norm)(x, w))
    np.testing.assert_array_equal(beside, x)
    np.testing.assert_array_equal(found, exact.astype("bfloat16"))
    np.testing.assert_allclose(dweight, dweight32, rtol=1e-5, atol=1e-5)
