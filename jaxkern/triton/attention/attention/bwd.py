"""Gradients of attention of many queries, without a matrix of scores: three launches.

lse and delta, laid out by head (gradient_rows.py), dk and dv (keys_kernel.py), dq
(queries_kernel.py). Beside the gradients only lse and delta are written, O(t).
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.attention.bias_gradient import with_bias_gradient
from jaxkern.gpu.attention.gradient_rows import gradient_rows
from jaxkern.gpu.attention.operands import GradientOperands
from jaxkern.gpu.attention.visible import segment_bounds, slower
from jaxkern.gpu.triton_call import like, sparse_call
from jaxkern.triton.attention.attention import fwd
from jaxkern.triton.attention.attention.fwd import section
from jaxkern.triton.attention.attention.keys_kernel import (
    flash_attention_bwd_keys_kernel,
)
from jaxkern.triton.attention.attention.problem import (
    LOG2_E,
    PADDING,
    factor,
    operands_and_constants,
    turned,
)
from jaxkern.triton.attention.attention.queries_kernel import (
    flash_attention_bwd_queries_kernel,
)
from jaxkern.triton.attention.attention.tile_sizes import (
    KEYS,
    QUERIES,
    VALUES,
    separate,
    sizes_of,
)

__all__ = ["attention_bwd", "slower", "unsupported"]
MAX_GRADIENT_DIM = 256


def unsupported(query: Any, value: Any, **rest: Any) -> str | None:
    """A reason in words, or None."""
    if reason := fwd.unsupported(query=query, value=value, **rest):
        return reason
    h, hv = query.shape[3], value.shape[3]
    if max(h, hv) > MAX_GRADIENT_DIM:
        return f"gradients at head dims of {h} and {hv}, above {MAX_GRADIENT_DIM}"
    return None


def key_gradients(given, constants, query, dout, key, value):
    """(dk, dv), of those of key and value that are not None."""
    if key is None and value is None:
        return None, None
    c = constants
    if key is not None and value is not None and separate(c, query.dtype):
        [dk, _] = key_gradients(given, c, query, dout, key, None)
        [_, dv] = key_gradients(given, c, query, dout, None, value)
        return dk, dv
    sizes = sizes_of(VALUES if key is None else KEYS, given)
    bounds = None
    if given["q_ids_ptr"] is not None:
        bounds = segment_bounds(
            given["kv_ids_ptr"], given["q_ids_ptr"], sizes["BLOCK_K"], sizes["BLOCK_Q"]
        )
    together = section(c.T * c.GROUP, c.H + c.HV, query.dtype)
    return sparse_call(
        flash_attention_bwd_keys_kernel,
        (-(-c.S // sizes["BLOCK_K"]) * c.B * c.HEADS,),
        given
        | {
            "bounds_ptr": bounds,
            "turned_q_ptr": None if key is None else turned(query),
            "turned_dout_ptr": None if value is None else turned(dout),
        },
        {"dk_ptr": like(key), "dv_ptr": like(value)},
        {"C": c, "SECTION": together, **sizes},
    )


@with_bias_gradient
def attention_bwd(
    *operands: Any,
    scale,
    causal,
    window,
    softcap,
    wanted,
):
    """(dq, dk, dv, dS, dsinks)"""
    o = GradientOperands(*operands)
    query, key, value, bias = o.query, o.key, o.value, o.bias
    b, t, n, h = query.shape
    _, s, heads, hv = value.shape
    want_q, want_k, want_v, want_slopes, want_sinks = wanted
    padded = -(-t // PADDING) * PADDING
    lse2, delta = gradient_rows(o.out, o.lse, o.dout, o.dlse, padded, o.tail)
    given, constants = operands_and_constants(o, scale, causal, window, softcap)
    given |= {"dout_ptr": factor(o.dout), "lse2_ptr": lse2, "delta_ptr": delta}
    q_ids, kv_ids = given["q_ids_ptr"], given["kv_ids_ptr"]
    dq = slopes = dsinks = None
    dk, dv = key_gradients(
        given,
        constants,
        query,
        o.dout,
        key if want_k else None,
        value if want_v else None,
    )
    if want_q or want_slopes:
        sizes = sizes_of(QUERIES, given)
        if q_ids is not None:
            given["bounds_ptr"] = segment_bounds(
                q_ids, kv_ids, sizes["BLOCK_Q"], sizes["BLOCK_K"]
            )
        together = section(s, h + hv, key.dtype) * (n // heads)
        if want_slopes:
            slopes = jax.ShapeDtypeStruct((b, n, t, s), bias.dtype)
        dq, slopes = sparse_call(
            flash_attention_bwd_queries_kernel,
            (-(-t // sizes["BLOCK_Q"]) * b * n,),
            given | {"turned_k_ptr": turned(key)},
            {"dq_ptr": like(query), "slopes_ptr": slopes},
            {"C": constants, "SECTION": together, **sizes},
        )
    if want_sinks:
        share = jnp.exp2(
            o.sinks.astype(jnp.float32)[:, None] * LOG2_E - lse2[..., :t]
        )  # [b n t]; 0 where lse2 is inf
        dsinks = -jnp.sum(share * delta[..., :t], (0, 2)).astype(o.sinks.dtype)
    return dq, dk, dv, slopes, dsinks
