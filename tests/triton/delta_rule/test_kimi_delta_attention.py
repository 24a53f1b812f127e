"""Kernels of Kimi delta attention: interpreted, compiled, and what they refuse."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, kimi_delta_attention, segment_ids_from_cu_seqlens
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch import compiled
from jaxkern.triton.delta_rule.kimi_delta_attention import bwd, fwd
from tests.primitives.delta_rule.test_kimi_delta_attention import draw, recurrence
from tests.triton.delta_rule.test_gated_delta_rule import launches, spec
from tests.triton.interpreted import (
    INTERPRETED,
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

LARGEST_ERROR = 1e-3  # ||y - truth|| / ||truth||, where a rounding of float16 is 3e-4
NAMES = ("out", "state", "dquery", "dkey", "dvalue", "dg", "dbeta", "dinitial")


@starts_it
def test_interpreted_kernels():
    check_in_its_own_process(__file__, 5)


def in_float16(operands):
    """Decays and strengths in float32, and what the recurrence takes for the same."""
    dtypes = [np.float16] * 3 + [np.float32] * 3
    given = [np.asarray(x, d) for x, d in zip(operands, dtypes, strict=True)]
    return [jnp.asarray(x) for x in given], [np.float64(x) for x in given]


def check(operands, largest=LARGEST_ERROR):
    """Values and gradients by the interpreter against the recurrence in float64."""
    rng = np.random.default_rng(1)
    given, wide = in_float16(operands)
    slopes = [rng.standard_normal(x.shape) for x in (operands[2], operands[5])]
    slopes[0] = np.float64(np.float16(slopes[0]))
    dtypes = jnp.float16, jnp.float32
    narrow = [jnp.asarray(x, d) for x, d in zip(slopes, dtypes, strict=True)]
    options = dict(scale=0.25, chunk_size=64)

    @jax.jit
    def by_kernels(given, slopes):
        found = fwd.kimi_delta_attention(*given, **options)
        return *found, *bwd.kimi_delta_attention_bwd(*given, *slopes, **options)

    @jax.jit
    def by_recurrence(given, slopes):
        found, pull = jax.vjp(functools.partial(recurrence, scale=0.25), *given)
        return *found, *pull(tuple(slopes))

    with interpreted():
        found = by_kernels(given, narrow)
    with jax.enable_x64(True):
        truth = by_recurrence(wide, slopes)
    for name, y, expected in zip(NAMES, found, truth, strict=True):
        y, expected = np.float64(y), np.float64(expected)
        size = max(np.linalg.norm(expected), 1e-3 * expected.size**0.5)
        error = np.linalg.norm(y - expected) / size
        assert error < largest, (name, error)
    return dict(zip(NAMES, found, strict=True))


@alone
@pytest.mark.parametrize(
    "t, k, g, h, hv", [(67, 1, 2, 16, 16), (130, 2, 1, 80, 48), (1, 1, 1, 64, 128)]
)
def test_the_recurrence_in_float64(t, k, g, h, hv):
    """Channels that decay by 1e-3 and by a hundred a token, factors 0, odd lengths."""
    query, key, value, decay, beta, state = draw(2, t, k, g, h, hv)
    decay[:, 40:41], decay[:, 20:21, :, ::2] = -np.inf, -1e30
    beta[:, 30:31] = 0
    found = check((query, key, value, decay, beta, state))
    np.testing.assert_array_equal(found["dg"][:, 40:41], 0.0)


@alone
def test_one_key_for_all_tokens():
    """What a chunk writes is a sum that telescopes: the roundings of its 64 terms, of d
    and of store, add up to 8 of each."""
    query, key, value, decay, beta, state = draw(1, 64, 1, 1, 16, 16)
    key[:] = key[:, :1]
    decay = -1e-3 * np.abs(np.cos(np.arange(16))) + 0 * decay
    check((query, key, value, decay, 0 * beta + 1, state), 4 * LARGEST_ERROR)


@alone
def test_packed_sequences_do_not_see_each_other():
    """Whatever stands before a sequence, it has the bits it has there."""
    query, key, value, decay, beta, state = draw(1, 100, 1, 1, 16, 16)
    ids = segment_ids_from_cu_seqlens(jnp.array([0, 30, 71, 100]), 100)
    begins = np.asarray(ids[:, 1:] != ids[:, :-1])
    decay[:, 1:][begins] = -np.inf
    first = check((query, key, value, decay, beta, state))
    for x in (query, value):
        x[:, :30] *= -2
    key[:, :30] = key[:, 30:60]
    again = check((query, key, value, decay, beta, 3 * state))
    for name in ("out", "dquery", "dkey", "dvalue", "dbeta"):
        np.testing.assert_array_equal(first[name][:, 30:], again[name][:, 30:])
    np.testing.assert_array_equal(first["state"], again["state"])


def operands(t=100, k=1, n=1, h=64, hv=64, dtype="bfloat16"):
    key, value = spec(1, t, k, h, dtype=dtype), spec(1, t, n, hv, dtype=dtype)
    g, beta = spec(1, t, n, h, dtype="float32"), spec(1, t, n, dtype="float32")
    return key, key, value, g, beta


@starts_it
@pytest.mark.skipif(bridge.missing() is not None, reason="triton is not installed")
@pytest.mark.parametrize(
    "capability, n, h, hv",
    [
        (90, 1, 128, 128),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((80, 1, 128, 128), (90, 2, 64, 64), (80, 2, 64, 64))
        ),
        pytest.param(90, 1, 48, 80, marks=pytest.mark.full),
        pytest.param(86, 1, 128, 128, marks=pytest.mark.full),
    ],
)
def test_kernels_compile_fit_and_do_not_spill(capability, n, h, hv):
    def both(*operands):
        y, pull = jax.vjp(lambda *a: kimi_delta_attention(*a), *operands)
        return y, pull(y)

    with compiling_for(capability), backend("triton"):
        found: list[Any] = launches(both, *operands(100, 1, n, h, hv))
        assert len({launch.name for launch in found}) == 5
        for launch in found:
            assert compiled(launch, capability).asm["cubin"]
            assert launch.shared_bytes <= bridge.max_shared_bytes()
            assert not launch.stack_bytes, launch.describe()


@pytest.mark.skipif(INTERPRETED, reason="nothing to interpret")
def test_what_is_refused_in_words():
    def refusal(*, chunk_size=64, **given):
        names = ("query", "key", "value", "g", "beta")
        named: dict[str, Any] = dict(zip(names, operands(**given), strict=True))
        options = dict(initial_state=None, scale=1.0, chunk_size=chunk_size)
        return fwd.unsupported(**named, **options)

    assert refusal() is None
    assert refusal(dtype="float32") == "`key` is float32"
    assert refusal(h=256) == "heads of `key` have 256 dims, more than 128"
    assert refusal(hv=144) == "heads of `value` have 144 dims, more than 128"
    assert "have 40 dims, no multiple of 16" in str(refusal(h=40))
    assert refusal(t=0) == "an operand is empty"
    assert "chunk_size 1 asks for the recurrence" in str(refusal(chunk_size=1))


@pytest.mark.skipif(INTERPRETED, reason="nothing to interpret")
def test_what_the_gradients_refuse_in_words():
    def refusal(slope="bfloat16", **given):
        names = ("query", "key", "value", "g", "beta")
        named: dict[str, Any] = dict(zip(names, operands(**given), strict=True))
        dout = jax.ShapeDtypeStruct(named["value"].shape, slope)
        named |= dict(initial_state=None, scale=1.0, chunk_size=64)
        return bwd.unsupported(dout=dout, dfinal_state=None, **named)

    assert refusal() is None
    assert refusal("float32") == "`dout` is float32, not bfloat16"
    assert refusal(dtype="float32") == "`key` is float32"
