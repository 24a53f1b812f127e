"""Gradients of Kimi delta attention, from sm_80 on. No atomics: always the same bits.

kimi_chunk_kernel       again, as in the forward pass
kimi_both_ways_kernel   the states and y once more, and beside them D and dr backwards
kimi_pairs_kernel       dv, dbeta, and what pairs of tokens of a chunk have to do
kimi_tokens_kernel      dq, dk and dg
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compute_capability, next_power_of_2
from jaxkern.gpu.triton_call import like, sparse_call
from jaxkern.triton.delta_rule.constants import Constants
from jaxkern.triton.delta_rule.gated_delta_rule.bwd import results_of_walks
from jaxkern.triton.delta_rule.gated_delta_rule.chunk_matrices import CHUNK
from jaxkern.triton.delta_rule.kimi_delta_attention import fwd
from jaxkern.triton.delta_rule.kimi_delta_attention.chunk_parts import chunk_parts
from jaxkern.triton.delta_rule.kimi_delta_attention.gradients import (
    kimi_pairs_kernel,
    kimi_tokens_kernel,
)
from jaxkern.triton.delta_rule.kimi_delta_attention.walk import kimi_both_ways_kernel

slower = "its gradients have passed on an H200, but are not timed there"


def unsupported(dout: Any, dfinal_state: Any, **named: Any) -> str | None:
    """A reason in words, or None."""
    if reason := fwd.unsupported(**named):
        return reason
    if dout.dtype != named["value"].dtype:
        return f"`dout` is {dout.dtype.name}, not {named['value'].dtype.name}"
    return bridge.unsupported(dfinal_state=dfinal_state)


def kimi_delta_attention_bwd(
    query, key, value, g, beta, initial_state, dout, dfinal_state, *, scale, chunk_size
) -> tuple[jax.Array | None, ...]:
    del chunk_size  # the same function up to rounding
    b, t, k, h = key.shape
    n, hv = value.shape[2:]
    chunks = -(-t // CHUNK)
    parts = chunk_parts(query, key, g, beta, scale=scale, backward=True)
    total = parts.pop("total_ptr")
    found: Any = sparse_call(
        kimi_both_ways_kernel,
        (2 * fwd.programs(b * n, hv),),
        {
            "value_ptr": value,
            **parts,
            "initial_ptr": initial_state,
            "dout_ptr": dout,
            "dfinal_ptr": dfinal_state,
        },
        results_of_walks(key, value, initial_state),
        fwd.walk_constants(key, value, scale),
    )
    states, written, dstates, dr, dinitial = found
    shape = dict(T=t, NUM_HEADS=n, GROUP=n // k, H=h, HV=hv, SCALE=scale)
    columns = max(16, min(64, next_power_of_2(hv)))
    tiles = jax.ShapeDtypeStruct((b, n, chunks, 3, CHUNK, CHUNK), key.dtype)
    d, dvalue, tiles, dbeta = bridge.triton_call(
        kimi_pairs_kernel,
        beta,
        dout,
        written,
        dr,
        out=[like(value), like(value), tiles, like(beta)],
        grid=(b * n, chunks),
        num_warps=4,
        num_stages=2,
        C=Constants(**shape, BLOCK_H=h, BLOCK_V=columns),
    )
    # of each value head: those that share a key head are added up
    wide = key.dtype if n == k else jnp.float32
    each = jax.ShapeDtypeStruct((b, t, n, h), wide)
    block, stages = 16, 2  # the most channels that do not spill
    if compute_capability() >= 90:
        block, stages = max(16, next_power_of_2(h) // 2), 1
    dquery, dkey, dg = bridge.triton_call(
        kimi_tokens_kernel,
        query,
        key,
        g,
        dout,
        total,
        states,
        d,
        dstates,
        dvalue,
        tiles,
        out=[each, each, like(g)],
        grid=(b * n, chunks, -(-h // block)),
        num_warps=8,
        num_stages=stages,
        C=Constants(**shape, BLOCK_H=block, BLOCK_V=columns),
    )
    dquery, dkey = (
        x.reshape(b, t, k, n // k, h).sum(3).astype(y.dtype)
        for x, y in ((dquery, query), (dkey, key))
    )
    return dquery, dkey, dvalue, dg, dbeta, dinitial
