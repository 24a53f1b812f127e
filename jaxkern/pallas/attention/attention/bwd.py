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
Where it has room for `out` it runs first and sums delta too, for both.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.gpu.attention import visible
from jaxkern.gpu.attention.bias_gradient import with_bias_gradient
from jaxkern.gpu.attention.operands import GradientOperands
from jaxkern.gpu.attention.visible import segment_bounds
from jaxkern.gpu.device import num_sms
from jaxkern.pallas.attention.attention import fwd
from jaxkern.pallas.attention.attention.fwd import copyable, int32, padded_rows
from jaxkern.pallas.attention.attention.gradient_blocks import (
    BLOCK,
    CONSUMERS,
    KEYS,
    NARROW,
    SHIFT,
)
from jaxkern.pallas.attention.attention.gradient_memory import (
    HALVES_STAGES,
    keys_plan,
    keys_scratch,
    queries_scratch,
    whole_programs,
)
from jaxkern.pallas.attention.attention.keys_kernel import keys_kernel
from jaxkern.pallas.attention.attention.pairs import (
    inside_both,
    mask_words,
    pair_bytes,
    whole_blocks,
    word_bounds,
)
from jaxkern.pallas.attention.attention.problem import (
    ROWS,
    SHORT,
    WIDTH,
    Problem,
    problem,
)
from jaxkern.pallas.attention.attention.queries_kernel import queries_kernel
from jaxkern.pallas.attention.attention.rows import laid_out, rows_of, sinks_gradient
from jaxkern.pallas.attention.attention.wide_keys_kernel import wide_keys_kernel
from jaxkern.pallas.mosaic_launch import kernel_name
from jaxkern.primitives.attention.attend import without_rest

FASTER = {(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)}  # than Triton
MEASURED = 128  # queries of the shortest sequence that was measured


def unsupported(query: Any, value: Any, **rest: Any) -> str | None:
    """A reason in words, or None."""
    if reason := fwd.unsupported(query=query, value=value, **rest):
        return reason
    h, hv = query.shape[3], value.shape[3]
    if max(h, hv) > WIDTH:
        return f"gradients at head dims of {h} and {hv}, above {WIDTH}"
    return None


def slower(query: Any, key: Any, value: Any, **_: Any) -> str | None:
    """Why "auto" leaves the gradients to the next row, or None."""
    if (query.shape[3], value.shape[3]) not in FASTER:
        dims = f"head dims {query.shape[3]} and {value.shape[3]}"
        return f"no gain was measured at {dims}"
    if query.shape[1] < MEASURED:
        return f"fewer than {MEASURED} queries were not measured"
    return visible.slower(query, key, value)


@with_bias_gradient
def attention_bwd(
    *operands: Any,
    scale,
    causal,
    window,
    softcap,
    wanted,
    interpret=False,
):
    """(dq, dk, dv, dS, dsinks); `interpret` runs the kernels on a CPU."""
    o = GradientOperands(*operands)
    c = problem(o.query, o.key, o.value, o.bias, scale, causal, window, softcap)
    c = dataclasses.replace(c, consumers=CONSUMERS, block_k=BLOCK)  # and block_q
    apart = wanted[0] and o.bias is None and c.h + c.hv <= NARROW
    if apart:  # the kernel that holds queries adds rowsum(dout out)
        lse2, delta = laid_out(o.lse, -o.dlse, c.blocks * c.block_q)
    else:
        lse2, delta = rows_of(c, o.out, o.lse, o.tail, o.dout, o.dlse, interpret)
    # Tiles of lengths that are known can be dealt; few tiles of long ones cannot.
    known = o.mask is None and o.q_segment_ids is None and o.kv_lengths is None
    several = apart and known and (not causal or min(c.s, window or c.s) <= SHORT)
    programs = min(c.tiles, num_sms()) if several else c.tiles
    launches = Launches(o, dataclasses.replace(c, programs=programs), interpret)
    dq = dk = dv = slopes = dsinks = None
    if wanted[0] or wanted[3]:
        dq, slopes, summed = launches.queries(lse2, delta, wanted[3], apart)
        delta = summed if apart else delta
        dq = dq[:, : c.t]
        if slopes is not None:
            slopes = slopes[:, :, : c.t, : c.s]
    if wanted[1] or wanted[2]:
        dk, dv = launches.keys(lse2, delta)
        dk, dv = dk[:, : c.s], dv[:, : c.s]
    if wanted[4]:
        dsinks = sinks_gradient(o.sinks, lse2, delta)
    return dq, dk, dv, slopes, dsinks


class Launches:
    """Both kernels, with the operands that they share as they take them."""

    def __init__(self, o: GradientOperands, c: Problem, interpret: bool):
        self.o, self.c, self.interpret = o, c, interpret
        q_ids, kv_ids = int32(o.q_segment_ids), int32(o.kv_segment_ids)
        self.segments = None if q_ids is None or kv_ids is None else (q_ids, kv_ids)
        self.shared = tuple(
            copyable(x, ROWS)
            for x in (
                o.query,
                without_rest(o.key, o.kv_lengths),
                without_rest(o.value, o.kv_lengths),
                o.dout.astype(o.query.dtype),
            )
        )
        self.ids = None, None
        if self.segments:  # whole tiles of every kernel
            q_ids, kv_ids = self.segments
            self.ids = padded_rows(q_ids, c.block_q), padded_rows(kv_ids, KEYS)

    def pairs(self, held: int, block: int, turned: bool, copied: bool) -> tuple:
        """Bias, words and bounds of a kernel that holds keys (`turned`) or queries."""
        c, bias, mask = self.c, self.o.bias, self.o.mask
        bounds = words = own_bias = None
        if self.segments:
            rows, columns = self.segments[::-1] if turned else self.segments
            bounds = segment_bounds(rows, columns, held, block)
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

    def launch(self, kernel, name, like, programs, scratch, pairs, *operands):
        return plgpu.kernel(
            functools.partial(kernel, c=self.c, interpret=self.interpret),
            out_type=tuple(
                x if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like
            ),
            grid=(programs,),
            grid_names=("program",),
            num_threads=CONSUMERS + 1,
            thread_name="warpgroup",
            kernel_name=name,
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=plgpu.InterpretGPUParams() if self.interpret else None,
        )(
            *operands,
            *self.ids,
            *pairs,
            int32(self.o.kv_lengths),
            int32(self.o.q_offset),
        )

    def queries(self, lse2: Any, delta: Any, want_slopes: bool, apart: bool) -> tuple:
        """(dq, dS if wanted, delta if it is summed there), whole tiles of them."""
        o, c, q = self.o, self.c, self.shared[0]
        tail = o.tail if o.tail is not None and o.tail.shape[-1] else None
        slopes = None
        if want_slopes:
            assert o.bias is not None  # whose gradient they are
            shape = c.b, c.n, q.shape[1], -(-c.s // BLOCK) * BLOCK
            slopes = jax.ShapeDtypeStruct(shape, o.bias.dtype)
        *scratch, copied = queries_scratch(c, o.query.dtype, o.bias, want_slopes, apart)
        return self.launch(
            queries_kernel,
            kernel_name("attention_bwd_queries", queries=c.block_q, keys=BLOCK),
            (q, slopes, delta if apart else None),
            c.programs,
            scratch,
            self.pairs(c.block_q, BLOCK, False, copied),
            copyable(o.out, ROWS) if apart else None,
            padded_rows(tail, c.block_q) if apart and tail is not None else None,
            *self.shared,
            lse2,
            delta,
        )

    def keys(self, lse2: Any, delta: Any) -> tuple:
        """(dk, dv), whole tiles of them."""
        o, c = self.o, self.c
        _, k, v, _ = self.shared
        found = keys_plan(c.h, c.hv, pair_bytes(o.bias))
        keys, block = found["KEYS"], found["BLOCK_Q"]
        shared, in_turn = keys == ROWS, c.h + c.hv > NARROW
        programs = whole = -(-c.s // keys) * c.b * (c.n // c.group)
        if not (shared or in_turn or o.bias is not None):
            whole = whole_programs(c, programs)
        if whole < programs:
            found["STAGES"] = HALVES_STAGES
        *scratch, copied = keys_scratch(
            c, o.query.dtype, o.bias, whole < programs, **found
        )
        name = kernel_name(
            "attention_bwd_keys", keys=keys, queries=block, stages=found["STAGES"]
        )
        return self.launch(
            wide_keys_kernel
            if shared
            else functools.partial(keys_kernel, whole=whole, in_turn=in_turn),
            name,
            (k, v),
            2 * programs - whole,
            scratch,
            self.pairs(keys, block, True, copied),
            *self.shared,
            lse2 - SHIFT if shared or in_turn else lse2,
            delta,
        )
