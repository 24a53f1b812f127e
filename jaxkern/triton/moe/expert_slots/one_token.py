"""Experts of interleaved rows for one token by whole numbers, on Hopper and newer."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import num_sms
from jaxkern.gpu.triton_call import max_shared_bytes, sparse_call
from jaxkern.triton.quant.block_codes import STEP
from jaxkern.triton.quant.fixed_point_experts import (
    fixed_point_hidden_kernel,
    fixed_point_sum_kernel,
)
from jaxkern.triton.quant.packed_products import (
    PLAIN_BYTES,
    TILE,
    TOGETHER,
    fixed_point_formats,
)
from jaxkern.triton.quant.slot_steps import SlotSteps

# warps of a program, and steps of each that are on their way
WARPS, DEPTH = 16, 3
LATE = True  # what is behind gate and up may read ids before it waits


def steps_of(x: Any, ids: Any, tiles: Any, qtype: str) -> SlotSteps | None:
    """How programs walk over the experts of one token; None where no kernel does."""
    k, one = x.shape[-1], math.prod(ids.shape[:-1]) == 1
    fits = k % STEP == 0 or qtype == "MXFP4"  # no scale of which is NaN
    if not one or not fits or qtype not in fixed_point_formats():
        return None
    experts, *halves, units, tile_bytes = tiles.shape
    p = SlotSteps(
        format=qtype,
        columns=k,
        tiles=units,
        tile_bytes=tile_bytes,
        slots=ids.shape[-1],
        experts=experts,
        halves=sum(halves),
        warps=WARPS,
        depth=DEPTH,
        programs=num_sms(),
    )
    if p.together > TOGETHER or p.ring > max_shared_bytes() - PLAIN_BYTES:
        return None
    return p


def hidden_of_one(p: SlotSteps, x, ids, gate, up, shared, gate_bias, up_bias, options):
    """`[..., k, u, 16]`, see `interleaved.py`; `options` of the gate by their names."""
    [y] = sparse_call(
        fixed_point_hidden_kernel,
        (min(p.items, p.programs),),
        dict(
            x_ptr=x,
            ids_ptr=ids.astype(jnp.int32),
            gate_ptr=gate,
            up_ptr=up,
            shared_ptr=shared,
            gate_bias_ptr=gate_bias,
            up_bias_ptr=up_bias,
        ),
        {"y_ptr": jax.ShapeDtypeStruct((*ids.shape, p.tiles, TILE), x.dtype)},
        {"P": p, "RING": p.ring, "LATE": LATE, "num_warps": p.warps, **options},
    )
    return y


def sum_of_one(p: SlotSteps, x, ids, weights, down, shared, bias, residual):
    """`[..., u, 16]`, see `interleaved.py`."""
    [y] = sparse_call(
        fixed_point_sum_kernel,
        (min(p.items, p.programs),),
        dict(
            x_ptr=x,
            early_ids_ptr=ids.astype(jnp.int32),
            weights_ptr=weights,
            early_down_ptr=down,
            early_shared_ptr=shared,
            bias_ptr=bias,
            residual_ptr=residual,
        ),
        {"y_ptr": jax.ShapeDtypeStruct((*ids.shape[:-1], p.tiles, TILE), x.dtype)},
        {"P": p, "RING": p.ring, "num_warps": p.warps},
    )
    return y
