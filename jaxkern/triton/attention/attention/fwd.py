"""Attention of many queries without a matrix of scores: out and lse in one launch.

The kernel is forward_kernel.py; bwd.py has the gradients.

Exponentials are of base 2, with the scale folded into their argument. q, k, v, out and
their gradients stay in [b t n h]; beside them only lse is written, O(t).
What a program holds is read once; what it walks over, by every program that sees it,
from the L2 cache: heads are taken in sections whose share it holds.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.attention.visible import FEW_QUERIES, segment_bounds, slower
from jaxkern.gpu.triton_call import max_shared_bytes, sparse_call
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.attention.attend import no_tail, saves_tail
from jaxkern.primitives.attention.operands import AttentionOperands
from jaxkern.triton.attention.attention.forward_kernel import flash_attention_kernel
from jaxkern.triton.attention.attention.problem import (
    operands_and_constants,
    turned,
)
from jaxkern.triton.attention.attention.tile_sizes import (
    FORWARD,
    piece,
    sizes_of,
)

__all__ = ["attention", "attention_fwd", "slower", "unsupported"]
MAX_HEAD_DIM = 512
LARGE_TILES = 160 * 1024  # bytes of the tiles of wider heads than 128
CACHED_BYTES = 2**25  # of the L2 cache, for the keys and values of one section


def unsupported(
    query: Any, key: Any, value: Any, scale: float, **rest: Any
) -> str | None:
    """A reason in words, or None."""
    b, t, n, h = query.shape
    s, hv = value.shape[1], value.shape[3]
    if t <= FEW_QUERIES:
        return f"{t} queries are no more than {FEW_QUERIES}: reading the keys decides"
    if max(h, hv) > MAX_HEAD_DIM:
        return f"head dims {h} and {hv} are above {MAX_HEAD_DIM}"
    if max(h, hv) > 128 and max_shared_bytes() < LARGE_TILES:
        return f"head dims {h} and {hv} need more than the GPU's shared memory"
    if not b * n * h * hv * s:
        return "an operand is empty"
    if not query.dtype == key.dtype == value.dtype:
        names = [x.dtype.name for x in (query, key, value)]
        return f"query, key and value have the dtypes {', '.join(names)}"
    if query.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"`query` is {query.dtype.name}"
    return unsupported_anywhere(query=query, bias=rest.get("bias"))


def section(rows: int, elements: int, dtype: Any) -> int:
    """How many heads of so many rows the cache holds."""
    return max(1, CACHED_BYTES // (rows * elements * jnp.dtype(dtype).itemsize))


def attention(
    *operands: Any,
    scale,
    causal,
    window,
    softcap,
    with_tail=False,
):
    """(out, lse), and the tail of out if asked for"""
    o = AttentionOperands(*operands)
    b, t, n, h = o.query.shape
    _, s, heads, hv = o.value.shape
    given, constants = operands_and_constants(o, scale, causal, window, softcap)
    sizes = sizes_of(FORWARD, given)
    if o.q_segment_ids is not None:
        given["bounds_ptr"] = segment_bounds(
            given["q_ids_ptr"],
            given["kv_ids_ptr"],
            sizes["BLOCK_Q"],
            sizes["BLOCK_K"],
        )
    results = {
        "out_ptr": jax.ShapeDtypeStruct((b, t, n, hv), o.query.dtype),
        "lse_ptr": jax.ShapeDtypeStruct((b, t, n), jnp.float32),
        "tail_ptr": None,
    }
    tails = with_tail and saves_tail(o.query.dtype)
    if tails:
        results["tail_ptr"] = jax.ShapeDtypeStruct((b, t, n, hv), jnp.int8)
    out, lse, tail = sparse_call(
        flash_attention_kernel,
        (-(-t // sizes["BLOCK_Q"]) * b * n,),
        given | {"sinks_ptr": o.sinks, "turned_v_ptr": turned(o.value)},
        results,
        {
            "C": constants,
            "SECTION": section(s, h + hv, o.key.dtype) * (n // heads),
            "PIECE": piece(constants, o.query.dtype),
            **sizes,
        },
    )
    if not with_tail:
        return out, lse
    return out, lse, tail if tails else no_tail(out)


def attention_fwd(*operands, **options):
    """(out, lse, tail)"""
    return attention(*operands, **options, with_tail=True)
