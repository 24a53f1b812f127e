"""Attention of many queries on Hopper: TMA, WGMMA and specialised warpgroups.

The algorithm is FlashAttention-3 (https://arxiv.org/abs/2407.08608). A program is one
loader warpgroup and two or three consumers of 64 queries each. The loader keeps a ring
of key and value blocks full. A consumer issues S_j = q k_j^T and, behind it, the
product P_{j-1} v_{j-1}; the softmax of S_j runs while the second product and the
products of the other consumers occupy the tensor cores. The sums are relative to a
maximum that is replaced only when a row has one much larger.

Blocks are visited from the last that is seen to the first. Blocks that causal, window,
lengths or segments hide are never loaded, and those that they show entirely are not
masked. Where a program takes several tiles, its loader fetches the next one while the
last one is written. docs/design/attention.md has the measurements.

What lies beyond t or s is zero when it is loaded and dropped when it is stored: that is
how the copy engine treats what is outside of an array. It moves tiles of 8 rows, so
lengths that are no multiples of 8 cost a copy that pads them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.gpu.attention.visible import FEW_QUERIES, segment_bounds
from jaxkern.gpu.attention.visible import slower as slower_than_xla
from jaxkern.gpu.device import compute_capability
from jaxkern.pallas.attention.attention.forward_consumer import attend
from jaxkern.pallas.attention.attention.forward_loader import load
from jaxkern.pallas.attention.attention.forward_tiles import (
    Barriers,
    Buffers,
    Operands,
    Program,
)
from jaxkern.pallas.attention.attention.pairs import (
    bias_tiles,
    inside_both,
    mask_words,
    whole_blocks,
    word_bounds,
)
from jaxkern.pallas.attention.attention.problem import (
    ROWS,
    SHORT,
    WIDTH,
    Problem,
    in_pieces,
    memory,
    problem,
    sizes,
)
from jaxkern.pallas.attention.attention.wgmma import tiled
from jaxkern.pallas.mosaic_launch import kernel_name
from jaxkern.primitives.attention.attend import no_tail, saves_tail, without_rest
from jaxkern.primitives.attention.operands import AttentionOperands

FASTER = {  # than Triton: measured
    (64, 64),
    (96, 96),
    (128, 128),
    (192, 128),
    (256, 256),
    (320, 320),
    (384, 384),
    (512, 512),
}


def unsupported(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    kv_segment_ids: Any = None,
    kv_lengths: Any = None,
    causal: bool = False,
    window: int | None = None,
    **_: Any,
) -> str | None:
    """A reason in words, or None."""
    b, t, n, h = query.shape
    s, hv = value.shape[1], value.shape[3]
    if compute_capability() != 90:
        return f"the compute capability is {compute_capability()}, not 90 (Hopper)"
    if t <= FEW_QUERIES:
        return f"{t} queries are no more than {FEW_QUERIES}: reading the keys decides"
    if not b * n * h * hv * s:
        return "an operand is empty"
    pieces, parts = in_pieces(h), in_pieces(hv)
    if h % (16 * pieces) or hv % (16 * parts) or max(h, hv) > 2 * WIDTH:
        return f"head dims {h} and {hv} are no multiples of 16 up to 256, of 32 to 512"
    if memory(h, hv, 0, **sizes(h, hv, s, False)) is None:
        return f"head dims {h} and {hv} together do not fit shared memory"
    if not query.dtype == key.dtype == value.dtype:
        names = [x.dtype.name for x in (query, key, value)]
        return f"query, key and value have the dtypes {', '.join(names)}"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"`query` is {query.dtype.name}"
    if bias is not None and bias.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"`bias` is {bias.dtype.name}"
    return None


def slower(query: Any, key: Any, value: Any, bias: Any = None, **_: Any) -> str | None:
    """Why "auto" leaves these operands to the next row, or None."""
    if (query.shape[3], value.shape[3]) not in FASTER:
        dims = f"head dims {query.shape[3]} and {value.shape[3]}"
        return f"no gain was measured at {dims}"
    if bias is not None and value.shape[3] <= 64:
        return f"no gain was measured at {value.shape[3]} dims with a `bias`"
    return slower_than_xla(query, key, value)


def forward_kernel(*refs: Any, c: Problem, interpret: bool) -> None:
    *operands, buffers, barriers = refs
    me = lax.axis_index("warpgroup")
    program = Program(lax.axis_index("program"), Operands(*operands), c)

    @pl.when(me == c.consumers)
    def loader():
        load(program, buffers, barriers)

    @pl.when(me < c.consumers)
    def consumer():
        attend(program, buffers, barriers, me, interpret)


def padded_rows(x: jax.Array, multiple: int) -> jax.Array:
    """x with zeros behind its rows, axis 1, up to a multiple."""
    short = -x.shape[1] % multiple
    return jnp.pad(x, [(0, 0), (0, short), *((0, 0),) * (x.ndim - 2)])


def copyable(x: jax.Array, block: int) -> jax.Array:
    """x as the copy engine takes it: whole tiles of 8 rows, at least one block."""
    return padded_rows(x, block if x.shape[1] < block else 8)


def int32(x: jax.Array | None) -> jax.Array | None:
    return None if x is None else x.astype(jnp.int32)


def attention(
    *operands: Any,
    scale,
    causal,
    window,
    softcap,
    with_tail=False,
    interpret=False,
):
    """(out, lse[, tail of out]); `interpret` runs the kernel on a CPU."""
    o = AttentionOperands(*operands)
    query, key, mask = o.query, o.key, o.mask
    bias: Any = o.bias
    c = problem(query, key, o.value, bias, scale, causal, window, softcap)
    known = mask is None and o.q_segment_ids is None and o.kv_lengths is None
    if causal and not known and min(c.s, window or c.s) > SHORT:
        c = dataclasses.replace(c, programs=c.tiles)  # too unlike each other to deal
    value = without_rest(o.value, o.kv_lengths)
    q_ids, kv_ids = int32(o.q_segment_ids), int32(o.kv_segment_ids)
    words = bounds = None
    if q_ids is not None and kv_ids is not None:
        bounds = segment_bounds(q_ids, kv_ids, c.block_q, c.block_k)
        q_ids, kv_ids = padded_rows(q_ids, c.block_q), padded_rows(kv_ids, c.block_k)
    if mask is not None:
        words = mask_words(mask, c.t, c.s, c.block_q, c.block_k)
        bounds = inside_both(bounds, word_bounds(words, c.b, c.block_q, c.block_k))
    padded_t = c.blocks * c.block_q
    query = copyable(query, ROWS)
    shared = functools.partial(plgpu.SMEM, dtype=query.dtype)
    rows, lanes, piece = (c.consumers, ROWS), c.stages, c.h // c.pieces
    buffers = Buffers(
        q=shared((c.consumers, c.pieces, ROWS, piece), transforms=tiled(ROWS, piece)),
        k=shared(
            (lanes, c.pieces, c.block_k, piece), transforms=tiled(c.block_k, piece)
        ),
        v=shared(
            (lanes, c.block_k, c.hv),
            transforms=tiled(c.block_k, c.hv, contract_rows=True),
        ),
        out=None
        if c.out_in_query
        else shared((*rows, c.hv), transforms=tiled(ROWS, c.hv)),
        lse=plgpu.SMEM(rows, jnp.float32) if c.staged_lse else None,
        bias=bias_tiles(bias.dtype, lanes, *rows, c.block_k) if c.copied_bias else None,
    )
    ring = plgpu.Barrier(num_barriers=c.stages)
    k_ring = plgpu.Barrier(
        num_barriers=c.stages, num_arrivals=c.pieces + c.copied_bias * c.consumers
    )
    free = plgpu.Barrier(num_barriers=c.stages, num_arrivals=c.consumers)
    each = plgpu.Barrier(num_barriers=c.consumers)
    barriers = Barriers(
        q_full=plgpu.Barrier(num_barriers=c.consumers, num_arrivals=c.pieces),
        q_free=each,
        k_full=k_ring,
        k_free=free,
        v_full=ring,
        v_free=free,
        turn=each,
    )
    tails = with_tail and saves_tail(query.dtype) and c.parts == 1
    out, lse, tail = plgpu.kernel(
        functools.partial(forward_kernel, c=c, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype),
            jax.ShapeDtypeStruct((c.b, c.n, padded_t), jnp.float32),
            jax.ShapeDtypeStruct((c.b, padded_t, c.n, c.hv), jnp.int8)
            if tails
            else None,
        ),
        grid=(c.programs,),
        grid_names=("program",),
        num_threads=c.consumers + 1,
        thread_name="warpgroup",
        kernel_name=kernel_name(
            "attention_fwd", queries=c.block_q, keys=c.block_k, stages=c.stages
        ),
        scratch_types=(buffers, barriers),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(
        query,
        copyable(key, c.block_k),
        copyable(value, c.block_k),
        q_ids,
        kv_ids,
        None if bias is None else whole_blocks(bias, c.block_q, c.block_k),
        words,
        bounds,
        int32(o.kv_lengths),
        int32(o.q_offset),
        o.sinks,
    )
    out, lse = out[:, : c.t], jnp.moveaxis(lse[:, :, : c.t], 1, 2)
    if not with_tail:
        return out, lse
    if tails:
        return out, lse, tail[:, : c.t]
    if saves_tail(query.dtype):  # wider values have no gradients here
        return out, lse, jnp.zeros(out.shape, jnp.int8)
    return out, lse, no_tail(out)


def attention_fwd(*operands, **options):
    """(out, lse, tail)"""
    return attention(*operands, **options, with_tail=True)
