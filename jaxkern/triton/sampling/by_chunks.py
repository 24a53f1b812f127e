"""Sampling where any share of a row can be kept: every program works on every pass.

    stats    largest, smallest and total weight of each chunk, from memory
    narrow   top_p: weights above 8 pivots, which leave a ninth of the place where the
             cut can be; twice
    keep     the weight that each chunk surely keeps, and its logits in that place
    draw     the cut among the collected logits, the chunk, and the token in it

Each launch after the first reads the logits from the L2 cache.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.triton.block_sizes import next_power_of_2, tuned
from jaxkern.triton.index.threshold import (
    add_four,
    largest_threshold,
    order_within,
    ordered_bits,
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
    stats,
    token_in,
    weight_of,
)
from jaxkern.triton.triton_call import jit, sparse_call, tl

PIVOTS = 8
EDGES = 16  # the pivots with both ends, as a power of 2
NARROWINGS = 2
WINDOW = 128  # logits of a chunk near the cut that are collected


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
def entry(values, k, N: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, N) == k, values, 0.0), 0)


@jit
def guess_of_cut(above, target, EDGES: tl.constexpr):
    """How far below the top of its interval the cut is, of 1: edges are even.

    As if the weights rose or fell evenly from the middle of the interval before to that
    of the one after.
    """
    k = tl.sum((above < target).to(tl.int32), 0)
    upto = entry(above, k - 1, EDGES)
    inside = tl.maximum(entry(above, k, EDGES) - upto, 1e-30)
    before = upto - entry(above, k - 2, EDGES)
    after = entry(above, k + 1, EDGES) - upto - inside
    rise = tl.minimum(tl.maximum((after - before) / (4 * inside), -0.95), 0.95)
    share = tl.minimum(tl.maximum((target - upto) / inside, 0.0), 1.0)
    # share = x + rise * (x * x - x)
    flat = 1 - rise
    return 2 * share / (flat + tl.sqrt(flat * flat + 4 * rise * share))


@jit
def four_sums_above(x, weight, a, b, c, d):
    """The weights of the elements above each of four numbers.

    What lies within 2**-64 of the number weighs a part of itself.
    """
    return tl.reduce(
        (
            weight * is_above(x, a),
            weight * is_above(x, b),
            weight * is_above(x, c),
            weight * is_above(x, d),
        ),
        None,
        add_four,
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
def place_of_pivot(k: tl.constexpr, guess, PIVOTS: tl.constexpr):
    """Evenly first; then four close to the guess, and four in case it is wrong."""
    if guess is None:
        return (k + 1) / (PIVOTS + 1)
    elif k >= 4:
        return (k - 3) / (PIVOTS - 3)
    else:
        reach: tl.constexpr = (1 / 64 if k < 2 else 1 / 16) * (1 if k % 2 else -1)
        return tl.minimum(tl.maximum(guess + reach, 0.0), 1.0)


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
    """Weights above pivots that divide the place of top_p's cut."""
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
            bottom -= tl.maximum(tl.abs(bottom) * 1e-6, 1e-30)
            top = best
            guess = None
        else:
            above = weights_above(last_above_ptr, row, total, PARTS, N, PIVOTS, EDGES)
            target = mass_of_top_p(share, total)
            bottom, top = place_of_cut(last_edges_ptr, row, above, target, EDGES)
            guess = guess_of_cut(above, target, EDGES)
        at = part * CHUNK + tl.arange(0, CHUNK)
        x = load_logits(logits_ptr + row.to(tl.int64) * V, at, at < V)
        weight = weight_of(x, best, slope)
        above_ptr += (row.to(tl.int64) * PARTS + part) * PIVOTS
        edges_ptr += row * EDGES
        height = top - bottom
        for k in tl.static_range(0, PIVOTS, 4):
            a = top - height * place_of_pivot(k, guess, PIVOTS)
            b = top - height * place_of_pivot(k + 1, guess, PIVOTS)
            c = top - height * place_of_pivot(k + 2, guess, PIVOTS)
            d = top - height * place_of_pivot(k + 3, guess, PIVOTS)
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
            tl.store(edges_ptr, top)
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
            above = weights_above(last_above_ptr, row, total, PARTS, N, PIVOTS, EDGES)
            target = mass_of_top_p(share, total)
            bottom, top = place_of_cut(last_edges_ptr, row, above, target, EDGES)
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
            found = (above < target) & (above + tl.sum(tl.sum(weight, 1), 0) >= target)
            found = found & (tl.max(count, 0) <= WINDOW)
            if found:
                keys = ordered_bits(x)
                low = tl.min(tl.min(tl.where(near, keys, 0x7FFFFFFF), 1), 0)
                high = tl.max(tl.max(keys, 1), 0)
                rest = target - above
                at_low = tl.sum(tl.sum(weight, 1), 0)
                cut = largest_threshold(keys, weight, rest, rest, low, high, at_low)
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

    def warps(kernel: str, rule: int) -> dict:
        return tuned(kernel, v, logits.dtype, {"num_warps": rule})

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
                constants | pivots | warps("sample_narrow", 8),
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
            constants | pivots | {"WINDOW": WINDOW} | warps("sample_keep", 16),
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
        constants
        | {"WINDOW": WINDOW, "LOWEST": LOWEST}
        | warps("sample_draw_by_chunks", 16),
    )
    return token
