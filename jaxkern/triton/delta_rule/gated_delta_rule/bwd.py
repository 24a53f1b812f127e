"""Gradients of the gated delta rule, from sm_80 on. No atomics: always the same bits.

chunk_matrices     again, as in the forward pass
both_ways_kernel   the states and d once more, and beside them D and dr backwards
pairs_kernel       dv, and what pairs of tokens of a chunk have to do with the rest
tokens_kernel      dq and dk, and the other parts of dg and dbeta

On compute capability 9.0 hopper_gradients.py has the last two in one, for heads of up
to 128 dims.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import next_power_of_2, num_sms
from jaxkern.gpu.triton_call import like, sparse_call
from jaxkern.triton.delta_rule.constants import Constants
from jaxkern.triton.delta_rule.gated_delta_rule import fwd, hopper_gradients
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


def results_of_walks(key, value, initial_state) -> dict[str, Any]:
    """What walks both ways leave: states before chunks and d, D after them and dr."""
    b, t, _, h = key.shape
    n, hv = value.shape[2:]
    states = jax.ShapeDtypeStruct((b, n, -(-t // CHUNK), hv, h), key.dtype)
    return {
        "states_ptr": states,
        "written_ptr": like(value),
        "dstates_ptr": states,
        "dr_ptr": like(value),
        "dinitial_ptr": like(initial_state),
    }


def gated_delta_rule_bwd(
    query, key, value, g, beta, initial_state, dout, dfinal_state, *, scale, chunk_size
) -> tuple[jax.Array | None, ...]:
    del chunk_size  # the same function up to rounding
    b, t, k, h = key.shape
    n, hv = value.shape[2:]
    shape = dict(T=t, NUM_HEADS=n, GROUP=n // k, H=h, HV=hv, SCALE=scale)
    programs = 2 * -(-hv // fwd.COLUMNS) * b * n
    kernel, programs, constants = fwd.walk_of(shape, programs, backward=True)
    by_hopper = kernel is fwd.hopper_walk.hopper_both_ways_kernel
    matrices, vectors, ends = chunk_matrices(
        query,
        key,
        g,
        beta,
        scale=scale,
        backward=True,
        by_warps=fwd.hopper(),
        packed=by_hopper and constants["P"].packed,
    )
    results = results_of_walks(key, value, initial_state)
    if by_hopper:
        results["dvalue_ptr"] = like(value) if in_one(h, hv) else None
    states, written, dstates, dr, dinitial, *dvalue = sparse_call(
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
        results,
        constants,
    )
    given = query, key, value, g, beta, vectors, dout
    walked = states, written, dstates, dr
    if in_one(h, hv):
        [dvalue] = dvalue
        gradients = gradients_in_one(*given, walked, dvalue, shape)
        dquery, dkey, dg, dbeta = gradients
    else:
        gradients = gradients_in_two(*given, walked, shape)
        dquery, dkey, dvalue, dg, dbeta = gradients
    # a factor 0 stays 0, whatever is rounded in sums over the tokens around it
    dg = jnp.where(g < LEAST, 0.0, dg).astype(g.dtype)
    return dquery, dkey, dvalue, dg, dbeta.astype(beta.dtype), dinitial


def in_one(h: int, hv: int) -> bool:
    """Whether one kernel makes all gradients: where it fits and was written for."""
    most = hopper_gradients.LARGEST
    return fwd.hopper() and h <= most and hv <= most


def gradients_in_one(query, key, value, g, beta, vectors, dout, walked, dvalue, shape):
    """dq, dk, and dg and dbeta in float32."""
    del beta
    states, written, dstates, dr = walked
    b, t, k, _ = key.shape
    sums = jax.ShapeDtypeStruct(g.shape, jnp.float32)
    return bridge.triton_call(
        hopper_gradients.hopper_gradients_kernel,
        query,
        key,
        value,
        vectors,
        dout,
        states,
        written,
        dstates,
        dr,
        dvalue,
        out=[like(query), like(key), sums, sums],
        grid=(min(num_sms(), b * k * -(-t // CHUNK)),),
        num_warps=8,
        num_stages=1,
        P=fwd.hopper_shape(shape, stages=2),
        BATCH=b,
        BESIDE=hopper_gradients.BESIDE,
        REGISTERS=hopper_gradients.REGISTERS,
    )


def gradients_in_two(query, key, value, g, beta, vectors, dout, walked, shape):
    """dq, dk, dv, and dg and dbeta in float32: pairs first, then sums over them."""
    del vectors
    states, written, dstates, dr = walked
    b, t, k, h = key.shape
    n, hv = value.shape[2:]
    chunks = -(-t // CHUNK)
    most = 64 if bridge.max_shared_bytes() < fwd.MUCH_SHARED else 128
    room = max(16, next_power_of_2(h))
    block, columns = (min(most, max(16, next_power_of_2(d))) for d in (h, hv))
    sums = jax.ShapeDtypeStruct(g.shape, jnp.float32)
    tiles = jax.ShapeDtypeStruct((b, n, chunks, 2, CHUNK, CHUNK), key.dtype)
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
        out=[like(value), tiles, sums, sums],
        grid=(b * n, chunks),
        num_warps=4,
        num_stages=1,
        C=Constants(**shape, BLOCK_H=room, BLOCK_V=columns),
    )
    parts = -(-h // block)
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
        num_warps=4,
        num_stages=1,
        C=Constants(**shape, BLOCK_H=block, BLOCK_V=columns),
    )
    return dquery, dkey, dvalue, dg + dg_parts.sum(0), dbeta + dbeta_parts.sum(0)
