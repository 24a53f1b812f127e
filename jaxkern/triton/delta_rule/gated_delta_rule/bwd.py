"""Gradients of the gated delta rule, from sm_80 on. No atomics: always the same bits.

chunk_matrices     again, as in the forward pass
both_ways_kernel   the states and d once more, and beside them D and dr backwards
pairs_kernel       dv, and what pairs of tokens of a chunk have to do with the rest
tokens_kernel      dq and dk, and the other parts of dg and dbeta
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import like, sparse_call
from jaxkern.triton.delta_rule.gated_delta_rule import fwd
from jaxkern.triton.delta_rule.gated_delta_rule.chunk_matrices import (
    CHUNK,
    LEAST,
    chunk_matrices,
)
from jaxkern.triton.delta_rule.gated_delta_rule.gradients import (
    pairs_kernel,
    tokens_kernel,
)


def unsupported(dout: Any, **named: Any) -> str | None:
    """A reason in words, or None."""
    if reason := fwd.unsupported(**named):
        return reason
    if dout.dtype != named["value"].dtype:
        return f"`dout` is {dout.dtype.name}, not {named['value'].dtype.name}"
    return None


def gated_delta_rule_bwd(
    query, key, value, g, beta, initial_state, dout, dfinal_state, *, scale, chunk_size
) -> tuple[jax.Array | None, ...]:
    del chunk_size  # the same function up to rounding
    b, t, k, h = key.shape
    n, hv = value.shape[2:]
    chunks = -(-t // CHUNK)
    matrices, vectors, ends = chunk_matrices(
        query, key, g, beta, scale=scale, backward=True
    )
    shape = dict(T=t, GROUP=n // k, H=h, HV=hv, SCALE=scale)
    programs = 2 * -(-hv // fwd.COLUMNS) * b * n
    named = shape | {"NUM_HEADS": n}
    kernel, constants = fwd.walk_of(named, programs, backward=True)
    states = jax.ShapeDtypeStruct((b, n, chunks, hv, h), key.dtype)
    found: Any = sparse_call(
        kernel,
        (programs,),
        {
            "query_ptr": query,
            "key_ptr": key,
            "value_ptr": value,
            "matrices_ptr": matrices,
            "vectors_ptr": vectors,
            "ends_ptr": ends,
            "initial_ptr": initial_state,
            "dout_ptr": dout,
            "dfinal_ptr": dfinal_state,
        },
        {
            "states_ptr": states,
            "written_ptr": like(value),
            "dstates_ptr": states,
            "dr_ptr": like(value),
            "dinitial_ptr": like(initial_state),
        },
        constants,
    )
    states, written, dstates, dr, dinitial = found
    sizes = gradient_sizes(h, hv)
    of_pairs: dict[str, Any] = sizes | {"BLOCK_H": max(16, next_power_of_2(h))}
    sums = jax.ShapeDtypeStruct(g.shape, jnp.float32)
    dvalue, tiles, dg, dbeta = bridge.triton_call(
        pairs_kernel,
        query,
        key,
        value,
        g,
        beta,
        dout,
        written,
        dr,
        out=[like(value), like(matrices), sums, sums],
        grid=(b * n, chunks),
        NUM_HEADS=n,
        **shape,
        **of_pairs,
    )
    parts = -(-h // sizes["BLOCK_H"])
    dquery, dkey, dg_parts, dbeta_parts = bridge.triton_call(
        tokens_kernel,
        query,
        key,
        g,
        beta,
        dout,
        states,
        written,
        dstates,
        dr,
        tiles,
        out=[
            like(query),
            like(key),
            jax.ShapeDtypeStruct((2 * parts, *g.shape), jnp.float32),
            jax.ShapeDtypeStruct((parts, *g.shape), jnp.float32),
        ],
        grid=(2 * parts * b * k, chunks),
        NUM_KEY_HEADS=k,
        **shape,
        **sizes,
    )
    # a factor 0 stays 0, whatever is rounded in sums over the tokens around it
    dg = jnp.where(g < LEAST, 0.0, dg + dg_parts.sum(0)).astype(g.dtype)
    dbeta = (dbeta + dbeta_parts.sum(0)).astype(beta.dtype)
    return dquery, dkey, dvalue, dg, dbeta, dinitial


def gradient_sizes(h: int, hv: int) -> dict[str, Any]:
    """Of the programs that have one chunk."""
    most = 64 if bridge.max_shared_bytes() < fwd.MUCH_SHARED else 128
    return {
        "BLOCK_H": min(most, max(16, next_power_of_2(h))),
        "BLOCK_V": min(most, max(16, next_power_of_2(hv))),
        "num_warps": 4,
        "num_stages": 1,
    }
