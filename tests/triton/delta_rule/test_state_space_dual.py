"""The kernel of state_space_dual: interpreted, compiled, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch import compiled
from jaxkern.primitives.delta_rule.state_space_dual import state_space_dual_reference
from jaxkern.triton.delta_rule import state_space_dual as kernel
from tests.triton.delta_rule.test_gated_delta_rule import launches, spec
from tests.triton.interpreted import (
    INTERPRETED,
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)


@starts_it
def test_interpreted_kernel():
    check_in_its_own_process(__file__, 1)


@alone
def test_values():
    """Three chunks, heads that share a group, segments, one token, odd sizes."""
    rng = np.random.default_rng(0)
    for t, heads, groups, h, size in ((131, 4, 2, 16, 24), (1, 2, 1, 80, 16)):
        x, b, c = (
            jnp.asarray(rng.standard_normal((2, t, *tail)), jnp.float16)
            for tail in ((heads, h), (groups, size), (groups, size))
        )
        step = jnp.asarray(rng.exponential(0.2, (2, t, heads)), jnp.float32)
        a = -jnp.asarray(rng.exponential(1.0, heads), jnp.float32)
        state = jnp.asarray(rng.standard_normal((2, heads, h, size)), jnp.float32)
        starts = jnp.zeros((2, t), bool).at[:, 70].set(t > 70).at[1, 0].set(True)
        for given in ((state, starts), (None, None)):
            operands = (x, step, a, b, c / size**0.5, *given)
            with interpreted():
                found = kernel.state_space_dual(*operands, chunk_size=64)
            wide = [y if y is None else y.astype(jnp.float32) for y in operands[:6]]
            truth = state_space_dual_reference(*wide, given[1], chunk_size=64)
            for y, expected in zip(found, truth, strict=True):
                error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
                assert error < 1e-3, (y.shape, error)
        np.testing.assert_array_equal(found[1].dtype, jnp.float32)


def operands(t=100, heads=2, groups=1, h=64, size=128, dtype="bfloat16"):
    gate = spec(1, t, heads, dtype="float32")
    read = spec(1, t, groups, size, dtype=dtype)
    return spec(1, t, heads, h, dtype=dtype), gate, spec(heads), read, read


@starts_it
@pytest.mark.skipif(bridge.missing() is not None, reason="triton is not installed")
@pytest.mark.parametrize(
    "capability, sizes",
    [
        (90, dict()),
        pytest.param(80, dict(), marks=pytest.mark.full),
        pytest.param(86, dict(h=40, size=80), marks=pytest.mark.full),
        pytest.param(90, dict(size=256), marks=pytest.mark.full),
        pytest.param(90, dict(t=1), marks=pytest.mark.full),
    ],
)
def test_the_kernel_compiles_and_fits(capability, sizes):
    from jaxkern import state_space_dual

    with compiling_for(capability):
        [launch] = launches(state_space_dual, *operands(**sizes))
        assert compiled(launch, capability).asm["cubin"]
        assert launch.shared_bytes <= bridge.max_shared_bytes()


@pytest.mark.skipif(INTERPRETED, reason="nothing to interpret")
def test_what_is_refused_in_words():
    def refusal(**sizes):
        return kernel.unsupported(*operands(**sizes), None, None, chunk_size=64)

    assert refusal() is None
    assert refusal(dtype="float32") == "`x` is float32"
    assert refusal(t=0) == "an operand is empty"
    assert "300 numbers a column, more than 256" in str(refusal(size=300))
    with compiling_for(86):
        assert "more than the GPU's shared memory" in str(refusal(size=256))
    x, step, a, b, c = operands()
    c = jax.ShapeDtypeStruct(c.shape, jnp.float16)
    said = kernel.unsupported(x, step, a, b, c, None, None, chunk_size=64)
    assert said == "`x`, `b` and `c` have the dtypes bfloat16, bfloat16, float16"
