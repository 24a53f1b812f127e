"""Gradients of attention on Hopper: two kernels of TMA and WGMMA, without atomics.

With P = exp(S - lse), dP = dout v^T and dS = P (dP - delta), delta = rowsum(dout out) -
dlse, as in FlashAttention-2 (https://arxiv.org/abs/2307.08691):

    dv = P^T dout,    dk = scale dS^T q,    dq = scale dS k

One kernel holds keys and values and walks over the queries that see them, through all
heads of the group; it computes S and dP transposed, so that P^T and dS^T are in the
registers in which WGMMA takes them. The other holds queries and walks over their keys.
Each has a loader and two consumers of 64 rows, as the forward kernel; one consumer's
exponentials lie under the products of the other. Above head dims of 128 registers do
not hold all of that: the consumers of the first kernel compute dP when P has been used,
and above those of 192 and 128 they share 64 keys.

The second kernel writes dS where the gradient of a bias asks for it, each block once.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.flash_attention import (
    copyable,
    int32,
    padded_rows,
    unsupported,
)
from jaxkern.pallas.attention.gradient_blocks import (
    BLOCK,
    CONSUMERS,
    KEYS,
    NARROW,
    P_SLOTS,
    SHIFT,
    STAGES,
)
from jaxkern.pallas.attention.keys_kernel import keys_kernel
from jaxkern.pallas.attention.pairs import (
    bias_tiles,
    inside_both,
    mask_words,
    pair_bytes,
    whole_blocks,
    word_bounds,
)
from jaxkern.pallas.attention.problem import ROWS, WIDTH, Problem, problem
from jaxkern.pallas.attention.queries_kernel import queries_kernel
from jaxkern.pallas.attention.rows import laid_out, rows_of, sinks_gradient
from jaxkern.pallas.attention.wgmma import tiled
from jaxkern.pallas.attention.wide_keys_kernel import wide_keys_kernel
from jaxkern.pallas.mosaic_launch import kernel_name
from jaxkern.primitives.attention.attention import without_rest
from jaxkern.triton.attention.flash_attention import (
    segment_bounds,
    with_bias_gradient,
)
from jaxkern.triton.attention.flash_attention import slower as slower_than_xla
from jaxkern.triton.block_sizes import next_power_of_2, num_sms, tuned

SHARED_BYTES = 232_448 - 2048  # of a program; the rest is for barriers
FASTER = {(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)}  # than Triton
WALKED = 4, 3
PERSISTENT = True
HALVES = True
APART = True
MEASURED = 128  # queries of the shortest sequence that was measured


def unsupported_bwd(query: Any, value: Any, **rest: Any) -> str | None:
    """A reason in words, or None."""
    if reason := unsupported(query=query, value=value, **rest):
        return reason
    h, hv = query.shape[3], value.shape[3]
    if max(h, hv) > WIDTH:
        return f"gradients at head dims of {h} and {hv}, above {WIDTH}"
    return None


def slower_bwd(query: Any, key: Any, value: Any, **_: Any) -> str | None:
    """Why "auto" leaves the gradients to the next row, or None."""
    if (query.shape[3], value.shape[3]) not in FASTER:
        dims = f"head dims {query.shape[3]} and {value.shape[3]}"
        return f"no gain was measured at {dims}"
    if query.shape[1] < MEASURED:
        return f"fewer than {MEASURED} queries were not measured"
    return slower_than_xla(query, key)


def matrix(dtype, block: int, *shape: int):
    """Shared memory of 16 bits; `block` is the least number of rows contracted over."""
    transforms = tiled(block, shape[-1], contract_rows=True)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def slots(stages: int, arrivals: int):
    return plgpu.Barrier(num_barriers=stages, num_arrivals=arrivals)


def keys_plan(h: int, hv: int, bias_bytes: int) -> dict[str, int]:
    """KEYS of a program, BLOCK_Q walked over, STAGES of them; by what fits.

    dk and dv of 64 keys take (h + hv) / 2 registers of a consumer, S and dP of a block
    32 each. With 64 keys a program the consumers share them.
    """
    more = NARROW < h + hv <= 320 and not bias_bytes
    keys = KEYS if h + hv <= 320 else ROWS
    return dict(KEYS=keys, BLOCK_Q=BLOCK, STAGES=STAGES + more)


def keys_scratch(
    c: Problem, dtype, bias, halves: bool, KEYS: int, BLOCK_Q: int, STAGES: int
):
    """(buffers, barriers, whether the bias comes through shared memory)."""
    wide = KEYS == ROWS
    ring = STAGES, BLOCK_Q
    held = (ROWS,) if wide else (CONSUMERS, ROWS)
    used = 2 * (KEYS + STAGES * BLOCK_Q) * (c.h + c.hv) + 8 * STAGES * BLOCK_Q
    used += 2 * P_SLOTS * KEYS * BLOCK_Q if wide else 0
    tile = STAGES * BLOCK_Q * KEYS * pair_bytes(bias)
    copied = 0 < tile <= SHARED_BYTES - used
    buffers = [
        matrix(dtype, BLOCK_Q, *held, c.h),
        matrix(dtype, BLOCK_Q, *held, c.hv),
        matrix(dtype, BLOCK_Q, *ring, c.h),
        matrix(dtype, BLOCK_Q, *ring, c.hv),
        plgpu.SMEM(ring, jnp.float32),
        plgpu.SMEM(ring, jnp.float32),
    ]
    consumers = () if wide else (CONSUMERS,)
    tiles = None
    if copied:
        tiles = bias_tiles(bias.dtype, STAGES, *consumers, BLOCK_Q, ROWS)
    if not wide:
        copies = 4 + CONSUMERS * copied
        full, free = slots(STAGES, copies), slots(STAGES, CONSUMERS)
        barriers = [slots(CONSUMERS, 2), full, free, slots(CONSUMERS, 1)]
        if halves:
            float32: Any = jnp.dtype(jnp.float32)
            tiles = tiles, bias_tiles(float32, ROWS, max(c.h, c.hv))
            barriers += [plgpu.Barrier(), plgpu.Barrier()]
            return (*buffers, *tiles), barriers, copied
        return (*buffers, tiles), barriers, copied
    exchanged = bias_tiles(jnp.dtype(jnp.float16), P_SLOTS, ROWS, BLOCK_Q)
    free, one = slots(STAGES, CONSUMERS), slots(P_SLOTS, 1)
    rings = slots(STAGES, 2 + copied), free, slots(STAGES, 2), free, one, one
    return (
        (*buffers, exchanged, tiles),
        (slots(CONSUMERS, 1), *rings, plgpu.Barrier()),
        copied,
    )


def queries_scratch(c: Problem, dtype, bias, want_slopes: bool):
    """As keys_scratch. What is wide has one stage of values, or of both.

    What is narrow and without a bias has buffers of its own for `out` and dq.
    """
    size = pair_bytes(bias)
    tile = c.block_q * BLOCK
    narrow = c.h + c.hv <= NARROW
    apart = narrow and bias is None and APART
    used = 2 * c.block_q * (c.h + c.hv) * (1 + apart)
    used += tile * bias.dtype.itemsize if want_slopes else 0
    for copied, k_stages, v_stages in (
        *((size > 0, n, n) for n in WALKED if narrow),
        (size > 0, 2, 2),
        (size > 0, 2, 1),
        (size > 0, 1, 1),
        (False, 1, 1),
    ):
        ring = 2 * BLOCK * (k_stages * c.h + v_stages * c.hv)
        ring += v_stages * tile * size if copied else 0
        if used + ring <= SHARED_BYTES:
            break
    pair = CONSUMERS, ROWS
    buffers = (
        matrix(dtype, BLOCK, *pair, c.h),
        matrix(dtype, BLOCK, *pair, c.hv),
        matrix(dtype, BLOCK, *pair, c.hv) if apart else None,
        matrix(dtype, BLOCK, k_stages, BLOCK, c.h),
        matrix(dtype, BLOCK, v_stages, BLOCK, c.hv),
        bias_tiles(bias.dtype, v_stages, *pair, BLOCK) if copied else None,
        matrix(dtype, BLOCK, *pair, c.h) if apart else None,
        bias_tiles(bias.dtype, *pair, BLOCK) if want_slopes else None,
    )
    beside = 1 + CONSUMERS * copied  # copies of values and of the bias
    one = slots(CONSUMERS, 1)
    of_queries = slots(CONSUMERS, 2 + apart), one, one
    if k_stages == v_stages:  # one ring: they come and go with the keys
        rings = slots(k_stages, 1 + beside), slots(k_stages, CONSUMERS), None, None
    else:
        rings = (
            slots(k_stages, 1),
            slots(k_stages, CONSUMERS),
            slots(v_stages, beside),
            slots(v_stages, CONSUMERS),
        )
    return buffers, (*of_queries, *rings), copied, apart


@with_bias_gradient
def attention_bwd(
    query,
    key,
    value,
    bias,
    mask,
    q_segment_ids,
    kv_segment_ids,
    kv_lengths,
    q_offset,
    sinks,
    out,
    lse,
    dout,
    dlse,
    *,
    scale,
    causal,
    window,
    softcap,
    wanted,
    interpret=False,
):
    """(dq, dk, dv, dS, dsinks); `interpret` runs the kernels on a CPU."""
    c = problem(query, key, value, bias, scale, causal, window, softcap)
    # With block_q = CONSUMERS * ROWS and one tile a program.
    c = dataclasses.replace(c, consumers=CONSUMERS, block_k=BLOCK)
    queries = queries_scratch(c, query.dtype, bias, wanted[3])
    apart = wanted[0] and queries[3]
    if apart:  # the kernel that holds queries adds rowsum(dout out)
        lse2, delta = laid_out(lse, -dlse, c.blocks * c.block_q)
    else:
        lse2, delta = rows_of(c, out, lse, dout, dlse, interpret)
    programs = min(c.tiles, num_sms()) if apart and PERSISTENT else c.tiles
    c = dataclasses.replace(c, programs=programs)
    q_ids, kv_ids = int32(q_segment_ids), int32(kv_segment_ids)
    key, value = without_rest(key, kv_lengths), without_rest(value, kv_lengths)
    operands = (
        copyable(query, ROWS),
        copyable(key, ROWS),
        copyable(value, ROWS),
        copyable(dout.astype(query.dtype), ROWS),
    )
    q, k, v, _ = operands
    ids = None, None
    if q_ids is not None and kv_ids is not None:  # whole tiles of every kernel
        ids = padded_rows(q_ids, c.block_q), padded_rows(kv_ids, KEYS)

    def pairs(held: int, block: int, turned: bool, copied: bool):
        """Bias, words and bounds of a kernel that holds keys (`turned`) or queries."""
        bounds = words = own_bias = None
        if q_ids is not None and kv_ids is not None:
            both = (kv_ids, q_ids) if turned else (q_ids, kv_ids)
            bounds = segment_bounds(*both, held, block)
        if mask is not None:
            shown = jnp.swapaxes(mask, 2, 3) if turned else mask
            lengths = (c.s, c.t) if turned else (c.t, c.s)
            words = mask_words(shown, *lengths, held, block)
            bounds = inside_both(bounds, word_bounds(words, c.b, held, block))
        if bias is not None and copied and turned:
            own_bias = whole_blocks(bias, block, held)
        elif bias is not None:
            own_bias = whole_blocks(
                jnp.swapaxes(bias, 2, 3) if turned else bias, held, block
            )
        return own_bias, words, bounds

    def launch(kernel, name, like, programs, buffers, barriers, pairs, *operands):
        return plgpu.kernel(
            functools.partial(kernel, c=c, interpret=interpret),
            out_type=tuple(
                x if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like
            ),
            grid=(programs,),
            grid_names=("program",),
            num_threads=CONSUMERS + 1,
            thread_name="warpgroup",
            kernel_name=name,
            scratch_types=(buffers, barriers),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )(*operands, *ids, *pairs, int32(kv_lengths), int32(q_offset))

    dq = dk = dv = slopes = dsinks = None
    if wanted[0] or wanted[3]:
        if wanted[3]:
            shape = c.b, c.n, q.shape[1], -(-c.s // BLOCK) * BLOCK
            slopes = jax.ShapeDtypeStruct(shape, bias.dtype)
        buffers, barriers, copied, _ = queries
        dq, slopes, summed = launch(
            queries_kernel,
            kernel_name("attention_bwd_queries", queries=c.block_q, keys=BLOCK),
            (q, slopes, delta if apart else None),
            c.programs,
            buffers,
            barriers,
            pairs(c.block_q, BLOCK, False, copied),
            copyable(out, ROWS) if apart else None,
            *operands,
            lse2,
            delta,
        )
        delta = summed if apart else delta
        dq = dq[:, : c.t]
        if slopes is not None:
            slopes = slopes[:, :, : c.t, : c.s]
    if wanted[1] or wanted[2]:
        found = tuned(
            "hopper_flash_attention_bwd_keys",
            next_power_of_2(max(c.h, c.hv)),
            query.dtype,
            keys_plan(c.h, c.hv, pair_bytes(bias)),
        )
        keys, block = found["KEYS"], found["BLOCK_Q"]
        shared, in_turn = keys == ROWS, c.h + c.hv > NARROW
        programs = -(-c.s // keys) * c.b * (c.n // c.group)
        behind = programs % num_sms()
        halves = HALVES and not (shared or in_turn or c.group % 2 or bias is not None)
        halves = halves and (c.window is not None or behind <= num_sms() // 2)
        halves = halves and behind > 0
        if halves:
            found["STAGES"] = 4
        whole = programs - behind if halves else programs
        scratch = keys_scratch(c, query.dtype, bias, halves, **found)
        buffers, barriers, copied = scratch
        dk, dv = launch(
            wide_keys_kernel
            if shared
            else functools.partial(keys_kernel, whole=whole, in_turn=in_turn),
            kernel_name(
                "attention_bwd_keys", keys=keys, queries=block, stages=found["STAGES"]
            ),
            (k, v),
            2 * programs - whole,
            buffers,
            barriers,
            pairs(keys, block, True, copied),
            *operands,
            lse2 - SHIFT if shared or in_turn else lse2,
            delta,
        )
        dk, dv = dk[:, : c.s], dv[:, : c.s]
    if wanted[4]:
        dsinks = sinks_gradient(sinks, lse2, delta)
    return dq, dk, dv, slopes, dsinks
