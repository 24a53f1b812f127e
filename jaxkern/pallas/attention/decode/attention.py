"""Attention of one query over a long cache on Hopper: TMA and WGMMA.

    out = softmax(scale q k^T) v        lse = log(sum(exp(scale q k^T)))

for q `[b, 1, n, h]`, k and v `[b, s, k, h]`, in parts that are merged as in
Flash-Decoding (https://pytorch.org/blog/flash-decoding).

A multiprocessor has one program. Its loader keeps a ring of blocks of keys and values
full, across the heads that the program takes one after the other, so memory never waits
for what begins or ends a head. There is one launch: a head's keys are read by one
program, or by the two of a cluster, which merge their halves.
docs/design/decode_attention.md has the measurements.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.gpu.attention.over_sequences import over_sequences
from jaxkern.gpu.device import compute_capability, num_sms
from jaxkern.pallas.attention.attention.pairs import LOG2_E
from jaxkern.pallas.attention.attention.wgmma import tiled
from jaxkern.pallas.attention.decode.decode_kernel import (
    COLUMNS,
    Barriers,
    Buffers,
    decode_kernel,
)
from jaxkern.pallas.attention.decode.decode_walk import LANES, PAIR, Problem
from jaxkern.pallas.mosaic_launch import kernel_name
from jaxkern.primitives.attention.attend import saves_no_tail
from jaxkern.primitives.attention.operands import AttentionOperands

HEAD_DIMS = (64, 128, 256)
BLOCK_ELEMENTS = 16384  # of the keys of a block
UNEVEN_HEADS = 1.5  # a program, or one long sequence is best cut finer
BUSY = 0.8  # of the device, or more shares are faster
STAGES = 2  # blocks in shared memory; more are slower


def unsupported(
    query: Any,
    key: Any,
    value: Any,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> str | None:
    """A reason in words, or None."""
    b, t, n, h = query.shape
    s, k = key.shape[1:3]
    if compute_capability() != 90:
        return f"the compute capability is {compute_capability()}, not 90 (Hopper)"
    if t != 1:
        return f"{t} queries, not one"
    for name in ("bias", "mask", "q_segment_ids", "sinks"):
        if rest.get(name) is not None:
            return f"`{name}` is not in the decode kernel"
    if window is not None or softcap is not None:
        return "`window` and `softcap` are not in the decode kernel"
    if not query.dtype == key.dtype == value.dtype:
        names = [x.dtype.name for x in (query, key, value)]
        return f"query, key and value have the dtypes {', '.join(names)}"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"`query` is {query.dtype.name}"
    if not b * n:
        return "an operand is empty"
    if h not in HEAD_DIMS or value.shape[3] != h:
        return f"head dims {h} and {value.shape[3]}, none of {HEAD_DIMS} alike"
    if COLUMNS % (n // k) or b * n % COLUMNS:
        return f"{n} heads of {b} sequences over {k} are no whole groups of {COLUMNS}"
    block = BLOCK_ELEMENTS // h
    if s < block or s % 8:
        return f"{s} keys are fewer than {block} or no multiple of 8"
    if b > LANES:
        return f"{b} sequences, more than {LANES}"
    return None


def busy(heads: int, workers: int) -> float:
    """The part of the time that workers have a head, if all heads are alike."""
    return heads / (-(-heads // workers) * workers)


def plan(
    b: int,
    s: int,
    k: int,
    group: int,
    h: int,
    scale: float,
    lengths: bool,
) -> Problem:
    """Where lengths are alike programs work alone, if more of them are busy then."""
    heads, clusters = b * k, num_sms() // PAIR
    most = PAIR * clusters
    alone = busy(heads, most) >= busy(heads, clusters) - 0.05
    rounds = -(-heads // (most if alone else clusters))
    uneven = lengths and b > 1
    cluster = 1 if alone and not uneven else PAIR
    workers = -(-heads // rounds)
    return Problem(
        b=b,
        s=s,
        k=k,
        group=group,
        h=h,
        scale=scale * LOG2_E,
        block=BLOCK_ELEMENTS // h,
        stages=STAGES,
        cluster=cluster,
        clusters=clusters if uneven else workers,
        workers=workers,
        alone=alone,
        uneven=uneven,
    )


def slower(
    query: Any,
    key: Any,
    kv_lengths: Any = None,
    causal: bool = False,
    q_offset: Any = None,
    **_: Any,
) -> str | None:
    """Why "auto" leaves these operands to the next row, or None."""
    b, k, clusters = query.shape[0], key.shape[2], num_sms() // PAIR
    heads = b * k
    share = max(busy(heads, workers) for workers in (clusters, PAIR * clusters))
    if share < BUSY:
        return f"{heads} heads of keys keep {share:.0%} of the device busy"
    lengths = kv_lengths is not None or (causal and q_offset is not None)
    if lengths and b > 1 and heads < UNEVEN_HEADS * PAIR * clusters:
        return f"{heads} heads of keys of different lengths are too few to balance"
    return None


def launch(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    kv_lengths: jax.Array | None,
    q_offset: jax.Array | None,
    *,
    scale: float,
    causal: bool,
    interpret: bool = False,
) -> tuple:
    b, _, n, h = query.shape
    s, k = key.shape[1:3]
    g = n // k
    offset = q_offset if causal else None
    lengths = kv_lengths is not None or offset is not None
    c = plan(b, s, k, g, h, scale, lengths)
    shared = functools.partial(plgpu.SMEM, dtype=query.dtype)
    ring, each = (c.stages, c.block, h), plgpu.Barrier(num_barriers=c.stages)
    buffers = Buffers(
        q=shared((2, COLUMNS, h), transforms=tiled(COLUMNS, h)),
        k=shared(ring, transforms=tiled(c.block, h)),
        v=shared(ring, transforms=tiled(c.block, h, contract_rows=True)),
        weights=shared((COLUMNS, c.block), transforms=tiled(COLUMNS, c.block)),
        out=shared((COLUMNS, h)),
        order=plgpu.SMEM((2, LANES), jnp.int32) if c.uneven else None,
    )
    met = plgpu.ClusterBarrier(collective_axes=("rank",)) if c.cluster > 1 else each
    barriers = Barriers(plgpu.Barrier(num_barriers=2), each, each, each, each, met)
    exchanged = (c.clusters, 2, PAIR) if c.cluster > 1 else (1, 1, 1)
    out, lse, *_ = plgpu.kernel(
        functools.partial(decode_kernel, c=c, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((b * k, g, h), query.dtype),
            jax.ShapeDtypeStruct((b * k, COLUMNS), jnp.float32),
            jax.ShapeDtypeStruct((*exchanged, h, COLUMNS), jnp.float32),
            jax.ShapeDtypeStruct((*exchanged, COLUMNS), jnp.float32),
        ),
        grid=(c.clusters,),
        grid_names=("cluster",),
        cluster=(c.cluster,) if c.cluster > 1 else (),
        cluster_names=("rank",) if c.cluster > 1 else (),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name=kernel_name("decode_attention", keys=c.block, stages=c.stages),
        scratch_types=(buffers, barriers),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(query.reshape(b * n, h), key, value, as_int32(kv_lengths), as_int32(offset))
    # heads that share eight rows of queries have columns beside each other
    beside = COLUMNS // g
    lse = lse.reshape(-1, beside, beside, g)
    lse = jnp.stack([lse[:, i, i] for i in range(beside)], axis=1)
    return out.reshape(query.shape), lse.reshape(b, 1, n)


def as_int32(x: jax.Array | None) -> jax.Array | None:
    return None if x is None else x.astype(jnp.int32)


def attention(*operands: Any, scale, causal, interpret=False, **refused: Any):
    """(out, lse); `interpret` runs the kernel on a CPU."""
    del refused
    o = AttentionOperands(*operands)
    taken = o.query, o.key, o.value, o.kv_lengths, o.q_offset
    options = dict(scale=scale, causal=causal, interpret=interpret)
    return over_sequences(launch, (1, 2), (), *taken, **options)


attention_fwd = saves_no_tail(attention)
