"""Kernels of attention in Triton's interpreter, against the reference."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import attention, backend, paged_attention
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.attention import gradient_rows
from jaxkern.primitives.attention.operands import AttentionOperands
from jaxkern.triton.attention.attention import bwd
from jaxkern.triton.attention.attention import fwd as flash_attention
from jaxkern.triton.attention.decode import paged_attention as paged
from tests.primitives.attention.one_key import check_first_key, check_sink
from tests.triton import interpreted as interpreter
from tests.triton.interpreted import (
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
RNG = np.random.default_rng(0)


@pytest.mark.full
@starts_it
def test_in_a_process_of_its_own():
    check_in_its_own_process(__file__, 18)


def draw(*shape):
    """Numbers of 16 bits in float32, whose products the interpreter rounds rightly."""
    return jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16).astype(jnp.float32)


def qkv(b, t, s, k, g, h, hv) -> Any:
    return draw(b, t, k * g, h), draw(b, s, k, h), draw(b, s, k, hv)


OPTIONS: Any = dict(scale=0.1, causal=True, window=None, softcap=None)


def check(found, expected):
    for x, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, e, rtol=1e-5, atol=2e-5)


@alone
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of infinities
@pytest.mark.parametrize("h, hv", [(512, 512), (320, 320), (64, 384), (272, 48)])
@pytest.mark.parametrize("plain", [True, False])
def test_wide_heads(h, hv, plain):
    q, k, v = qkv(1, 40, 56, 1, 2, h, hv)
    given = dict(bias=None, mask=None, kv_lengths=None, q_offset=None, sinks=None)
    if not plain:
        given |= dict(
            bias=draw(1, 2, 40, 56),
            mask=jnp.asarray(RNG.random((1, 1, 40, 56)) < 0.7),
            kv_lengths=jnp.array([50]),
            q_offset=jnp.array([9]),
            sinks=draw(2),
        )
    operands = AttentionOperands(q, k, v, **given)
    options = OPTIONS | (dict() if plain else dict(window=30, softcap=2.0))
    with interpreted(), jax.default_matmul_precision("highest"):
        found = flash_attention.attention(*operands, **options)
    with backend("xla"):
        check(found, attention(q, k, v, return_lse=True, **given, **options))


@alone
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("precision, limit", [("highest", 1e-6), ("default", 2**-10)])
@pytest.mark.parametrize("h, hv", [(24, 16), (64, 64)])
def test_gradients_of_float32(monkeypatch, h, hv, precision, limit):
    """Products sum over what lies turned, padded and behind the lengths NaN."""
    monkeypatch.setattr(gradient_rows, "triton_call", interpreter.call)
    q, k, v = qkv(2, 40, 56, 2, 2, h, hv)
    dout, lengths, offsets = draw(2, 40, 4, hv), jnp.array([50, 9]), jnp.array([12, 0])
    behind = jnp.arange(56)[:, None, None] >= lengths[:, None, None, None]
    given = jnp.where(behind, jnp.nan, k), jnp.where(behind, jnp.nan, v)
    operands = q, *given, None, None, None, None, lengths, offsets, None
    with interpreted(), jax.default_matmul_precision(precision):
        out, lse = flash_attention.attention(*operands, **OPTIONS)
        saved, wanted = (
            (out, lse, None, dout, 0 * lse),
            (True, True, True, False, False),
        )
        slopes = bwd.attention_bwd(*operands, *saved, wanted=wanted, **OPTIONS)
    options = OPTIONS | dict(kv_lengths=lengths, q_offset=offsets)
    with backend("xla"):
        expected, pull = jax.vjp(lambda *x: attention(*x, **options), q, k, v)
    for x, e in zip((out, *slopes[:3]), (expected, *pull(dout)), strict=True):
        assert jnp.linalg.norm(x - e) < limit * jnp.linalg.norm(e)


@alone
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("check", [check_sink, check_first_key])
def test_one_key_with_nearly_all_weight(monkeypatch, check):
    """In float16, as the interpreter cuts off what a GPU rounds in bfloat16."""
    monkeypatch.setattr(gradient_rows, "triton_call", interpreter.call)

    def attend(q, k, v, bias, dout):
        options = OPTIONS | dict(scale=0.125, causal=bias is None)
        operand = q, k, v, bias, *[None] * 6
        with interpreted(), jax.default_matmul_precision("highest"):
            saved = flash_attention.attention_fwd(*operand, **options)
            rest = *saved, dout, jnp.zeros_like(saved[1])
            wanted = True, True, True, False, False
            found = bwd.attention_bwd(*operand, *rest, wanted=wanted, **options)
        return found[:3]

    check(attend, 64, "float16")


@alone
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "t, g, h", [(8, 16, 16), (2, 71, 16), (3, 7, 512), (8, 128, 16)]
)
def test_rows_of_several_programs(t, g, h):
    q, k, v = qkv(2, t, 64, 2, g, h, h)
    lengths, sinks = jnp.array([40, 64]), draw(2 * g)
    pages = [x.reshape(8, 16, 2, h) for x in (k, v)]
    tables = jnp.arange(8).reshape(2, 4)
    given = tables, lengths, lengths - t, sinks
    with interpreted():
        found = paged.paged_attention_fwd(q, *pages, *given, **OPTIONS)
    with backend("xla"):
        expected = paged_attention(
            q, *pages, tables, lengths, sinks=sinks, scale=0.1, return_lse=True
        )
    check(found, expected)
