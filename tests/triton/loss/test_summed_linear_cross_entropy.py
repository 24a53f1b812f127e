"""Groups of tokens in Triton's interpreter, against the reference in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.primitives.loss.linear_cross_entropy import summed_linear_cross_entropy_p
from jaxkern.triton.loss import summed_linear_cross_entropy as kernel
from tests.triton.interpreted import (
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

pytestmark = pytest.mark.skipif(bridge.triton is None, reason="triton is not installed")
PLAIN = dict(label_smoothing=0.0, z_loss=0.0, softcap=None, ignore_index=-100)
EVERY = dict(label_smoothing=0.1, z_loss=0.01, softcap=3.0, ignore_index=2)


@starts_it
def test_in_a_process_of_its_own():
    check_in_its_own_process(__file__, 5)


@alone
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # a capped -inf
@pytest.mark.parametrize("options", [PLAIN, EVERY], ids=["plain", "every_option"])
@pytest.mark.parametrize("group", [3, 14], ids=["groups", "one_group"])
def test_values_and_gradients(group, options, monkeypatch):
    monkeypatch.setattr(kernel, "size_of_groups", lambda _: group)
    draw = np.random.default_rng(0).standard_normal
    labels = np.random.default_rng(1).integers(0, 11, (2, 7))
    labels[0, 1], labels[1, 2] = 2, (-100 if options is PLAIN else 10)
    operands = draw((2, 7, 6)), draw((11, 6)), labels, draw((2, 7))
    with interpreted():
        found = kernel.summed_linear_cross_entropy_fwd(
            *(jnp.asarray(a, a.dtype.name.replace("64", "32")) for a in operands),
            **options,
        )
    assert summed_linear_cross_entropy_p.fwd is not None
    with jax.enable_x64(True):
        expected = summed_linear_cross_entropy_p.fwd.reference(
            *map(jnp.asarray, operands), **options
        )
    for y, e in zip(found, expected, strict=True):
        assert y.shape == e.shape and y.dtype == jnp.float32
        np.testing.assert_allclose(y, e, rtol=1e-5, atol=1e-5)


@alone
def test_at_most_eight_groups_of_an_eighth():
    sizes = {n: kernel.size_of_groups(n) for n in range(1, 40000, 7)}
    assert all(-(-n // size) <= 8 for n, size in sizes.items())
    assert all(8 * (size - 256) < n for n, size in sizes.items() if n > 4096)
    assert kernel.size_of_groups(8192) == 1024
