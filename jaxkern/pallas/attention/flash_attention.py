"""Attention of many queries on Hopper: TMA, WGMMA and specialised warpgroups.

The algorithm is FlashAttention-3 (https://arxiv.org/abs/2407.08608). A program is one
loader warpgroup and two or three consumers of 64 queries each. The loader keeps a ring
of key and value blocks full. A consumer issues S_j = q k_j^T and, behind it, the
product P_{j-1} v_{j-1}; the softmax of S_j runs while the second product and the
products of the other consumers occupy the tensor cores.

Blocks are visited from the last that is seen to the first. Blocks that causal, window,
lengths or segments hide are never loaded, and those that they show entirely are not
masked. Tiles of queries go longest first. Where a program takes several, its loader
fetches the next one while the last one is written. docs/design/attention.md has the
measurements.

What lies beyond t or s is zero when it is loaded and dropped when it is stored: that is
how the copy engine treats what is outside of an array. It moves tiles of 8 rows, so
lengths that are no multiples of 8 cost a copy that pads them.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jaxlib.mlir.dialects import llvm

from jaxkern.pallas.attention.pairs import (
    BY_COLUMN,
    BY_ROW,
    LOG2_E,
    bias_tile,
    bias_tiles,
    copied_bias,
    inside_both,
    is_set,
    mask_words,
    own,
    pair_bytes,
    whole_blocks,
    word_bounds,
)
from jaxkern.primitives.attention.attention import without_rest
from jaxkern.triton.attention.flash_attention import (
    FEW_QUERIES,
    segment_bounds,
)
from jaxkern.triton.attention.flash_attention import slower as slower_than_xla
from jaxkern.triton.block_sizes import next_power_of_2, num_sms, tuned
from jaxkern.triton.triton_call import compute_capability

ROWS = 64  # queries of a consumer: those of one WGMMA
WIDTH = 256  # head dims that registers hold of the results of 64 queries
SHORT = 8192  # keys in reach, up to which a causal tile has few blocks
CACHED_BYTES = 2**25  # of the L2 cache, for the keys and values of one section
SHARED_BYTES = 232_448 - 3072  # of a program; the rest is for barriers
LSE_BYTES = 1024
WARPGROUP = 128  # threads
FIRST_TURN = 8  # of 16 barriers, beyond those of Mosaic
FASTER = {  # than Triton or, at 512, than XLA: measured
    (64, 64),
    (96, 96),
    (128, 128),
    (192, 128),
    (256, 256),
    (512, 512),
}
WGMMA = plgpu.Layout.WGMMA


def unsupported(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    **_: Any,
) -> str | None:
    """A reason in words, or None."""
    b, t, n, h = query.shape
    s, hv = value.shape[1], value.shape[3]
    if not all(isinstance(size, int) for size in (b, t, n, h, s, hv)):
        return "a size is symbolic"
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
    return slower_than_xla(query, key)


# Sizes.


@dataclasses.dataclass(frozen=True)
class Problem:
    """What shapes and options fix.

    Attributes:
      b, t, s, n, group: sizes; `group` query heads share a key head.
      h, pieces: the head dim of queries and keys, and in how many pieces they lie.
      hv, parts: dims of the values that a program takes, and how many programs do.
      scale: of q k^T, with log2 e where no cap comes after it.
      folded: the scale is applied as late as in the exponent; nothing is added.
      softcap, causal, window: options.
      consumers: warpgroups of `ROWS` queries.
      block_k: keys of a block.
      stages: blocks of keys, and of values, in shared memory.
      overlap: the softmax does not wait for the product that was issued before it.
      turns: the consumers issue their products in turns.
      copied_bias: the bias comes through shared memory.
      out_in_query: results are staged where the queries lay, for want of space.
      staged_lse: lse is staged at all.
      team: programs that share the keys and values they load.
      programs: teams of the grid.
    """

    b: int
    t: int
    s: int
    n: int
    group: int
    h: int
    pieces: int
    hv: int
    parts: int
    scale: float
    folded: bool
    softcap: float | None
    causal: bool
    window: int | None
    consumers: int
    block_k: int
    stages: int
    overlap: bool
    turns: bool
    copied_bias: bool
    out_in_query: bool
    staged_lse: bool
    team: int
    programs: int

    @property
    def block_q(self) -> int:
        return self.consumers * ROWS

    @property
    def blocks(self) -> int:
        return -(-self.t // self.block_q)

    @property
    def tiles(self) -> int:
        """Tiles of all, or those that a team takes together as one."""
        return self.blocks * self.b * self.n * self.parts // self.team


def sizes(h: int, hv: int, reach: int, causal: bool) -> dict[str, int]:
    """By head dims, keys that a query reaches, and mask; measured sizes go over them.

    Long causal tiles are best given to the multiprocessors by the hardware. Where
    they are short, what begins and ends a tile decides: a program takes several. With
    narrow heads exponentials decide, of which three consumers keep more in flight.
    """
    width = max(h, hv)
    found = dict(CONSUMERS=2, BLOCK_K=128, STAGES=2, TEAM=1)
    if width <= 64:
        found["STAGES"] = 4
        if not causal or reach > SHORT:
            several = dict(CONSUMERS=3, OVERLAP=1, TURNS=0)
            return found | several | dict(PERSISTENT=int(not causal))
    elif width > 128:
        found["BLOCK_K"] = 64 if width <= WIDTH else 32
    if not causal:
        return found | dict(OVERLAP=1, TURNS=0, PERSISTENT=1)
    if width <= 128 and reach <= SHORT:
        return found | dict(OVERLAP=0, TURNS=0, PERSISTENT=1)
    return found | dict(OVERLAP=1, TURNS=1, PERSISTENT=0)


def memory(
    h: int,
    hv: int,
    bias_bytes: int,
    CONSUMERS: int,
    BLOCK_K: int,
    STAGES: int,
    **_: int,
) -> dict[str, bool] | None:
    """What shared memory has room for, as `Problem` names it; None if for too little.

    `bias_bytes`: of the bias of a pair, 0 where not every pair has one.
    """
    block_q, lanes = CONSUMERS * ROWS, STAGES * BLOCK_K
    pieces, parts = in_pieces(h), in_pieces(hv)
    part = hv // parts
    held = 2 * (block_q * h + lanes * (h + part))
    for copied, out_in_query in (
        (bias_bytes > 0, False),
        (bias_bytes > 0, True),
        (False, False),
        (False, True),
    ):
        used = held + copied * lanes * block_q * bias_bytes
        used += 0 if out_in_query else 2 * block_q * part
        fits = used <= SHARED_BYTES
        if fits and not (out_in_query and h // pieces != part):
            staged_lse = used + LSE_BYTES <= SHARED_BYTES
            return dict(
                copied_bias=copied,
                out_in_query=out_in_query,
                staged_lse=staged_lse,
            )
    return None


def in_pieces(dim: int) -> int:
    return -(-dim // WIDTH)


def tiled(rows: int, columns: int, *, contract_rows: bool = False) -> tuple:
    """How WGMMA wants a 16-bit matrix: tiles of 8 rows, swizzled as widely as fits."""
    for swizzle in (128, 64, 32):
        width = swizzle // 2
        if columns % width == 0 and not (contract_rows and rows % width):
            # abstract only to a type checker, as jax writes them
            tiling: Any = plgpu.TilingTransform
            swizzling: Any = plgpu.SwizzleTransform
            return tiling((8, width)), swizzling(swizzle)
    raise ValueError(f"tiled: [{rows}, {columns}] is no multiple of 16.")


# The kernel.


def place(index: Any, c: Problem, member: Any = 0) -> tuple[Any, Any, Any]:
    """(batch, head, block) of a tile: by sections of heads, the longest first.

    Where programs share the values of a head, it is `head * c.parts + part`. The
    members of a team take heads of one group.
    """
    heads = c.b * c.n * c.parts // c.team
    cached = max(1, CACHED_BYTES // (2 * c.s * (c.h + c.hv))) * c.group // c.team
    section = min(cached, heads)
    part = lax.div(index, section * c.blocks)
    within = lax.rem(index, section * c.blocks)
    present = lax.min(section, heads - part * section)
    block = lax.div(within, present)
    if c.causal:
        block = c.blocks - 1 - block
    head = (part * section + lax.rem(within, present)) * c.team + member
    return lax.div(head, c.n * c.parts), lax.rem(head, c.n * c.parts), block


def nth_tile(i: Any, program: Any, c: Problem) -> Any:
    """Index of the tile that a program takes i-th."""
    return i * c.programs + program


def position_and_length(batch, lengths_ref, offset_ref, c: Problem):
    length = c.s if lengths_ref is None else lax.min(lengths_ref[batch], c.s)
    offset = c.s - c.t if offset_ref is None else offset_ref[batch]
    return offset, length


def key_blocks(batch, block, lengths_ref, offset_ref, bounds_ref, c: Problem):
    """The blocks to visit: [first, last), of these [whole, whole_end) without a mask.

    At least one: a tile that sees nothing visits a block of which all is masked.
    """
    offset, length = position_and_length(batch, lengths_ref, offset_ref, c)
    start, stop, whole_start, whole_stop = 0, length, 0, length
    position = block * c.block_q + offset
    if c.causal:
        stop = lax.min(length, position + c.block_q)
        whole_stop = lax.min(length, position + 1)
    if c.window is not None:
        start = position - c.window + 1
        whole_start = position + c.block_q - c.window

    def blocks(row, round_up=0):
        row = lax.max(jnp.int32(0), jnp.int32(row)) + round_up * (c.block_k - 1)
        return lax.div(row, jnp.int32(c.block_k))

    first, last = blocks(start), blocks(stop, 1)
    whole, whole_end = blocks(whole_start, 1), blocks(whole_stop)
    if bounds_ref is not None:
        first = lax.max(first, bounds_ref[batch, block, 0])
        whole = lax.max(whole, bounds_ref[batch, block, 1])
        whole_end = lax.min(whole_end, bounds_ref[batch, block, 2])
        last = lax.min(last, bounds_ref[batch, block, 3])
    last = lax.max(last, jnp.int32(1))
    first = lax.min(first, last - 1)
    return first, whole, whole_end, last


def opaque(x: Any) -> Any:
    """x, but no loop holds in registers what is computed from it once and for all.

    Descriptors of wide matrices would take a hundred of them.
    """
    return lax.optimization_barrier(x)


def softmax_step(s, top, total, factor, infinite):
    """(top, total, weights, fade) with the logits `factor * s` of one more block.

    `infinite`: all logits of a row may be -inf.
    """
    higher = lax.max(top, jnp.max(s, axis=1) * factor)
    base = jnp.where(higher == -jnp.inf, 0.0, higher) if infinite else higher
    weights = jnp.exp2(s * factor - by_row(base, s.shape))
    fade = jnp.exp2(top - base)
    total = total * by_row(fade, total.shape) + by_eighth(weights)
    return higher, total, weights, fade


def by_eighth(x):
    """[rows, 8]: sums of every eighth column, of which a thread has all it needs."""
    parts = (x[:, at : at + 8] for at in range(0, x.shape[1], 8))
    return functools.reduce(lax.add, parts)


# A product that adds to what registers hold, its first matrix there too. The
# interpreter has neither, so it computes the whole of it at the end.


def set_sum(ref, x, interpret):
    if not interpret:
        ref[...] = x


def issue_sum(ref, a, b, interpret):
    if not interpret:
        plgpu.wgmma(ref, a, b)


def finished_sum(ref, x, a, b, interpret):
    if interpret:
        return x + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
    return ref[...]


def pass_turn(operation: str, consumer: Any) -> None:
    """A barrier of the hardware, of the one who gives a turn and the one who takes it.

    Nobody polls shared memory for it, and `arrive` does not wait. Mosaic itself uses
    the first barriers, one for each warpgroup and one for all.
    """

    def emit(_, barrier):
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [barrier.registers[()]],
            f"bar.{operation} $0, {2 * WARPGROUP};",
            "r",
            has_side_effects=True,
        )

    # what it decorates takes no context, which a type checker does not see
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    inline(emit)(jnp.asarray(FIRST_TURN + consumer, jnp.int32))


def by_row(x, shape):
    return lax.broadcast_in_dim(x, shape, [0])


def forward_kernel(
    q_ref,
    k_ref,
    v_ref,
    q_ids_ref,
    kv_ids_ref,
    bias_ref,
    words_ref,
    bounds_ref,
    lengths_ref,
    offset_ref,
    sinks_ref,
    out_ref,
    lse_ref,
    buffers,
    barriers,
    *,
    c: Problem,
    interpret: bool,
):
    q_smem, k_smem, v_smem, out_smem, lse_smem, bias_smem = buffers
    q_full, q_free, k_full, k_free, v_full, v_free, turn = barriers
    program = lax.axis_index("program")
    me = lax.axis_index("warpgroup")
    member = 0 if c.team == 1 else lax.axis_index("member")
    shared = None if c.team == 1 else "member"
    rounds = jnp.int32(c.tiles // c.programs)
    num_tiles = rounds + (nth_tile(rounds, program, c) < c.tiles).astype(jnp.int32)
    ranges = functools.partial(
        key_blocks,
        lengths_ref=lengths_ref,
        offset_ref=offset_ref,
        bounds_ref=bounds_ref,
        c=c,
    )

    def slot_of(at):
        return lax.rem(at, jnp.int32(c.stages))

    def place_part(i):
        """(batch, head, what is taken of its values, block) of the i-th tile."""
        batch, head, block = place(nth_tile(i, program, c), c, member)
        if c.parts == 1:
            return batch, head, (), block
        part = lax.rem(head, jnp.int32(c.parts))
        columns = pl.ds(pl.multiple_of(part * c.hv, c.hv), c.hv)
        return batch, lax.div(head, jnp.int32(c.parts)), (columns,), block

    def copy_pieces(source, target, full, **options):
        """Rows of queries or keys, piece by piece of their head dim."""
        if c.pieces == 1:
            plgpu.copy_gmem_to_smem(source, target.at[0], full, **options)
            return
        width = c.h // c.pieces
        for i in range(c.pieces):
            piece = source.at[:, pl.ds(i * width, width)]
            plgpu.copy_gmem_to_smem(piece, target.at[i], full, **options)

    def issue_scores(s_ref, slot):
        for i in range(c.pieces):
            held = q_smem.at[me if c.pieces == 1 else opaque(me), i]
            plgpu.wgmma(s_ref, held, k_smem.at[slot, i].transpose((1, 0)))

    def give_turn(w):
        if interpret:  # which does not know the barriers of the hardware
            plgpu.barrier_arrive(turn.at[w])
        else:
            pass_turn("arrive", w)

    def await_turn(w):
        if interpret:
            plgpu.barrier_wait(turn.at[w])
        else:
            pass_turn("sync", w)

    @pl.when(me == c.consumers)
    def load():
        plgpu.set_max_registers(40 if c.consumers == 2 else 32, action="decrease")

        def tile(i, at):
            batch, head, columns, block = place_part(i)
            first, _, _, last = ranges(batch, block)
            for w in range(c.consumers):
                rows = pl.ds(block * c.block_q + w * ROWS, ROWS)
                plgpu.barrier_wait(q_free.at[w])
                copy_pieces(q_ref.at[batch, rows, head], q_smem.at[w], q_full.at[w])

            def step(j, at):
                slot = slot_of(at)
                keys = pl.ds((last - 1 - j) * c.block_k, c.block_k)
                source = (batch, keys, lax.div(head, jnp.int32(c.group)))
                plgpu.barrier_wait(k_free.at[slot])
                copy_pieces(
                    k_ref.at[source],
                    k_smem.at[slot],
                    k_full.at[slot],
                    collective_axes=shared,
                )
                if bias_smem is not None:
                    for w in range(c.consumers):
                        rows = pl.ds(block * c.block_q + w * ROWS, ROWS)
                        plgpu.copy_gmem_to_smem(
                            bias_ref.at[*own(bias_ref, batch, head), rows, keys],
                            bias_smem.at[slot, w],
                            k_full.at[slot],
                        )
                plgpu.barrier_wait(v_free.at[slot])
                source = (*source, *columns)
                plgpu.copy_gmem_to_smem(
                    v_ref.at[source],
                    v_smem.at[slot],
                    v_full.at[slot],
                    collective_axes=shared,
                )
                return at + 1

            return lax.fori_loop(0, last - first, step, at)

        lax.fori_loop(0, num_tiles, tile, jnp.int32(0))
        for w in range(c.consumers):
            plgpu.barrier_wait(q_free.at[w])
        for slot in range(c.stages):
            plgpu.barrier_wait(k_free.at[slot])
            plgpu.barrier_wait(v_free.at[slot])

    @pl.when(me < c.consumers)
    def attend():
        plgpu.set_max_registers(232 if c.consumers == 2 else 160, action="increase")
        plgpu.barrier_arrive(q_free.at[me])
        for slot in range(c.stages):
            plgpu.barrier_arrive(k_free.at[slot])
            plgpu.barrier_arrive(v_free.at[slot])
        following = lax.rem(me + 1, c.consumers)
        if c.turns:

            @pl.when(me == c.consumers - 1)
            def first_turn():
                give_turn(0)

        def tile(i, at):
            batch, head, columns, block = place_part(i)
            first, whole, whole_end, last = ranges(batch, block)
            attend_tile(batch, head, columns, block, first, whole, whole_end, last, at)
            return at + (last - first)

        def attend_tile(batch, head, columns, block, first, whole, whole_end, last, at):
            count = last - first
            row = block * c.block_q + me * ROWS
            offset, length = position_and_length(batch, lengths_ref, offset_ref, c)
            ragged = lengths_ref is not None or c.s % c.block_k != 0
            ends = c.causal or ragged or bounds_ref is not None
            begins = c.window is not None or bounds_ref is not None
            staged = q_smem.at[me, 0] if c.out_in_query else out_smem.at[me]
            q_ids = None
            if q_ids_ref is not None:
                q_ids = plgpu.load(
                    q_ids_ref.at[batch, pl.ds(row, ROWS)],
                    layout=BY_ROW,
                    optimized=False,
                )

            def visible(start, shape):
                """Which of the queries see which of the keys from `start` on."""

                def iota(axis):
                    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)

                columns = iota(1)
                terms = []
                if ragged:
                    terms.append(columns < length - start)
                if c.causal or c.window is not None:
                    ahead = columns - iota(0)
                    position = row + offset - start
                    if c.causal:
                        terms.append(ahead <= position)
                    if c.window is not None:
                        terms.append(ahead > position - c.window)
                if q_ids is not None:
                    kv_ids = plgpu.load(
                        kv_ids_ref.at[batch, pl.ds(start, c.block_k)],
                        layout=BY_COLUMN,
                        optimized=False,
                    )
                    kv_ids = lax.broadcast_in_dim(kv_ids, shape, [1])
                    terms.append(by_row(q_ids, shape) == kv_ids)
                if words_ref is not None:
                    terms.append(is_set(words_ref, batch, head, row, start, shape))
                return functools.reduce(jnp.logical_and, terms)

            def logits(s, j, masked):
                if c.softcap is not None:
                    bent = jnp.exp2(s * (2 * LOG2_E * c.scale / c.softcap))
                    s = (1.0 - 2.0 / (1.0 + bent)) * (c.softcap * LOG2_E / factor)
                elif not c.folded:
                    s = s * (c.scale / factor)
                start = (last - 1 - j) * c.block_k
                slot = slot_of(at + j)
                if bias_smem is not None:
                    s = s + copied_bias(bias_smem.at[slot, me])
                    plgpu.barrier_arrive(k_free.at[slot])
                elif bias_ref is not None:
                    s = s + bias_tile(bias_ref, batch, head, row, start, s.shape)
                if masked:
                    s = jnp.where(visible(start, s.shape), s, -jnp.inf)
                return s

            factor = c.scale if c.folded else 1.0 if bias_ref is None else LOG2_E
            scores = plgpu.WGMMAAccumulatorRef((ROWS, c.block_k), jnp.float32)
            sums = plgpu.WGMMAAccumulatorRef((ROWS, c.hv), jnp.float32)

            plgpu.barrier_wait(q_full.at[me])
            slot = slot_of(at)
            plgpu.barrier_wait(k_full.at[slot])

            def first_scores(s_ref):
                issue_scores(s_ref, slot)
                return s_ref[...]

            s = pl.run_scoped(first_scores, scores)
            if bias_smem is None:
                plgpu.barrier_arrive(k_free.at[slot])
            nothing = jnp.zeros((ROWS,), jnp.float32)
            nothing = plgpu.layout_cast(nothing, BY_ROW)
            acc = jnp.zeros((ROWS, c.hv), jnp.float32)
            acc = plgpu.layout_cast(acc, WGMMA)
            masked = ends or begins
            top, total, weights, _ = softmax_step(
                logits(s, 0, masked),
                nothing - jnp.inf,
                plgpu.layout_cast(jnp.zeros((ROWS, 8), jnp.float32), WGMMA),
                factor,
                masked or bias_ref is not None,
            )
            weights = weights.astype(q_ref.dtype)
            plgpu.barrier_wait(v_full.at[slot])

            def step(j, carry, masked):
                acc, top, total, weights = carry
                slot, before = slot_of(at + j), slot_of(at + j - 1)
                v = v_smem.at[before]

                plgpu.barrier_wait(k_full.at[slot])
                if c.turns:
                    await_turn(me)

                def scoped(s_ref, acc_ref):
                    set_sum(acc_ref, acc, interpret)
                    issue_scores(s_ref, slot)
                    issue_sum(acc_ref, weights, v, interpret)
                    if c.turns:
                        give_turn(following)
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=int(c.overlap))
                    if bias_smem is None:
                        plgpu.barrier_arrive(k_free.at[slot])
                    higher, more, new, fade = softmax_step(
                        logits(s, j, masked),
                        top,
                        total,
                        factor,
                        masked or bias_ref is not None,
                    )
                    # What waits for a barrier is not moved, so it keeps the compiler
                    # from moving the softmax behind the end of the product.
                    higher, more, new, fade = lax.optimization_barrier(
                        (higher, more, new, fade)
                    )
                    plgpu.barrier_wait(v_full.at[slot])
                    summed = finished_sum(acc_ref, acc, weights, v, interpret)
                    plgpu.barrier_arrive(v_free.at[before])
                    # not before: the product in flight reads registers of the old ones
                    new = new.astype(q_ref.dtype)
                    return summed * by_row(fade, summed.shape), higher, more, new

                return pl.run_scoped(scoped, scores, sums)

            carry = acc, top, total, weights
            right = jnp.int32(1)
            if ends:
                right = lax.max(right, lax.min(last - whole_end, count))
                carry = lax.fori_loop(
                    1, right, functools.partial(step, masked=True), carry
                )
            left = count
            if begins:
                left = lax.max(right, lax.min(last - whole, count))
            carry = lax.fori_loop(
                right, left, functools.partial(step, masked=False), carry
            )
            if begins:
                carry = lax.fori_loop(
                    left, count, functools.partial(step, masked=True), carry
                )
            acc, top, total, weights = carry
            total = jnp.sum(total, axis=1)
            before = slot_of(at + count - 1)
            v = v_smem.at[before]
            if not c.out_in_query:
                plgpu.barrier_arrive(q_free.at[me])

            def last_sum(acc_ref):
                set_sum(acc_ref, acc, interpret)
                issue_sum(acc_ref, weights, v, interpret)
                return finished_sum(acc_ref, acc, weights, v, interpret)

            acc = pl.run_scoped(last_sum, sums)
            plgpu.barrier_arrive(v_free.at[before])
            if sinks_ref is not None:
                sink = sinks_ref[head].astype(jnp.float32) * LOG2_E
                higher = jnp.maximum(top, sink)
                base = jnp.where(higher == -jnp.inf, 0.0, higher)
                fade = jnp.exp2(top - base)
                total = total * fade + jnp.exp2(sink - base)
                acc = acc * by_row(fade, acc.shape)
                top = higher
            seen = total > 0
            total = jnp.where(seen, total, 1.0)
            share = 1.0 / total
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged[...] = (acc * by_row(share, acc.shape)).astype(q_ref.dtype)
            lse = top * math.log(2) + jnp.log(total)
            lse = jnp.where(seen, lse, -jnp.inf)
            lse_at = lse_ref.at[batch, head, pl.ds(row, ROWS)]
            (lse_at if lse_smem is None else lse_smem.at[me])[...] = lse
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                staged, out_ref.at[(batch, pl.ds(row, ROWS), head, *columns)]
            )
            if lse_smem is not None:
                plgpu.copy_smem_to_gmem(lse_smem.at[me], lse_at)
            if c.out_in_query:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(q_free.at[me])

        lax.fori_loop(0, num_tiles, tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
        if c.turns:

            @pl.when(me == 0)
            def last_turn():
                await_turn(0)


# Launcher.


def padded_rows(x: jax.Array, multiple: int) -> jax.Array:
    """x with zeros behind its rows, axis 1, up to a multiple."""
    short = -x.shape[1] % multiple
    return jnp.pad(x, [(0, 0), (0, short), *((0, 0),) * (x.ndim - 2)])


def copyable(x: jax.Array, block: int) -> jax.Array:
    """x as the copy engine takes it: whole tiles of 8 rows, at least one block."""
    return padded_rows(x, block if x.shape[1] < block else 8)


def int32(x: jax.Array | None) -> jax.Array | None:
    return None if x is None else x.astype(jnp.int32)


def problem(query, key, value, bias, scale, causal, window, softcap) -> Problem:
    b, t, n, h = query.shape
    _, s, heads, hv = value.shape
    parts = in_pieces(hv)
    bias_bytes = pair_bytes(bias)
    rule = sizes(h, hv, min(s, window or s), causal)
    if bias_bytes > 0:  # room for its blocks
        rule["STAGES"] = 2
    if bias_bytes > 2:
        rule["BLOCK_K"] = min(rule["BLOCK_K"], 64)
    width = next_power_of_2(max(h, hv))
    found = tuned("hopper_flash_attention", width, query.dtype, rule)
    room = memory(h, hv, bias_bytes, **found)
    assert room is not None  # `unsupported` says so
    c = Problem(
        b=b,
        t=t,
        s=s,
        n=n,
        group=n // heads,
        h=h,
        pieces=in_pieces(h),
        hv=hv // parts,
        parts=parts,
        scale=scale * (LOG2_E if softcap is None else 1.0),
        folded=softcap is None and bias is None and scale > 0,
        softcap=softcap,
        causal=causal,
        # no position is as far as 2^30, and more could overflow
        window=None if window is None else min(window, 2**30),
        consumers=found["CONSUMERS"],
        block_k=found["BLOCK_K"],
        stages=found["STAGES"],
        overlap=bool(found["OVERLAP"]),
        turns=bool(found["TURNS"]),
        **room,
        team=found["TEAM"] if parts == 1 and n // heads % found["TEAM"] == 0 else 1,
        programs=0,
    )
    at_once = num_sms() // c.team
    programs = min(c.tiles, at_once) if found["PERSISTENT"] else c.tiles
    return dataclasses.replace(c, programs=programs)


def attention_fwd(
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
    *,
    scale,
    causal,
    window,
    softcap,
    interpret=False,
):
    """(out, lse); `interpret` runs the kernel on a CPU."""
    c = problem(query, key, value, bias, scale, causal, window, softcap)
    value = without_rest(value, kv_lengths)
    q_ids, kv_ids = int32(q_segment_ids), int32(kv_segment_ids)
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
    buffers = (
        shared((c.consumers, c.pieces, ROWS, piece), transforms=tiled(ROWS, piece)),
        shared((lanes, c.pieces, c.block_k, piece), transforms=tiled(c.block_k, piece)),
        shared(
            (lanes, c.block_k, c.hv),
            transforms=tiled(c.block_k, c.hv, contract_rows=True),
        ),
        None if c.out_in_query else shared((*rows, c.hv), transforms=tiled(ROWS, c.hv)),
        plgpu.SMEM(rows, jnp.float32) if c.staged_lse else None,
        bias_tiles(bias.dtype, lanes, *rows, c.block_k) if c.copied_bias else None,
    )
    ring = plgpu.Barrier(num_barriers=c.stages)
    k_ring = plgpu.Barrier(
        num_barriers=c.stages, num_arrivals=c.pieces + c.copied_bias * c.consumers
    )
    free: Any = plgpu.Barrier(num_barriers=c.stages, num_arrivals=c.consumers)
    team: dict[str, Any] = {}
    if c.team > 1:
        team = dict(cluster=(c.team,), cluster_names=("member",))
        free = plgpu.ClusterBarrier(
            collective_axes=("member",),
            num_barriers=c.stages,
            num_arrivals=c.consumers,
        )
    each = plgpu.Barrier(num_barriers=c.consumers)
    barriers = (
        plgpu.Barrier(num_barriers=c.consumers, num_arrivals=c.pieces),  # queries
        each,  # and are not needed any more
        k_ring,  # keys
        free,
        ring,  # values
        free,
        each,  # whose turn it is
    )
    out, lse = plgpu.kernel(
        functools.partial(forward_kernel, c=c, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype),
            jax.ShapeDtypeStruct((c.b, c.n, padded_t), jnp.float32),
        ),
        grid=(c.programs,),
        grid_names=("program",),
        **team,
        num_threads=c.consumers + 1,
        thread_name="warpgroup",
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
        int32(kv_lengths),
        int32(q_offset),
        sinks,
    )
    return out[:, : c.t], jnp.moveaxis(lse[:, :, : c.t], 1, 2)
