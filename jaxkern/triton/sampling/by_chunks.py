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
from jaxkern.triton.sampling.chunk_sums import (
    EDGES,
    PIVOTS,
    bottom_of,
    four_sums_above,
)
from jaxkern.triton.sampling.guess_of_cut import narrow_kernel
from jaxkern.triton.sampling.kept_chunks import (
    WINDOW,
    draw_by_chunks_kernel,
    keep_kernel,
)
from jaxkern.triton.sampling.weights import (
    CHUNK,
    LOWEST,
    load_logits,
    slope_of,
    weight_of,
)
from jaxkern.triton.triton_call import jit, sparse_call, tl


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
            # by 4 warps `order_within` adds inside threads, of 16-bit rows too
            n | pivots | window | warps("sample_keep", 16 if top_p is None else 8),
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
