"""Sampling where any share of a row can be kept: every program works on every pass.

    stats    largest logit and weight of each chunk, from memory; for top_p also the
             weights above 8 pivots of its own
    draw     without a cut: the chunk, and the token in it
    cut      else: for top_p a window around a guess of the cut, the weight that each
             part of the row surely keeps, its logits in the window; the program of a
             row that ends last finds the cut among these, the part, and the token in it

The second launch reads the logits from the L2 cache.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import jit, sparse_call, tl
from jaxkern.triton.sampling.sample.chunk_sums import (
    CHUNKS,
    EDGES,
    PIVOTS,
    bottom_of,
    four_sums_above,
)
from jaxkern.triton.sampling.sample.kept_chunks import (
    WINDOW,
    cut_kernel,
    draw_kernel,
)
from jaxkern.triton.sampling.sample.weights import (
    CHUNK,
    LOWEST,
    load_logits,
    slope_of,
    weight_of,
)


@jit
def stats_kernel(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    largest_ptr,
    total_ptr,
    bottom_ptr,
    above_ptr,
    arrived_ptr,
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
    if arrived_ptr is not None:
        if part == 0:
            tl.store(arrived_ptr + row, 0)  # of the next launch
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
    """Maxima and sums of each chunk of a row first, then its cuts and the draw."""
    logits, top_p = draw["logits_ptr"], options["top_p_ptr"]
    *_, v = logits.shape
    rows, parts = logits.size // v, -(-v // CHUNK)
    n = next_power_of_2(parts)
    sizes = {"V": v, "PARTS": parts, "CHUNK": CHUNK}
    cuts = any(x is not None for x in options.values())
    token = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def per_part(*last: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, parts, *last), dtype)

    def if_top_p(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | None:
        return None if top_p is None else shape

    # for top_p half as many: its sums over a chunk cost more than its reads
    largest, total, bottom, above, zeros = sparse_call(
        stats_kernel,
        (rows * parts,),
        {n: draw[n] for n in ("logits_ptr", "temperature_ptr")} | {"top_p_ptr": top_p},
        {"largest_ptr": per_part(), "total_ptr": per_part()}
        | {"bottom_ptr": if_top_p(per_part())}
        | {"above_ptr": if_top_p(per_part(PIVOTS))}
        | {"arrived_ptr": token if cuts else None},
        sizes | {"PIVOTS": PIVOTS, "num_warps": 8 if top_p is None else 4},
    )
    sizes |= {"N": n, "LOWEST": LOWEST}
    found = {"largest_ptr": largest, "total_ptr": total}
    if not cuts:
        [drawn] = sparse_call(
            draw_kernel,
            (rows,),
            draw | found,
            {"token_ptr": token},
            sizes | {"num_warps": 16},
        )
        return drawn
    # a guess of the cut is dear, and many chunks share it
    chunks = 1 if top_p is None else min(CHUNKS, n)
    num_warps = 4 if top_p is None else 8 if n <= 32 else 16
    # 16 warps of 128 registers run on a multiprocessor
    launch = {"num_warps": num_warps, "max_registers": 128}
    parts = -(-parts // chunks)
    drawn, *_ = sparse_call(
        cut_kernel,
        (rows * parts,),
        draw
        | options
        | found
        | {"bottom_ptr": bottom, "pivots_ptr": above, "zeros_ptr": zeros},
        {"token_ptr": token, "arrived_ptr": token, "kept_ptr": per_part()}
        | {"above_ptr": if_top_p(per_part())}
        | {"window_ptr": if_top_p(per_part(WINDOW))}
        | {"count_ptr": if_top_p(per_part(dtype=jnp.int32))},
        sizes
        | {"CHUNKS": chunks, "PROGRAMS": parts, "SLOTS": next_power_of_2(parts)}
        | {"PIVOTS": PIVOTS, "EDGES": EDGES, "WINDOW": WINDOW}
        | {"WARPS": launch["num_warps"]}
        | launch,
        {"zeros_ptr": "arrived_ptr"},
    )
    return drawn
