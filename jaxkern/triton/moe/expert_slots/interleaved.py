"""Experts of interleaved rows: of a few tokens by packed_experts.py, of more sorted."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import sparse_call
from jaxkern.triton.moe.expert_slots.one_token import (
    hidden_of_one,
    steps_of,
    sum_of_one,
)
from jaxkern.triton.moe.few_slots import are_many, refusal
from jaxkern.triton.moe.grouped_slots import (
    Packed,
    grouped_hidden,
    grouped_sum,
    refusal_of_many,
)
from jaxkern.triton.quant.block_codes import BYTES, STEP
from jaxkern.triton.quant.packed_experts import (
    packed_hidden_kernel,
    packed_sum_kernel,
)
from jaxkern.triton.quant.packed_products import TILE

SHARES = 4  # warps of gate, and as many of up
OF_SUM = 8, 16  # warps of a result, where they have few steps and where many


def unsupported_hidden(
    x, ids, gate_tiles, up_tiles, shared_tiles, gate_bias, up_bias, *, qtype, **options
) -> str | None:
    del options
    named = dict(gate_tiles=gate_tiles, up_tiles=up_tiles)
    biases = dict(gate_bias=gate_bias, up_bias=up_bias)
    return refusal_of_tiles(x, ids, shared_tiles, qtype, **named, **biases)


def unsupported_sum(
    x, ids, weights, down_tiles, shared_tiles, down_bias, residual, *, qtype
) -> str | None:
    named = dict(weights=weights, down_tiles=down_tiles)
    more = dict(down_bias=down_bias, residual=residual)
    return refusal_of_tiles(x, ids, shared_tiles, qtype, **named, **more)


def refusal_of_tiles(x: Any, ids: Any, shared: Any, qtype: str, **named: Any):
    """Why no kernel runs, or None."""
    if qtype not in BYTES:
        return f"{qtype} has no kernel, only {', '.join(BYTES)}"
    if are_many(ids):
        return refusal_of_many(x, ids, shared, **named)
    return refusal(x, ids, shared_tiles=shared, **named)


def sizes_of(x: jax.Array, ids: jax.Array, tiles: jax.Array, qtype: str) -> dict:
    experts, *_, units, tile_bytes = tiles.shape
    return {
        "K": x.shape[-1],
        "NUM_BLOCKS": tile_bytes // (TILE * BYTES[qtype]),
        "TILES": units,
        "TILE_PAIRS": tile_bytes // 8,
        "FORMAT": qtype,
        "TOP_K": ids.shape[-1],
        "EXPERTS": experts,
    }


def interleaved_expert_hidden(
    x,
    ids,
    gate_tiles,
    up_tiles,
    shared_tiles,
    gate_bias,
    up_bias,
    *,
    qtype,
    alpha,
    limit,
    up_offset,
):
    """`[..., k, u, 16]` of x `[..., d]`, ids `[..., k]` and tiles `[e, 1, u, bytes]`.

    Or `[e, 2, u, bytes]`, which have those of up too.
    """
    if are_many(ids):
        up = up_tiles
        if up is not None:
            up = Packed.of_tiles(up, qtype, x.shape[-1])
        y = grouped_hidden(
            *(x, ids, Packed.of_tiles(gate_tiles, qtype, x.shape[-1]), up),
            *(gate_bias, up_bias),
            **dict(alpha=alpha, limit=limit, up_offset=up_offset),
        )
        return y.reshape(*ids.shape, -1, TILE)
    activation = {"ALPHA": alpha, "LIMIT": limit, "UP_OFFSET": up_offset}
    if p := steps_of(x, ids, gate_tiles, qtype):
        weights = gate_tiles, up_tiles, shared_tiles, gate_bias, up_bias
        return hidden_of_one(p, x, ids, *weights, activation)
    sizes, units = sizes_of(x, ids, gate_tiles, qtype), gate_tiles.shape[2]
    shares = min(SHARES, next_power_of_2(-(-x.shape[-1] // STEP)))
    [y] = sparse_call(
        packed_hidden_kernel,
        (units, ids.size),
        {
            "x_ptr": x,
            "ids_ptr": ids.astype(jnp.int32),
            "gate_ptr": gate_tiles,
            "up_ptr": up_tiles,
            "shared_ptr": shared_tiles,
            "gate_bias_ptr": gate_bias,
            "up_bias_ptr": up_bias,
        },
        {"y_ptr": jax.ShapeDtypeStruct((*ids.shape, units, TILE), x.dtype)},
        sizes
        | activation
        | {"HALVES": gate_tiles.shape[1], "SHARES": shares, "num_warps": 2 * shares},
    )
    return y


def interleaved_expert_sum(
    x, ids, weights, down_tiles, shared_tiles, down_bias, residual, *, qtype
):
    """`[..., u, 16]` of x `[..., k, d]`, ids and weights `[..., k]`."""
    if are_many(ids):
        down = Packed.of_tiles(down_tiles, qtype, x.shape[-1])
        y = grouped_sum(x, ids, weights, down, down_bias, residual)
        return y.reshape(*ids.shape[:-1], -1, TILE)
    if p := steps_of(x, ids, down_tiles, qtype):
        rest = down_tiles, shared_tiles, down_bias, residual
        return sum_of_one(p, x, ids, weights, *rest)
    sizes, units = sizes_of(x, ids, down_tiles, qtype), down_tiles.shape[1]
    steps = ids.shape[-1] * -(-x.shape[-1] // STEP)
    few, many = OF_SUM
    shares = min(few if steps <= 4 * few else many, next_power_of_2(steps))
    lead = ids.shape[:-1]
    [y] = sparse_call(
        packed_sum_kernel,
        (units, math.prod(lead)),
        {
            "x_ptr": x,
            "ids_ptr": ids.astype(jnp.int32),
            "weights_ptr": weights,
            "down_ptr": down_tiles,
            "shared_ptr": shared_tiles,
            "bias_ptr": down_bias,
            "residual_ptr": residual,
        },
        {"y_ptr": jax.ShapeDtypeStruct((*lead, units, TILE), x.dtype)},
        sizes | {"SHARES": shares, "num_warps": shares},
    )
    return y
