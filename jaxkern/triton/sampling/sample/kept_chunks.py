"""The weight that each part of a row keeps, the logits near the cut, and the token."""

from jaxkern.gpu.triton_call import jit, tl
from jaxkern.triton.index.threshold import ordered_bits
from jaxkern.triton.sampling.sample.chunk_sums import row_stats
from jaxkern.triton.sampling.sample.cut_in_window import cut_near_it
from jaxkern.triton.sampling.sample.guess_of_cut import (
    curve_of_row,
    window_of_cut,
)
from jaxkern.triton.sampling.sample.weights import (
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

WINDOW = 512  # logits near the cut that a program collects


@jit
def places_of(chosen, WARPS: tl.constexpr):
    """A place for each that is chosen, and their number.

    A warp has every so many rows, and the order is that of warps, lanes, rows, so that
    sums over rows stay in a thread. Four are counted at once, each in a byte of a word.
    """
    STEPS: tl.constexpr = chosen.shape[0] // WARPS // 4
    shift = (8 * tl.arange(0, 4).to(tl.uint32))[:, None, None, None]
    one = tl.reshape(chosen.to(tl.uint32), (4, STEPS, WARPS, 128))
    four = tl.sum(one << shift, 0)
    total = tl.sum(four, 0)
    before = tl.cumsum(four, 0) - four + (total * 0x01010100)[None, :, :]
    of_lane = ((total * 0x01010101) >> 24).to(tl.int32)
    of_warp = tl.sum(of_lane, 1)
    first = tl.cumsum(of_lane, 1) - of_lane
    first += (tl.cumsum(of_warp, 0) - of_warp)[:, None]
    place = ((before[None, :, :, :] >> shift) & 255).to(tl.int32) + first[None, None]
    return tl.reshape(place, chosen.shape), tl.sum(of_warp, 0)


@jit
def store_window(window_ptr, place, x, low, high, WINDOW: tl.constexpr):
    """Stores what is in (low, high] and has a place.

    Nothing moves to be stored: Triton would deal all of x out anew.
    """
    tl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .u64 at;
        setp.gt.f32 p, $3, $4; setp.le.and.f32 p, $3, $5, p;
        setp.lt.and.s32 p, $2, $6, p;
        mad.wide.s32 at, $2, 4, $1; @p st.global.f32 [at], $3; mov.b32 $0, 0; }""",
        "=r,l,r,f,f,f,r",
        [window_ptr.to(tl.int64), place, x, low, high, WINDOW],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def cut_kernel(
    logits_ptr,
    uniform_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    largest_ptr,
    total_ptr,
    bottom_ptr,
    pivots_ptr,
    zeros_ptr,
    token_ptr,
    arrived_ptr,
    kept_ptr,
    above_ptr,
    window_ptr,
    count_ptr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SLOTS: tl.constexpr,
    PIVOTS: tl.constexpr,
    EDGES: tl.constexpr,
    WINDOW: tl.constexpr,
    LOWEST: tl.constexpr,
    WARPS: tl.constexpr,
):
    """The weight that CHUNKS chunks surely keep, and their logits where top_p may cut.

    The program of a row that ends last finds the cut and draws: of each row the counter
    at arrived_ptr, the buffer of zeros_ptr, says how many have.
    """
    SIZE: tl.constexpr = CHUNK * CHUNKS
    row = tl.program_id(0) // PROGRAMS
    part = tl.program_id(0) % PROGRAMS
    row_ptr = logits_ptr + row.to(tl.int64) * V
    slope = slope_of(tl.load(temperature_ptr + row))
    at = (
        part * SIZE
        + tl.arange(0, SIZE // 128)[:, None] * 128
        + tl.arange(0, 128)[None, :]
    )
    share = 1.0
    low = -float("inf")
    high = -float("inf")
    # what is small is asked for first: all logits of a program take longer
    if top_p_ptr is not None:
        share = tl.load(top_p_ptr + row).to(tl.float32)
        curve = curve_of_row(
            largest_ptr, total_ptr, bottom_ptr, pivots_ptr, row, PARTS, N, PIVOTS, EDGES
        )
    best, totals = row_stats(largest_ptr, total_ptr, row, slope, PARTS, N)
    x = load_logits(row_ptr, at, at < V)
    total = tl.sum(totals, 0)
    if top_p_ptr is not None:
        if share < 1:
            low, high = window_of_cut(
                curve, best, share, total, slope, PIVOTS, CHUNKS, WINDOW, V
            )
    least = least_weight(min_p_ptr, row)
    out = row * PROGRAMS + part
    weight = tl.where(x > high, weight_of(x, best, slope), 0.0)
    above = tl.sum(weight)
    kept = above
    if min_p_ptr is not None:
        kept = tl.sum(tl.where(weight < least, 0.0, weight))
    tl.store(kept_ptr + out, kept)
    if top_p_ptr is not None:
        tl.store(above_ptr + out, above)
    if top_p_ptr is not None:
        if share < 1:
            near = (x > low) & (x <= high)
            place, count = places_of(near, WARPS)
            tl.store(count_ptr + out, count)
            store_window(window_ptr + out * WINDOW, place, x, low, high, WINDOW)
    tl.debug_barrier()  # all of this program is stored before it is counted
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == PROGRAMS - 1:
        token = token_of_row(
            (row_ptr, uniform_ptr, temperature_ptr),
            (kept_ptr, above_ptr, window_ptr, count_ptr),
            row,
            (best, slope, share, least, total),
            PROGRAMS,
            SLOTS,
            WINDOW,
            LOWEST,
            CHUNK,
            SIZE,
            V,
        )
        tl.store(token_ptr + row, token)


@jit
def token_of_row(
    operands,
    collected,
    row,
    known,
    PROGRAMS: tl.constexpr,
    SLOTS: tl.constexpr,
    WINDOW: tl.constexpr,
    LOWEST: tl.constexpr,
    CHUNK: tl.constexpr,
    SIZE: tl.constexpr,
    V: tl.constexpr,
):
    """The cut of top_p among the collected logits, then the part, chunk and token."""
    row_ptr, uniform_ptr, temperature_ptr = operands
    kept_ptr, above_ptr, window_ptr, count_ptr = collected
    best, slope, share, least, total = known
    part = tl.arange(0, SLOTS)
    at = row * PROGRAMS + part
    mass = tl.load(kept_ptr + at, part < PROGRAMS, 0.0)
    cut = tl.minimum(ordered_bits(best), LOWEST)
    found = best == best
    if above_ptr is not None:
        if share < 1:
            count = tl.load(count_ptr + at, part < PROGRAMS, 0)
            above = tl.sum(tl.load(above_ptr + at, part < PROGRAMS, 0.0), 0)
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
    u = uniform_of(uniform_ptr, temperature_ptr, row)
    if found:
        goal = u * tl.sum(mass, 0)
        it = first_beyond(mass, goal, SLOTS)
        goal -= tl.sum(tl.where(part < it, mass, 0.0), 0)
        token = token_in_part(
            row_ptr, it * SIZE, goal, best, slope, cut, least, SIZE, CHUNK, V
        )
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
            above_ptr is not None,
            LOWEST,
            V,
            CHUNK,
        )
    return token


@jit
def token_in_part(
    row_ptr,
    start,
    goal,
    best,
    slope,
    cut,
    least,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    V: tl.constexpr,
):
    """`token_in`, by the sums of chunks first: to scan all takes more registers."""
    if SIZE > CHUNK:
        CHUNKS: tl.constexpr = SIZE // CHUNK
        chunk = tl.arange(0, CHUNKS)
        at = start + chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        x = load_logits(row_ptr, at, at < V)
        mass = tl.sum(kept_weight(x, best, slope, cut, least), 1)
        it = first_beyond(mass, goal, CHUNKS)
        goal -= tl.sum(tl.where(chunk < it, mass, 0.0), 0)
        start += it * CHUNK
    return token_in(row_ptr, start, goal, best, slope, cut, least, CHUNK, V)


@jit
def uniform_of(uniform_ptr, temperature_ptr, row):
    """Without a temperature the first of the best: all weight is theirs."""
    u = tl.load(uniform_ptr + row).to(tl.float32)
    return tl.where(tl.load(temperature_ptr + row).to(tl.float32) > 0, u, 0.0)


@jit
def draw_kernel(
    logits_ptr,
    uniform_ptr,
    temperature_ptr,
    largest_ptr,
    total_ptr,
    token_ptr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    LOWEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The token of a row that keeps all."""
    row = tl.program_id(0)
    slope = slope_of(tl.load(temperature_ptr + row))
    best, mass = row_stats(largest_ptr, total_ptr, row, slope, PARTS, N)
    goal = uniform_of(uniform_ptr, temperature_ptr, row) * tl.sum(mass, 0)
    it = first_beyond(mass, goal, N)
    goal -= tl.sum(tl.where(tl.arange(0, N) < it, mass, 0.0), 0)
    cut = tl.minimum(ordered_bits(best), LOWEST)
    row_ptr = logits_ptr + row.to(tl.int64) * V
    token = token_in(row_ptr, it * CHUNK, goal, best, slope, cut, -1.0, CHUNK, V)
    tl.store(token_ptr + row, token)
