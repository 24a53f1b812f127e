"""Sampling where any share of a row can be kept: every program works on every pass.

    stats    largest logit and weight of each chunk, from memory; for top_p also the
             weights above 8 pivots of its own
    narrow   top_p: from these a guess of the cut, which is wrong by 2 / 1000 of where
             it can be in a row of many logits; weights above pivots around it
    keep     the weight that each chunk surely keeps, and its logits in that place
    draw     the cut among the collected logits, the chunk, and the token in it

Each launch after the first reads the logits from the L2 cache.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.triton.block_sizes import next_power_of_2, tuned
from jaxkern.triton.index.threshold import (
    largest_threshold,
    order_within,
    ordered_bits,
    sums_of_four,
)
from jaxkern.triton.sampling.weights import (
    CHUNK,
    LOWEST,
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
from jaxkern.triton.triton_call import jit, sparse_call, tl

PIVOTS = 8
EDGES = 16  # the pivots with both ends, as a power of 2
WINDOW = 128  # logits of a chunk near the cut that are collected


@jit
def four_sums_above(x, weight, a, b, c, d):
    """The weights of the elements above each of four numbers.

    What lies within 2**-64 of the number weighs a part of itself.
    """
    return sums_of_four(
        weight * is_above(x, a),
        weight * is_above(x, b),
        weight * is_above(x, c),
        weight * is_above(x, d),
    )


@jit
def is_above(x, a):
    """1 or 0, in the units that multiply and add: twice as fast as a comparison."""
    big: tl.constexpr = 2.0**64
    return tl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, 0f5F800000, $2;",
        "=f,f,f",
        [x, -a * big],
        tl.float32,
        is_pure=True,
        pack=1,
    )


@jit
def slightly_below(x):
    return x - tl.maximum(tl.abs(x) * 1e-6, 1e-30)


@jit
def bottom_of(smallest, best, share, total, slope, SIZE: tl.constexpr):
    """All of SIZE logits below this weigh less than half of what top_p drops."""
    gap = (tl.log2(SIZE / ((1 - share) * total)) + 1) / slope
    return slightly_below(tl.maximum(smallest, best - gap))


@jit
def stats_kernel(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    largest_ptr,
    total_ptr,
    bottom_ptr,
    above_ptr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    PIVOTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Of a chunk: the largest logit, the weight; for top_p the weights above pivots.

    The pivots divide evenly what lies between the largest and the bottom.
    """
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    slope = slope_of(tl.load(temperature_ptr + row))
    at = part * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits_ptr + row.to(tl.int64) * V, at, at < V)
    largest = tl.max(x, 0)
    weight = weight_of(x, largest, slope)
    total = tl.sum(weight, 0)
    out = row.to(tl.int64) * PARTS + part
    tl.store(largest_ptr + out, largest)
    tl.store(total_ptr + out, total)
    if top_p_ptr is not None:
        share = tl.load(top_p_ptr + row).to(tl.float32)
        if share < 1:
            smallest = tl.min(tl.where(x > -float("inf"), x, float("inf")), 0)
            bottom = bottom_of(smallest, largest, share, total, slope, CHUNK)
            tl.store(bottom_ptr + out, bottom)
            step = (largest - bottom) / (PIVOTS + 1)
            above_ptr += out * PIVOTS
            for k in tl.static_range(0, PIVOTS, 4):
                a, b, c, d = four_sums_above(
                    x,
                    weight,
                    largest - (k + 1) * step,
                    largest - (k + 2) * step,
                    largest - (k + 3) * step,
                    largest - (k + 4) * step,
                )
                tl.store(above_ptr + k, a)
                tl.store(above_ptr + k + 1, b)
                tl.store(above_ptr + k + 2, c)
                tl.store(above_ptr + k + 3, d)


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
def weights_above(
    above_ptr,
    row,
    total,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    PIVOTS: tl.constexpr,
    EDGES: tl.constexpr,
):
    """The weight above each edge: the top, PIVOTS between, the bottom ever after."""
    part = tl.arange(0, N)[:, None]
    k = tl.arange(0, EDGES)[None, :]
    at = (row.to(tl.int64) * PARTS + part) * PIVOTS + k - 1
    pivot = (k > 0) & (k <= PIVOTS)
    above = tl.sum(tl.load(above_ptr + at, pivot & (part < PARTS), 0.0), 0)
    return tl.where(tl.arange(0, EDGES) > PIVOTS, total, above)


@jit
def place_of_cut(edges_ptr, row, above, target, EDGES: tl.constexpr):
    """(bottom, top] around the cut, from the weights above the edges."""
    edges = tl.load(edges_ptr + row * EDGES + tl.arange(0, EDGES))
    light = above < target
    top = tl.min(tl.where(light, edges, float("inf")), 0)
    bottom = tl.max(tl.where(light, -float("inf"), edges), 0)
    return bottom, top


@jit
def weight_at(pivots_ptr, j, total, present, PIVOTS: tl.constexpr):
    """The weight of a chunk above its largest logit, its pivots, its bottom."""
    pivot = present & (j > 0) & (j <= PIVOTS)
    return tl.where(j > PIVOTS, total, tl.load(pivots_ptr + j - 1, pivot, 0.0))


@jit
def weight_upto(place, fall, start, inside, rise):
    """The weight above a place, as if weights rose or fell evenly between pivots."""
    x = tl.minimum(tl.maximum(place * fall - start, 0.0), 1.0)
    return inside * (x + rise * (x * x - x))


@jit
def guess_of_cut(
    largest_ptr,
    total_ptr,
    bottom_ptr,
    pivots_ptr,
    row,
    best,
    height,
    slope,
    total,
    target,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    PIVOTS: tl.constexpr,
    EDGES: tl.constexpr,
):
    """How far below the best logit the cut is, of height."""
    part = tl.arange(0, N)[:, None]
    present = part < PARTS
    at = row.to(tl.int64) * PARTS + part
    largest = tl.load(largest_ptr + at, present, -float("inf"))
    bottom = tl.load(bottom_ptr + at, present, -float("inf"))
    step = (largest - bottom) / (PIVOTS + 1)
    j = tl.arange(0, EDGES)[None, :]
    of_chunk = tl.load(total_ptr + at, present, 0.0)
    pivots_ptr += at * PIVOTS
    before = weight_at(pivots_ptr, j - 1, of_chunk, present, PIVOTS)
    upto = weight_at(pivots_ptr, j, of_chunk, present, PIVOTS)
    through = weight_at(pivots_ptr, j + 1, of_chunk, present, PIVOTS)
    after = weight_at(pivots_ptr, j + 2, of_chunk, present, PIVOTS)
    inside = tl.maximum(through - upto, 0.0)
    rise = ((after - through) - (upto - before)) / (4 * tl.maximum(inside, 1e-30))
    rise = tl.minimum(tl.maximum(rise, -0.95), 0.95)
    inside *= weight_of(largest, best, slope)
    fall = height / step
    start = (best - largest) / step + j
    place = 0.0
    width = 1.0
    low = 0.0
    high = total
    for _ in tl.static_range(2):
        width /= 5
        s1, s2, s3, s4 = sums_of_four(
            weight_upto(place + width, fall, start, inside, rise),
            weight_upto(place + 2 * width, fall, start, inside, rise),
            weight_upto(place + 3 * width, fall, start, inside, rise),
            weight_upto(place + 4 * width, fall, start, inside, rise),
        )
        for s in tl.static_range(1, 5):
            upto_s = s1 if s == 1 else s2 if s == 2 else s3 if s == 3 else s4
            light = upto_s < target
            place = tl.where(light, place + width, place)
            low = tl.where(light, upto_s, low)
            high = tl.where(light, high, tl.minimum(high, upto_s))
    rest = (target - low) / tl.maximum(high - low, 1e-30)
    return place + width * tl.minimum(tl.maximum(rest, 0.0), 1.0)


@jit
def place_of_pivot(k: tl.constexpr, guess):
    """Six around the guess, and two in case it is far off."""
    if k >= 6:
        return (k - 5) / 3
    else:
        away: tl.constexpr = 1 / 1024 if k < 2 else 1 / 300 if k < 4 else 1 / 85
        moved = guess + (away if k % 2 else -away)
        return tl.minimum(tl.maximum(moved, 0.0), 1.0)


@jit
def narrow_kernel(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    largest_ptr,
    total_ptr,
    bottom_ptr,
    pivots_ptr,
    edges_ptr,
    above_ptr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    PIVOTS: tl.constexpr,
    EDGES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Weights above pivots around the cut of top_p."""
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    share = tl.load(top_p_ptr + row).to(tl.float32)
    if share < 1:
        slope = slope_of(tl.load(temperature_ptr + row))
        at = part * CHUNK + tl.arange(0, CHUNK)
        x = load_logits(logits_ptr + row.to(tl.int64) * V, at, at < V)
        best, totals = row_stats(largest_ptr, total_ptr, row, slope, PARTS, N)
        total = tl.sum(totals, 0)
        chunk = tl.arange(0, N)
        lowest = tl.load(
            bottom_ptr + row.to(tl.int64) * PARTS + chunk, chunk < PARTS, float("inf")
        )
        bottom = bottom_of(tl.min(lowest, 0), best, share, total, slope, V)
        height = best - bottom
        guess = guess_of_cut(
            largest_ptr,
            total_ptr,
            bottom_ptr,
            pivots_ptr,
            row,
            best,
            height,
            slope,
            total,
            mass_of_top_p(share, total),
            PARTS,
            N,
            PIVOTS,
            EDGES,
        )
        weight = weight_of(x, best, slope)
        above_ptr += (row.to(tl.int64) * PARTS + part) * PIVOTS
        edges_ptr += row * EDGES
        for k in tl.static_range(0, PIVOTS, 4):
            a = best - height * place_of_pivot(k, guess)
            b = best - height * place_of_pivot(k + 1, guess)
            c = best - height * place_of_pivot(k + 2, guess)
            d = best - height * place_of_pivot(k + 3, guess)
            s1, s2, s3, s4 = four_sums_above(x, weight, a, b, c, d)
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
            tl.store(edges_ptr, best)
            last = PIVOTS + 1 + tl.arange(0, EDGES)
            tl.store(edges_ptr + last, bottom, last < EDGES)


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
            tl.store(window_ptr + place, x, near & (place < WINDOW))


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
            collected = tl.sum(tl.sum(weight, 1), 0)
            slack = 1e-6 * total  # sums in another order
            found = (above - slack < target) & (above + collected + slack >= target)
            found = found & (tl.max(count, 0) <= WINDOW)
            if found:
                keys = ordered_bits(x)
                low = tl.min(tl.min(tl.where(near, keys, 0x7FFFFFFF), 1), 0)
                high = tl.max(tl.max(keys, 1), 0)
                rest = target - above
                cut = largest_threshold(keys, weight, rest, rest, low, high, collected)
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


def draw_by_chunks(draw: dict, options: dict) -> Any:
    logits, top_p, min_p = (
        draw["logits_ptr"],
        options["top_p_ptr"],
        options["min_p_ptr"],
    )
    *_, v = logits.shape
    rows, parts = logits.size // v, -(-v // CHUNK)
    n = {"V": v, "PARTS": parts, "N": next_power_of_2(parts), "CHUNK": CHUNK}
    pivots = {"PIVOTS": PIVOTS, "EDGES": EDGES}
    window = {"WINDOW": WINDOW}
    grid = (rows * parts,)

    def per_chunk(*last: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, parts, *last), dtype)

    def if_top_p(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | None:
        return None if top_p is None else shape

    def warps(kernel: str, rule: int) -> dict:
        # for top_p half as many: its sums over a chunk cost more than its reads
        rule //= 1 if top_p is None else 2
        return tuned(kernel, v, logits.dtype, {"num_warps": rule})

    given = {n: draw[n] for n in ("logits_ptr", "temperature_ptr")}
    given |= {"top_p_ptr": top_p}
    largest, total, bottom, above = sparse_call(
        stats_kernel,
        grid,
        given,
        {"largest_ptr": per_chunk(), "total_ptr": per_chunk()}
        | {"bottom_ptr": if_top_p(per_chunk())}
        | {"above_ptr": if_top_p(per_chunk(PIVOTS))},
        {"V": v, "PARTS": parts, "PIVOTS": PIVOTS, "CHUNK": CHUNK}
        | warps("sample_stats", 8),
    )
    found = {"largest_ptr": largest, "total_ptr": total}
    edges = kept = near = count = None
    if top_p is not None:
        edges, above = sparse_call(
            narrow_kernel,
            grid,
            given | found | {"bottom_ptr": bottom, "pivots_ptr": above},
            {"edges_ptr": jax.ShapeDtypeStruct((rows, EDGES), jnp.float32)}
            | {"above_ptr": per_chunk(PIVOTS)},
            n | pivots | warps("sample_narrow", 8),
        )
    if top_p is not None or min_p is not None:
        kept, above, near, count = sparse_call(
            keep_kernel,
            grid,
            given
            | {"min_p_ptr": min_p}
            | found
            | {"edges_ptr": edges, "pivots_ptr": above},
            {"kept_ptr": per_chunk(), "above_ptr": if_top_p(per_chunk())}
            | {"window_ptr": if_top_p(per_chunk(WINDOW))}
            | {"count_ptr": if_top_p(per_chunk(dtype=jnp.int32))},
            n | pivots | window | warps("sample_keep", 16),
        )
    [token] = sparse_call(
        draw_by_chunks_kernel,
        (rows,),
        draw
        | options
        | found
        | {"kept_ptr": kept, "above_ptr": above}
        | {"window_ptr": near, "count_ptr": count},
        {"token_ptr": jax.ShapeDtypeStruct((rows,), jnp.int32)},
        n | window | {"LOWEST": LOWEST} | warps("sample_draw_by_chunks", 16),
    )
    return token
