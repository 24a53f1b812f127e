"""The forward kernel of branched_rms_norm in Triton's interpreter: the norm, a copy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.primitives.norm.branched_rms_norm import branched_rms_norm_p
from jaxkern.triton.norm import branched_rms_norm as kernel
from tests.triton.interpreted import (
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

pytestmark = pytest.mark.skipif(bridge.triton is None, reason="triton is not installed")
SHAPES = [(1, 1), (3, 5, 13), (9, 128), (5, 2500)]


@starts_it
def test_in_a_process_of_its_own():
    check_in_its_own_process(__file__, 2 * len(SHAPES))


@alone
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_the_copy(shape, scaled):
    draw = np.random.default_rng(0).standard_normal
    x, weight = jnp.float32(draw(shape)), jnp.float32(draw(shape[-1]))
    weight = weight if scaled else None
    options = dict(eps=1e-5, offset=1.0)
    with interpreted():
        y, beside, rstd = kernel.branched_rms_norm_fwd(x, weight, **options)
    assert branched_rms_norm_p.fwd is not None
    expected = branched_rms_norm_p.fwd.reference(x, weight, **options)
    np.testing.assert_allclose(y, expected[0], rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(beside, x)
    np.testing.assert_allclose(rstd, expected[2], rtol=2e-6)
