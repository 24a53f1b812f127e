"""The weight that each chunk keeps, the logits near the cut, and the token."""

from jaxkern.triton.index.threshold import (
    from_ordered_bits,
    largest_threshold,
    ordered_bits,
)
from jaxkern.triton.sampling.chunk_sums import place_of_cut, row_stats, weights_above
from jaxkern.triton.sampling.weights import (
    draw_from_memory,
    first_beyond,
    kept_weight,
    least_weight,
    load_logits,
    mass_of_top_p,
    slope_of,
    token_in,
    weight_of,
)
from jaxkern.triton.triton_call import jit, tl

WINDOW = 128  # logits of a chunk near the cut that are collected


@jit
def order_within(chosen):
    """How many are chosen before each element of a matrix, row after row.

    A row is shorter than 256: four are counted at once, each in a byte of a word.
    """
    ROWS: tl.constexpr = chosen.shape[0]
    COLUMNS: tl.constexpr = chosen.shape[1]
    four = tl.arange(0, 4)
    shift = 8 * four[:, None, None]
    one = tl.reshape(chosen.to(tl.int32), (4, ROWS // 4, COLUMNS))
    packed = tl.sum(one << shift, 0)
    before = tl.cumsum(packed, 1) - packed
    rows = (tl.sum(packed, 1)[None, :] >> (8 * four)[:, None]) & 255
    rows = tl.reshape(rows, (ROWS,))
    rows = tl.cumsum(rows, 0) - rows
    place = tl.reshape((before[None, :, :] >> shift) & 255, (ROWS, COLUMNS))
    return place + rows[:, None]


@jit
def store_few(ptr, x, chosen):
    """A store to which nothing moves: Triton would deal all of x out anew."""
    tl.inline_asm_elementwise(
        """{ .reg .pred p; setp.ne.b32 p, $3, 0;
        @p st.global.f32 [$1], $2; mov.b32 $0, 0; }""",
        "=r,l,f,r",
        [ptr.to(tl.int64), x, chosen.to(tl.int32)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def keep_kernel(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    largest_ptr,
    total_ptr,
    edges_ptr,
    pivots_ptr,
    kept_ptr,
    above_ptr,
    window_ptr,
    count_ptr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    PIVOTS: tl.constexpr,
    EDGES: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The weight that a chunk surely keeps, and its logits where top_p may cut."""
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    slope = slope_of(tl.load(temperature_ptr + row))
    best, totals = row_stats(largest_ptr, total_ptr, row, slope, PARTS, N)
    at = (
        part * CHUNK
        + tl.arange(0, CHUNK // 128)[:, None] * 128
        + tl.arange(0, 128)[None, :]
    )
    x = load_logits(logits_ptr + row.to(tl.int64) * V, at, at < V)
    weight = weight_of(x, best, slope)
    out = row.to(tl.int64) * PARTS + part
    bottom = -float("inf")
    top = -float("inf")
    share = 1.0
    if top_p_ptr is not None:
        share = tl.load(top_p_ptr + row).to(tl.float32)
        if share < 1:
            total = tl.sum(totals, 0)
            above = weights_above(pivots_ptr, row, total, PARTS, N, PIVOTS, EDGES)
            target = mass_of_top_p(share, total)
            bottom, top = place_of_cut(edges_ptr, row, above, target, EDGES)
        weight = tl.where(x > top, weight, 0.0)
        tl.store(above_ptr + out, tl.sum(weight))
    least = least_weight(min_p_ptr, row)
    tl.store(kept_ptr + out, tl.sum(tl.where(weight < least, 0.0, weight)))
    if top_p_ptr is not None:
        if share < 1:
            near = (x > bottom) & (x <= top)
            tl.store(count_ptr + out, tl.sum(near.to(tl.int32)))
            place = order_within(near)
            window_ptr += out * WINDOW
            store_few(window_ptr + place, x, near & (place < WINDOW))


@jit
def cut_near_it(
    window_ptr,
    count,
    best,
    slope,
    least,
    above,
    total,
    target,
    WINDOW: tl.constexpr,
):
    """`cut_among` the collected logits, which mostly fill less than half their room."""
    if tl.max(count, 0) <= WINDOW // 2:
        found, cut, mass = cut_among(
            window_ptr, count, best, slope, least, above, total, target, WINDOW // 2
        )
    else:
        found, cut, mass = cut_among(
            window_ptr, count, best, slope, least, above, total, target, WINDOW
        )
    return found, cut, mass


@jit
def cut_among(
    window_ptr,
    count,
    best,
    slope,
    least,
    above,
    total,
    target,
    SLOTS: tl.constexpr,
):
    """Whether the cut is among these, the cut, and the weight of each chunk from it on.

    `above` is the weight above all of them.
    """
    slot = tl.arange(0, SLOTS)[None, :]
    near = slot < count[:, None]
    x = tl.load(window_ptr + slot, near, -float("inf"))
    weight = weight_of(x, best, slope)
    collected = tl.sum(tl.sum(weight, 1), 0)
    slack = 1e-6 * total  # sums in another order
    found = (above - slack < target) & (above + collected + slack >= target)
    longest = tl.max(count, 0)
    found = found & (longest > 0) & (longest <= SLOTS)
    keys = ordered_bits(x)
    cut = tl.max(tl.max(keys, 1), 0)
    mass = tl.zeros_like(above + count)
    if found:
        low = tl.min(tl.min(tl.where(near, keys, 0x7FFFFFFF), 1), 0)
        rest = target - above
        # another logit would weigh more than this
        lightest = 0.99 * weight_of(from_ordered_bits(low), best, slope)
        cut = largest_threshold(
            keys, weight, rest, rest + lightest, low, cut, collected
        )
        mass = tl.sum(kept_weight(x, best, slope, cut, least), 1)
    return found, cut, mass


@jit
def draw_by_chunks_kernel(
    logits_ptr,
    uniform_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    largest_ptr,
    total_ptr,
    kept_ptr,
    above_ptr,
    window_ptr,
    count_ptr,
    token_ptr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
    LOWEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Finds top_p's cut among the collected logits, then the chunk and the token."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * V
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    slope = slope_of(temperature)
    u = tl.where(temperature > 0, tl.load(uniform_ptr + row).to(tl.float32), 0.0)
    least = least_weight(min_p_ptr, row)
    best, mass = row_stats(largest_ptr, total_ptr, row, slope, PARTS, N)
    total = tl.sum(mass, 0)
    part = tl.arange(0, N)
    at = row * PARTS + part
    if kept_ptr is not None:
        mass = tl.load(kept_ptr + at, part < PARTS, 0.0)
    cut = tl.minimum(ordered_bits(best), LOWEST)
    share = 1.0
    found = best == best
    if top_p_ptr is not None:
        share = tl.load(top_p_ptr + row).to(tl.float32)
        if share < 1:
            count = tl.load(count_ptr + at, part < PARTS, 0)
            above = tl.sum(tl.load(above_ptr + at, part < PARTS, 0.0), 0)
            found, cut, near = cut_near_it(
                window_ptr + at[:, None] * WINDOW,
                count,
                best,
                slope,
                least,
                above,
                total,
                mass_of_top_p(share, total),
                WINDOW,
            )
            mass += near
    if found:
        goal = u * tl.sum(mass, 0)
        it = first_beyond(mass, goal, N)
        goal -= tl.sum(tl.where(part < it, mass, 0.0), 0)
        token = token_in(row_ptr, it * CHUNK, goal, best, slope, cut, least, CHUNK, V)
    else:
        token = draw_from_memory(
            row_ptr,
            u,
            best,
            slope,
            0.0,
            share,
            least,
            False,
            top_p_ptr is not None,
            LOWEST,
            V,
            CHUNK,
        )
    tl.store(token_ptr + row, token)
