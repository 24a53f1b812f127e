"""Sampling from rows of logits: the cuts are found by counting, nothing is sorted.

top_k given, or a row of at most 8192: two launches. The first writes the largest logit
of every 32. The k largest groups hold the k largest logits, so the second reads those
alone into registers and cuts and draws there.

Otherwise a row is divided in chunks, and one launch works on all of them:

    stats    largest, smallest and total weight of each chunk, from memory
    narrow   top_p: weights above 8 pivots, in the hope of a narrower place for the cut;
             twice, and once more to collect the logits in the place that is left
    keep     the weight that each chunk keeps
    draw     the cut among the collected logits, the chunk, and the token in it

Each launch after the first reads 4 bytes an element from the L2 cache. What does not
fit (many ties at the cut, k beyond 256 in a long row, a row without k beside rows with
it) is right and slow: `draw` passes over that row by itself up to 32 times.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.triton import triton_call as bridge
from jaxkern.triton.block_sizes import next_power_of_2, tuned
from jaxkern.triton.index.threshold import (
    fifth,
    four_sums,
    largest_threshold,
    narrowed,
    ordered_bits,
    pivot,
)
from jaxkern.triton.triton_call import jit, sparse_call, tl

CHUNK = 4096  # logits of one program
GROUP = 32  # logits of which the largest is written
CANDIDATES = 256  # groups in registers
WINDOW = 256  # logits of a chunk near the cut of top_p that are collected
PIVOTS = 8
NARROWINGS = 2
EDGES = 16  # PIVOTS with both ends, as a power of 2
LONGEST = 262_144
LOWEST = -2139095041  # -inf as ordered bits


def unsupported(*, logits: Any, **named: Any) -> str | None:
    if logits.shape and logits.shape[-1] > LONGEST:
        return f"a row of `logits` has {logits.shape[-1]} elements, above {LONGEST}"
    return bridge.unsupported(logits=logits, **named)


@jit
def load_logits(ptr, at, inside):
    x = tl.load(ptr + at, inside, -float("inf")).to(tl.float32)
    return tl.where(x == x, x, -float("inf"))


@jit
def slope_of(temperature):
    """What a gap to the best logit is multiplied by in the exponent of 2."""
    log2_e: tl.constexpr = 1.4426950408889634
    t = temperature.to(tl.float32)
    return tl.where(t > 0, log2_e / t, float("inf"))


@jit
def weight_of(x, best, slope):
    """p / max(p): 1 for the best logit, 0 for -inf, also if that is the best."""
    best = tl.where(best == -float("inf"), 0.0, best)
    gap = best - x
    weight = tl.where(gap < float("inf"), tl.exp2(-gap * slope), 0.0)
    return tl.where(x == best, 1.0, weight)


@jit
def mass_of_top_p(share, total):
    """The weight that top_p keeps: of one token at least."""
    return tl.maximum(share * total, 1e-30)


@jit
def kept_weight(x, best, slope, cut, least):
    """The weights that top_k and top_p keep, by their cut, and min_p."""
    weight = weight_of(x, best, slope)
    weight = tl.where(ordered_bits(x) >= cut, weight, 0.0)
    return tl.where(weight < least, 0.0, weight)


@jit
def least_weight(min_p_ptr, row):
    least = -1.0
    if min_p_ptr is not None:
        least = tl.load(min_p_ptr + row).to(tl.float32)
        least = tl.where(least > 1, 1.0, least)  # the best token stays
    return least


@jit
def stats_kernel(
    logits_ptr,
    temperature_ptr,
    largest_ptr,
    smallest_ptr,
    total_ptr,
    V: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Of every SIZE logits: the largest, the smallest above -inf, the weight."""
    row = tl.program_id(0) // PROGRAMS
    first = tl.program_id(0) % PROGRAMS * (CHUNK // SIZE)
    part = first + tl.arange(0, CHUNK // SIZE)
    at = part[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = load_logits(logits_ptr + row.to(tl.int64) * V, at, at < V)
    largest = tl.max(x, 1, keep_dims=True)
    out = row.to(tl.int64) * PARTS + part[:, None]
    present = part[:, None] < PARTS
    tl.store(largest_ptr + out, largest, present)
    if smallest_ptr is not None:
        possible = tl.where(x > -float("inf"), x, float("inf"))
        tl.store(smallest_ptr + out, tl.min(possible, 1, keep_dims=True), present)
    if total_ptr is not None:
        weight = weight_of(x, largest, slope_of(tl.load(temperature_ptr + row)))
        tl.store(total_ptr + out, tl.sum(weight, 1, keep_dims=True), present)


@jit
def row_stats(largest_ptr, total_ptr, row, slope, PARTS: tl.constexpr, N: tl.constexpr):
    """The best logit of a row, and the weight of each chunk."""
    part = tl.arange(0, N)
    at = row.to(tl.int64) * PARTS + part
    largest = tl.load(largest_ptr + at, part < PARTS, -float("inf"))
    total = tl.load(total_ptr + at, part < PARTS, 0.0)
    best = tl.max(largest, 0)
    return best, total * weight_of(largest, best, slope)


@jit
def place_of_cut(
    edges_ptr,
    above_ptr,
    row,
    target,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    PIVOTS: tl.constexpr,
    EDGES: tl.constexpr,
):
    """[bottom, top) around the cut, from the weights above the pivots between."""
    part = tl.arange(0, N)[:, None]
    k = tl.arange(0, PIVOTS)[None, :]
    at = (row.to(tl.int64) * PARTS + part) * PIVOTS + k
    above = tl.sum(tl.load(above_ptr + at, part < PARTS, 0.0), 0)
    light = tl.sum((above < target).to(tl.int32), 0)
    top = tl.load(edges_ptr + row * EDGES + light)
    bottom = tl.load(edges_ptr + row * EDGES + light + 1)
    return bottom, top


@jit
def narrow_kernel(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    largest_ptr,
    smallest_ptr,
    total_ptr,
    last_edges_ptr,
    last_above_ptr,
    edges_ptr,
    above_ptr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    PIVOTS: tl.constexpr,
    EDGES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Weights above pivots that divide the place of top_p's cut evenly."""
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    share = tl.load(top_p_ptr + row).to(tl.float32)
    if share < 1:
        slope = slope_of(tl.load(temperature_ptr + row))
        best, totals = row_stats(largest_ptr, total_ptr, row, slope, PARTS, N)
        total = tl.sum(totals, 0)
        if last_edges_ptr is None:
            # beyond this gap all V logits together weigh less than the share to drop
            gap = (tl.log2(V / ((1 - share) * total)) + 1) / slope
            chunk = tl.arange(0, N)
            at = row.to(tl.int64) * PARTS + chunk
            smallest = tl.load(smallest_ptr + at, chunk < PARTS, float("inf"))
            bottom = tl.maximum(tl.min(smallest, 0), best - gap)
            top = best + tl.maximum(tl.abs(best) * 1e-6, 1e-30)
        else:
            bottom, top = place_of_cut(
                last_edges_ptr,
                last_above_ptr,
                row,
                mass_of_top_p(share, total),
                PARTS,
                N,
                PIVOTS,
                EDGES,
            )
        at = part * CHUNK + tl.arange(0, CHUNK)
        x = load_logits(logits_ptr + row.to(tl.int64) * V, at, at < V)
        weight = weight_of(x, best, slope)
        step = (top - bottom) / (PIVOTS + 1)
        above_ptr += (row.to(tl.int64) * PARTS + part) * PIVOTS
        edges_ptr += row * EDGES
        for k in tl.static_range(0, PIVOTS, 4):
            a = top - (k + 1) * step
            b = top - (k + 2) * step
            c = top - (k + 3) * step
            d = top - (k + 4) * step
            s1, s2, s3, s4 = four_sums(x, weight, a, b, c, d)
            tl.store(above_ptr + k, s1)
            tl.store(above_ptr + k + 1, s2)
            tl.store(above_ptr + k + 2, s3)
            tl.store(above_ptr + k + 3, s4)
            if part == 0:
                tl.store(edges_ptr + k + 1, a)
                tl.store(edges_ptr + k + 2, b)
                tl.store(edges_ptr + k + 3, c)
                tl.store(edges_ptr + k + 4, d)
        if part == 0:
            tl.store(edges_ptr, top)
            tl.store(edges_ptr + PIVOTS + 1, bottom)


@jit
def keep_kernel(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    largest_ptr,
    total_ptr,
    last_edges_ptr,
    last_above_ptr,
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
    at = part * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits_ptr + row.to(tl.int64) * V, at, at < V)
    weight = weight_of(x, best, slope)
    out = row.to(tl.int64) * PARTS + part
    if top_p_ptr is not None:
        share = tl.load(top_p_ptr + row).to(tl.float32)
        if share < 1:
            bottom, top = place_of_cut(
                last_edges_ptr,
                last_above_ptr,
                row,
                mass_of_top_p(share, tl.sum(totals, 0)),
                PARTS,
                N,
                PIVOTS,
                EDGES,
            )
            near = (x >= bottom) & (x < top)
            place = tl.cumsum(near.to(tl.int32), 0) - 1
            tl.store(window_ptr + out * WINDOW + place, x, near & (place < WINDOW))
            tl.store(count_ptr + out, tl.sum(near.to(tl.int32), 0))
            weight = tl.where(x >= top, weight, 0.0)
            tl.store(above_ptr + out, tl.sum(weight, 0))
    least = least_weight(min_p_ptr, row)
    weight = tl.where(weight < least, 0.0, weight)
    tl.store(kept_ptr + out, tl.sum(weight, 0))


@jit
def row_sums(
    row_ptr,
    best,
    slope,
    a,
    b,
    c,
    d,
    COUNT: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`four_sums` over a row in memory, of ones or of weights."""
    s1 = 0.0
    s2 = 0.0
    s3 = 0.0
    s4 = 0.0
    for first in range(0, V, CHUNK):
        at = first + tl.arange(0, CHUNK)
        x = load_logits(row_ptr, at, at < V)
        weight = weight_of(x, best, slope)
        if COUNT:
            weight = (at < V).to(tl.float32)
        t1, t2, t3, t4 = four_sums(ordered_bits(x), weight, a, b, c, d)
        s1 += t1
        s2 += t2
        s3 += t3
        s4 += t4
    return s1, s2, s3, s4


@jit
def row_threshold(
    row_ptr,
    best,
    slope,
    target,
    low,
    high,
    COUNT: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`largest_threshold` over a row in memory."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while high - low > 1:
        step = fifth(low, high)
        s1, s2, s3, s4 = row_sums(
            row_ptr,
            best,
            slope,
            pivot(low, high, 1, step),
            pivot(low, high, 2, step),
            pivot(low, high, 3, step),
            pivot(low, high, 4, step),
            COUNT,
            V,
            CHUNK,
        )
        low, high = narrowed(low, high, step, target, s1, s2, s3, s4)
    return low.to(tl.int32)


@jit
def first_beyond(weight, goal, N: tl.constexpr):
    """The first entry above 0 whose cumulative sum exceeds goal, else the last."""
    i = tl.arange(0, N)
    passes = (tl.cumsum(weight, 0) > goal) & (weight > 0)
    first = tl.min(tl.where(passes, i, N), 0)
    return tl.minimum(first, tl.max(tl.where(weight > 0, i, 0), 0))


@jit
def token_in(
    row_ptr,
    start,
    goal,
    best,
    slope,
    cut,
    least,
    SIZE: tl.constexpr,
    V: tl.constexpr,
):
    """The token among SIZE at which the kept weight exceeds goal."""
    at = start + tl.arange(0, SIZE)
    x = load_logits(row_ptr, at, at < V)
    weight = kept_weight(x, best, slope, cut, least)
    return start + first_beyond(weight, goal, SIZE)


@jit
def draw_from_memory(
    row_ptr,
    u,
    best,
    slope,
    asked,
    share,
    least,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    LOWEST: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The token of a row by passes over all of it, one after the other."""
    high = ordered_bits(best) + 1
    cut = tl.minimum(high, LOWEST)
    if TOP_K:
        cut = row_threshold(row_ptr, best, slope, asked, cut, high, True, V, CHUNK)
    if TOP_P:
        if share < 1:
            total, _, _, _ = row_sums(
                row_ptr, best, slope, cut, cut, cut, cut, False, V, CHUNK
            )
            target = mass_of_top_p(share, total)
            cut = row_threshold(
                row_ptr, best, slope, target, cut, high, False, V, CHUNK
            )
    total = 0.0
    for first in range(0, V, CHUNK):
        at = first + tl.arange(0, CHUNK)
        x = load_logits(row_ptr, at, at < V)
        total += tl.sum(kept_weight(x, best, slope, cut, least), 0)
    goal = u * total
    before = 0.0
    start = 0
    rest = 0.0
    for first in range(0, V, CHUNK):
        at = first + tl.arange(0, CHUNK)
        x = load_logits(row_ptr, at, at < V)
        kept = tl.sum(kept_weight(x, best, slope, cut, least), 0)
        enters = (kept > 0) & (before <= goal)
        start = tl.where(enters, first, start)
        rest = tl.where(enters, goal - before, rest)
        before += kept
    return token_in(row_ptr, start, rest, best, slope, cut, least, CHUNK, V)


@jit
def draw_by_groups_kernel(
    logits_ptr,
    uniform_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    largest_ptr,
    token_ptr,
    list_ptr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    CANDIDATES: tl.constexpr,
    LOWEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Cuts and draws among the groups whose largest logits are the k largest."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * V
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    slope = slope_of(temperature)
    # without a temperature the first of the best: all weight is theirs
    u = tl.where(temperature > 0, tl.load(uniform_ptr + row).to(tl.float32), 0.0)
    least = least_weight(min_p_ptr, row)
    share = 1.0
    if top_p_ptr is not None:
        share = tl.load(top_p_ptr + row).to(tl.float32)
    group = tl.arange(0, N)
    largest = tl.load(largest_ptr + row * PARTS + group, group < PARTS, -float("inf"))
    best = tl.max(largest, 0)
    high = ordered_bits(best) + 1
    cut = tl.minimum(high, LOWEST)
    asked = 1.0 * V
    best_of = ordered_bits(largest)
    if top_k_ptr is not None:
        k = tl.load(top_k_ptr + row)
        asked = tl.where(k > 0, k.to(tl.float32), asked)
        one = (group < PARTS).to(tl.float32)
        cut = largest_threshold(best_of, one, asked, cut, high)
    chosen = (best_of >= cut) & (group < PARTS)
    count = tl.sum(chosen.to(tl.int32), 0)
    if count <= CANDIDATES:
        list_ptr += row * CANDIDATES
        tl.store(list_ptr + tl.cumsum(chosen.to(tl.int32), 0) - 1, group, chosen)
        tl.debug_barrier()
        slot = tl.arange(0, CANDIDATES)
        listed = tl.load(list_ptr + slot, slot < count, 0)
        at = listed[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (slot < count)[:, None] & (at < V)
        x = load_logits(row_ptr, at, inside)
        keys = ordered_bits(x)
        if top_k_ptr is not None:
            cut = largest_threshold(keys, inside.to(tl.float32), asked, cut, high)
        if top_p_ptr is not None:
            if share < 1:
                weight = tl.where(keys >= cut, weight_of(x, best, slope), 0.0)
                target = mass_of_top_p(share, tl.sum(tl.sum(weight, 1), 0))
                cut = largest_threshold(keys, weight, target, cut, high)
        kept = tl.sum(kept_weight(x, best, slope, cut, least), 1)
        goal = u * tl.sum(kept, 0)
        it = first_beyond(kept, goal, CANDIDATES)
        goal -= tl.sum(tl.where(slot < it, kept, 0.0), 0)
        start = tl.sum(tl.where(slot == it, listed, 0), 0) * GROUP
        token = token_in(row_ptr, start, goal, best, slope, cut, least, GROUP, V)
    else:
        token = draw_from_memory(
            row_ptr,
            u,
            best,
            slope,
            asked,
            share,
            least,
            top_k_ptr is not None,
            top_p_ptr is not None,
            LOWEST,
            V,
            CHUNK,
        )
    tl.store(token_ptr + row, token)


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
            slot = tl.arange(0, WINDOW)[None, :]
            near = slot < count[:, None]
            x = tl.load(window_ptr + at[:, None] * WINDOW + slot, near, -float("inf"))
            weight = weight_of(x, best, slope)
            above = tl.sum(tl.load(above_ptr + at, part < PARTS, 0.0), 0)
            target = mass_of_top_p(share, total)
            found = (above < target) & (above + tl.sum(tl.sum(weight, 1), 0) >= target)
            found = found & (tl.max(count, 0) <= WINDOW)
            if found:
                keys = ordered_bits(x)
                low = tl.min(tl.min(tl.where(near, keys, 0x7FFFFFFF), 1), 0)
                high = tl.max(tl.max(keys, 1), 0) + 1
                cut = largest_threshold(keys, weight, target - above, low, high)
                mass += tl.sum(kept_weight(x, best, slope, cut, least), 1)
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


def stats(
    logits: jax.Array, temperature: jax.Array, size: int, *names: str
) -> dict[str, jax.Array]:
    """The named statistics of every `size` logits: float32, rows by parts."""
    *_, v = logits.shape
    rows, parts = logits.size // v, -(-v // size)
    one = jax.ShapeDtypeStruct((rows, parts), jnp.float32)
    wanted = ("largest_ptr", "smallest_ptr", "total_ptr")
    programs = -(-v // CHUNK)
    out = sparse_call(
        stats_kernel,
        (rows * programs,),
        {"logits_ptr": logits, "temperature_ptr": temperature},
        {n: one if n in names else None for n in wanted},
        {"V": v, "PROGRAMS": programs, "PARTS": parts, "SIZE": size, "CHUNK": CHUNK}
        | tuned("sample_stats", v, logits.dtype, {"num_warps": 8}),
    )
    return {n: x for n, x in zip(wanted, out, strict=True) if x is not None}


def draw_by_groups(draw: dict, options: dict) -> jax.Array:
    logits, temperature = draw["logits_ptr"], draw["temperature_ptr"]
    *_, v = logits.shape
    rows, groups = logits.size // v, -(-v // GROUP)
    sizes = {"GROUP": GROUP, "CANDIDATES": CANDIDATES, "CHUNK": CHUNK}
    token, _ = sparse_call(
        draw_by_groups_kernel,
        (rows,),
        draw | options | stats(logits, temperature, GROUP, "largest_ptr"),
        {
            "token_ptr": jax.ShapeDtypeStruct((rows,), jnp.int32),
            "list_ptr": jax.ShapeDtypeStruct((rows, CANDIDATES), jnp.int32),
        },
        {"V": v, "PARTS": groups, "N": next_power_of_2(groups), "LOWEST": LOWEST}
        | sizes
        | tuned("sample_draw_by_groups", v, logits.dtype, {"num_warps": 16}),
    )
    return token


def draw_by_chunks(draw: dict, options: dict) -> jax.Array:
    logits, top_p, min_p = (
        draw["logits_ptr"],
        options["top_p_ptr"],
        options["min_p_ptr"],
    )
    *_, v = logits.shape
    rows, parts = logits.size // v, -(-v // CHUNK)
    warps = tuned("sample_chunks", v, logits.dtype, {"num_warps": 8})
    draw_warps = tuned("sample_draw_by_chunks", v, logits.dtype, {"num_warps": 16})
    constants = {"V": v, "PARTS": parts, "N": next_power_of_2(parts), "CHUNK": CHUNK}
    grid = (rows * parts,)

    def per_chunk(*last: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, parts, *last), dtype)

    names = ["largest_ptr", "total_ptr"] + ["smallest_ptr"] * (top_p is not None)
    found = stats(logits, draw["temperature_ptr"], CHUNK, *names)
    smallest = found.pop("smallest_ptr", None)
    given = {n: draw[n] for n in ("logits_ptr", "temperature_ptr")}
    edges = above = kept = window = count = None
    pivots = {"PIVOTS": PIVOTS, "EDGES": EDGES}
    if top_p is not None:
        for _ in range(NARROWINGS):
            last = {"last_edges_ptr": edges, "last_above_ptr": above}
            edges, above = sparse_call(
                narrow_kernel,
                grid,
                given
                | {"top_p_ptr": top_p, "largest_ptr": found["largest_ptr"]}
                | {"smallest_ptr": smallest, "total_ptr": found["total_ptr"]}
                | last,
                {
                    "edges_ptr": jax.ShapeDtypeStruct((rows, EDGES), jnp.float32),
                    "above_ptr": per_chunk(PIVOTS),
                },
                constants | pivots | warps,
            )
    if top_p is not None or min_p is not None:
        near = None if top_p is None else per_chunk(WINDOW)
        kept, above, window, count = sparse_call(
            keep_kernel,
            grid,
            given
            | options
            | found
            | {"last_edges_ptr": edges, "last_above_ptr": above},
            {
                "kept_ptr": per_chunk(),
                "above_ptr": None if top_p is None else per_chunk(),
                "window_ptr": near,
                "count_ptr": None if top_p is None else per_chunk(dtype=jnp.int32),
            },
            constants | pivots | {"WINDOW": WINDOW} | warps,
        )
    [token] = sparse_call(
        draw_by_chunks_kernel,
        (rows,),
        draw
        | options
        | found
        | {"kept_ptr": kept, "above_ptr": above}
        | {"window_ptr": window, "count_ptr": count},
        {"token_ptr": jax.ShapeDtypeStruct((rows,), jnp.int32)},
        constants | {"WINDOW": WINDOW, "LOWEST": LOWEST} | draw_warps,
    )
    return token


def sample(
    logits: jax.Array,
    uniform: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array | None,
    top_p: jax.Array | None,
    min_p: jax.Array | None,
) -> jax.Array:
    if logits.size == 0:
        return jnp.zeros(uniform.shape, jnp.int32)
    draw = {
        "logits_ptr": logits,
        "uniform_ptr": uniform,
        "temperature_ptr": temperature,
    }
    cuts = {"top_p_ptr": top_p, "min_p_ptr": min_p}
    if top_k is not None or logits.shape[-1] <= GROUP * CANDIDATES:
        token = draw_by_groups(draw, {"top_k_ptr": top_k} | cuts)
    else:
        token = draw_by_chunks(draw, cuts)
    return token.reshape(uniform.shape)
