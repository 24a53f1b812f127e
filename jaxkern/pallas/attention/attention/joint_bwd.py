"""Gradients of attention on Hopper in one kernel of five products.

A program holds 128 keys and walks over the queries that see them, through all heads of
the group, as `keys_kernel` does; bwd.py has the formulas. It also
computes what its keys add to dq, so S and dP are computed once.

dS goes to shared memory. Each consumer reads that of both and computes half of the
columns of dS k, a block later, so that it does not wait for the other. A warpgroup of
its own has the copy engine add the result to dq in memory. As integers: each row of dq
is counted in units of 2^-30 of a bound of |dq|, and the sum is the same bits in any
order. rows.py has the units and the zeros before it, and the conversion after.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.gpu.attention.gradient_rows import HEAD_DIM
from jaxkern.gpu.attention.operands import GradientOperands
from jaxkern.gpu.attention.visible import segment_bounds
from jaxkern.pallas.attention.attention import bwd
from jaxkern.pallas.attention.attention.fwd import copyable, int32, padded_rows
from jaxkern.pallas.attention.attention.gradient_blocks import (
    BLOCK,
    CONSUMERS,
    KEYS,
    STAGES,
)
from jaxkern.pallas.attention.attention.joint_kernel import joint_kernel
from jaxkern.pallas.attention.attention.joint_tiles import SLOTS
from jaxkern.pallas.attention.attention.problem import ROWS, problem
from jaxkern.pallas.attention.attention.rows import (
    LINES,
    counted,
    counted_rows,
    sinks_gradient,
)
from jaxkern.pallas.attention.attention.wgmma import tiled
from jaxkern.pallas.mosaic_launch import kernel_name
from jaxkern.primitives.attention.attend import without_rest

MANY = 2048  # keys that a query sees, from which on it was faster than two kernels
MANY_IN_WINDOW = 3072  # where two kernels share out the last round of programs


def unsupported(**operands: Any) -> str | None:
    """A reason in words, or None."""
    if reason := bwd.unsupported(**operands):
        return reason
    h, hv = operands["query"].shape[3], operands["value"].shape[3]
    if h != HEAD_DIM or hv != HEAD_DIM:
        return f"head dims {h} and {hv} are not {HEAD_DIM}"
    for name in ("bias", "mask", "softcap"):
        if operands[name] is not None:
            return f"`{name}` needs registers that are not there"
    return None


def slower(
    query: Any,
    key: Any,
    q_segment_ids: Any,
    causal: bool,
    window: int | None,
    **rest: Any,
) -> str | None:
    """Why "auto" leaves the gradients to the next row, or None."""
    if reason := bwd.slower(query=query, key=key, **rest):
        return reason
    if q_segment_ids is not None:
        return "with segments it was not measured"
    seen = key.shape[1] // 2 if causal else key.shape[1]
    least = MANY
    if window is not None and window < seen:
        seen, least = window, MANY_IN_WINDOW
    if seen < least:
        return f"queries see {seen} keys, fewer than {least}"
    return None


def attention_bwd(
    *operands: Any,
    scale,
    causal,
    window,
    softcap,
    wanted,
    interpret=False,
):
    """(dq, dk, dv, None, dsinks); `interpret` runs the kernel on a CPU."""
    o = GradientOperands(*operands)
    query, key, value, bias, mask = o.query, o.key, o.value, o.bias, o.mask
    out, dout = o.out, o.dout
    assert bias is None and mask is None and softcap is None  # the row refuses them
    c = problem(query, key, value, None, scale, causal, window, softcap)
    # With block_q = CONSUMERS * ROWS and one tile a program.
    c = dataclasses.replace(c, consumers=CONSUMERS, block_k=BLOCK)
    q_ids, kv_ids, bounds = int32(o.q_segment_ids), int32(o.kv_segment_ids), None
    if q_ids is not None and kv_ids is not None:
        bounds = segment_bounds(kv_ids, q_ids, KEYS, BLOCK)
        q_ids, kv_ids = padded_rows(q_ids, BLOCK), padded_rows(kv_ids, KEYS)
    key, value = without_rest(key, o.kv_lengths), without_rest(value, o.kv_lengths)
    lse2, delta, counts, units, nothing = counted_rows(
        c, key, value, out, o.lse, dout, o.dlse, interpret, o.tail
    )
    q, k, v, dout = (
        copyable(x.astype(query.dtype), ROWS) for x in (query, key, value, dout)
    )

    def matrix(*shape):
        # WGMMA contracts over the rows in one product, over the columns in another
        return plgpu.SMEM(shape, query.dtype, transforms=tiled(BLOCK, shape[-1]))

    buffers = (
        matrix(CONSUMERS, ROWS, c.h),
        matrix(CONSUMERS, ROWS, c.hv),
        matrix(STAGES, BLOCK, c.h),
        matrix(STAGES, BLOCK, c.hv),
        [plgpu.SMEM((STAGES, BLOCK), jnp.float32)] * 3,  # lse, delta and counts
        matrix(SLOTS, CONSUMERS, ROWS, BLOCK),
        plgpu.SMEM((CONSUMERS, *LINES), jnp.int32),
    )
    barriers = (
        plgpu.Barrier(num_arrivals=2 * CONSUMERS),  # keys and values are there
        plgpu.Barrier(num_barriers=STAGES, num_arrivals=5),  # queries are there
        plgpu.Barrier(num_barriers=STAGES, num_arrivals=CONSUMERS),  # and not needed
        plgpu.Barrier(num_barriers=SLOTS, num_arrivals=CONSUMERS),  # dS of both
        plgpu.Barrier(num_arrivals=CONSUMERS),  # keys are not needed
        plgpu.Barrier(num_barriers=CONSUMERS),  # dq is there
        plgpu.Barrier(num_barriers=CONSUMERS),  # and read
    )

    @jax.jit
    def launch(nothing, *operands):
        # A ref made by `new_ref` is an effect, which no partitioned call may have.
        results = tuple(jax.lax.empty(x.shape, x.dtype) for x in (k, v))
        run = plgpu.kernel(
            functools.partial(joint_kernel, c=c, interpret=interpret),
            grid=(-(-c.s // KEYS) * c.b * (c.n // c.group),),
            grid_names=("program",),
            num_threads=CONSUMERS + 2,
            thread_name="warpgroup",
            kernel_name=kernel_name(
                "attention_bwd", keys=KEYS, queries=BLOCK, stages=STAGES
            ),
            scratch_types=(buffers, barriers),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )
        return pl.run_state(lambda refs: run(*operands, *refs))((nothing, *results))

    dq, dk, dv = launch(
        nothing,
        q,
        k,
        v,
        dout,
        lse2,
        delta,
        counts,
        q_ids,
        kv_ids,
        bounds,
        int32(o.kv_lengths),
        int32(o.q_offset),
    )
    dq = counted(dq, units, c.t, query.dtype, interpret)
    dsinks = sinks_gradient(o.sinks, lse2, delta) if wanted[4] else None
    return dq, dk[:, : c.s], dv[:, : c.s], None, dsinks
