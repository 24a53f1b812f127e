"""The kernels of state_space_dual: interpreted, compiled, and what it refuses."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch import compiled
from jaxkern.primitives.delta_rule.state_space_dual import (
    DualOperands,
    state_space_dual_bwd_reference,
    state_space_dual_reference,
)
from jaxkern.triton.delta_rule.state_space_dual import bwd, fwd
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
    check_in_its_own_process(__file__, 2)


@alone
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_values_and_gradients(multiprocessors, monkeypatch):
    """Three chunks, heads that share a group, segments, one token, odd sizes.

    The heads of a group are added up in a program, or by XLA on a large GPU.
    """
    monkeypatch.setattr(bwd, "num_sms", lambda: multiprocessors)
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
            slopes = [jnp.asarray(rng.standard_normal(x.shape), x.dtype), state[::-1]]
            with interpreted():
                found: list[Any] = [*fwd.state_space_dual(*operands, chunk_size=64)]
                found += bwd.state_space_dual_bwd(*operands, *slopes, chunk_size=64)
            reference, reference_bwd = (
                jax.jit(functools.partial(g, chunk_size=64))
                for g in (state_space_dual_reference, state_space_dual_bwd_reference)
            )
            wide = [y if y is None else y.astype(jnp.float32) for y in operands[:6]]
            wide = DualOperands(*wide, given[1])
            slopes = [y.astype(jnp.float32) for y in slopes]
            truth: list[Any] = [*reference(wide)]
            truth += reference_bwd(wide, *slopes)
            if given[0] is None:
                assert found.pop() is None and truth.pop() is None
            for y, expected in zip(found, truth, strict=True):
                error, norm = np.linalg.norm(y - expected), np.linalg.norm(expected)
                assert error <= 1e-3 * norm, (y.shape, error, norm)
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
        pytest.param(80, dict(h=128), marks=pytest.mark.full),
        pytest.param(90, dict(h=128, heads=3), marks=pytest.mark.full),
    ],
)
def test_kernels_compile_and_fit(capability, sizes):
    from jaxkern import state_space_dual

    def both(*operands):
        y, pull = jax.vjp(lambda *a: state_space_dual(*a), *operands)
        return y, pull(y)

    small = sizes.get("size", 128) <= 128
    with compiling_for(capability):
        f = both if small else state_space_dual
        found = launches(f, *operands(**sizes))
        assert len(found) == (4 if small else 1)
        for launch in found:
            assert compiled(launch, capability).asm["cubin"]
            assert launch.shared_bytes <= bridge.max_shared_bytes()


@pytest.mark.skipif(INTERPRETED, reason="nothing to interpret")
def test_what_is_refused_in_words():
    def refusal(**sizes):
        return fwd.unsupported(*operands(**sizes), None, None, chunk_size=64)

    assert refusal() is None
    assert refusal(dtype="float32") == "`x` is float32"
    assert refusal(t=0) == "an operand is empty"
    assert "300 numbers a column, more than 256" in str(refusal(size=300))
    with compiling_for(86):
        assert "more than the GPU's shared memory" in str(refusal(size=256))
    x, step, a, b, c = operands()
    c = jax.ShapeDtypeStruct(c.shape, jnp.float16)
    said = fwd.unsupported(x, step, a, b, c, None, None, chunk_size=64)
    assert said == "`x`, `b` and `c` have the dtypes bfloat16, bfloat16, float16"


@pytest.mark.skipif(INTERPRETED, reason="nothing to interpret")
def test_what_the_gradients_refuse_in_words():
    def refusal(slope="bfloat16", **sizes):
        names = ("x", "step", "a", "b", "c")
        named: dict[str, Any] = dict(zip(names, operands(**sizes), strict=True))
        dy = jax.ShapeDtypeStruct(named["x"].shape, slope)
        named |= dict(initial_state=None, starts=None, chunk_size=64)
        return bwd.unsupported(dy=dy, dfinal_state=None, **named)

    assert refusal() is None
    assert refusal("float32") == "`dy` is float32, not bfloat16"
    assert refusal(dtype="float32") == "`x` is float32"
    assert refusal(t=4_194_241) == "4194241 tokens are more than 4194240"
    assert refusal(h=136) == "heads have 136 columns, more than 128"
    assert "136 numbers a column, more than 128" in str(refusal(size=136))
