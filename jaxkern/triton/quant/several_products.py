"""Products of packed rows with up to 384 activations: which kernel, and its sizes.

Up to 16 activations, and those of more digits than bfloat16 has, are multiplied with
codes as they are (several_activations.py). More take decoded weights from registers to
the matrix units of Hopper (many_activations.py), up to 64 in stages where those are
faster (staged_products.py).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import compute_capability, next_power_of_2, num_sms
from jaxkern.gpu.launch import RING_ALIGNED
from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import sparse_call
from jaxkern.primitives.quant.interleaved_tensor import ROWS as TILE
from jaxkern.triton.quant.activations import gated, in_terms, normalised
from jaxkern.triton.quant.block_codes import BYTES, STEP
from jaxkern.triton.quant.many_activations import many_activations_kernel
from jaxkern.triton.quant.several_activations import (
    bytes_of_memory,
    several_activations_kernel,
)
from jaxkern.triton.quant.staged_products import Stages, staged_sums, stages_of

HOPPER = 90
FEW = 16  # activations of which codes are multiplied
MOST = {"codes": 64, "decoded": 384}  # activations, beyond which weights are written
WARPS = 8


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a launch.

    Attributes:
      decoded: whether weights are decoded in registers, or multiplied as codes.
      columns: activations of a program.
      warps: of a program, each of which has a tile of 16 rows.
      splits: programs that share the columns of a row.
      registers: of a thread, at most.
    """

    decoded: bool
    columns: int
    warps: int
    splits: int
    registers: int | None = None


def most_activations(terms: int) -> int:
    """How many, each of so many terms, these kernels multiply on this GPU."""
    if terms == 1 and compute_capability() >= HOPPER:
        return MOST["decoded"]
    return MOST["codes"] // terms


def multiply_several(
    x: jax.Array,
    tiles: jax.Array,
    qtype: str,
    terms: int,
    norm: jax.Array | None,
    residual: jax.Array | None,
    eps: float,
    up: jax.Array | None,
    activation: str | None,
) -> jax.Array:
    """`[..., u, 16]` of x `[..., k]` and tiles `[u, bytes]`, gated `[2, u, bytes]`."""
    leading, result = x.shape[:-1], x.dtype
    rows = num_rows(x)
    if norm is not None:
        x = normalised(x, norm, eps, terms)
    x = in_terms(x.reshape(rows, -1), terms)
    flat = tiles.reshape(-1, tiles.shape[-1])
    stages = stages_of(x, flat, qtype) if terms == 1 else None
    sizes = stages or sizes_of(x, flat, terms)
    if terms == 1 and activation is None:
        y = product(x, flat, qtype, sizes, residual, result)
        return y.reshape(*leading, -1, TILE)
    y = product(x, flat, qtype, sizes).reshape(rows, terms, -1).sum(1)
    if activation is not None:
        y = gated(y, up, activation)
    if residual is not None:
        y = y + residual.reshape(y.shape).astype(jnp.float32)
    return y.astype(result).reshape(*leading, -1, TILE)


def sizes_of(x: jax.Array, tiles: jax.Array, terms: int) -> Sizes:
    """As measured: enough programs to fill the GPU, two a multiprocessor."""
    rows, steps = x.shape[0], -(-x.shape[1] // STEP)
    decoded = terms == 1 and rows > FEW and compute_capability() >= HOPPER
    columns = next_power_of_2(max(rows, 8))
    columns = min(max(columns, 32), 128) if decoded else min(columns, 32)
    programs = -(-tiles.shape[0] // WARPS) * -(-rows // columns)
    at_once = num_sms() * (1 if columns > 64 else 2)
    splits = max(1, min(steps // 2, at_once // programs))
    return Sizes(decoded, columns, WARPS, splits, 128 if columns <= 16 else None)


def product(
    x: jax.Array,
    tiles: jax.Array,
    qtype: str,
    sizes: Sizes | Stages,
    residual: jax.Array | None = None,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """`[rows, 16 u]` of bfloat16 x `[rows, k]` and tiles `[u, bytes]`."""
    if isinstance(sizes, Stages):
        y = staged_sums(x, tiles, qtype, sizes, residual, dtype)
    else:
        y = unstaged_sums(x, tiles, qtype, sizes, residual, dtype)
    if len(y) == 1:
        return y[0]
    total = y.sum(0)
    if residual is not None:
        total = total + residual.reshape(total.shape).astype(jnp.float32)
    return total.astype(dtype)


def unstaged_sums(
    x: jax.Array,
    tiles: jax.Array,
    qtype: str,
    sizes: Sizes,
    residual: jax.Array | None,
    dtype: Any,
) -> jax.Array:
    """`[splits, rows, 16 u]`, one of them in `dtype` with the residual."""
    rows, k = x.shape
    units, tile_bytes = tiles.shape
    steps = -(-k // STEP)
    each = -(-steps // sizes.splits)
    splits = -(-steps // each)
    blocks = -(-rows // sizes.columns)
    constants: dict[str, Any] = {
        "ROWS": rows,
        "K": k,
        "NUM_BLOCKS": tile_bytes // (TILE * BYTES[qtype]),
        "TILES": units,
        "TILE_PAIRS": tile_bytes // 8,
        "FORMAT": qtype,
        "BLOCKS": blocks,
        "STEPS": each,
        "num_warps": sizes.warps,
        "max_registers": sizes.registers,
    }
    if sizes.decoded:
        kernel = many_activations_kernel
        x = in_order_of_lanes(x)
        constants["COLUMNS"] = sizes.columns
    else:
        kernel = several_activations_kernel
        eights = sizes.columns // 8
        memory = bytes_of_memory(eights, qtype)
        constants["EIGHTS"] = eights
        constants["RING"] = -(-memory // RING_ALIGNED) * RING_ALIGNED
    [y] = sparse_call(
        kernel,
        (-(-units // sizes.warps) * blocks, splits),
        {
            "x_ptr": x,
            "tiles_ptr": tiles,
            "residual_ptr": residual if splits == 1 else None,
        },
        {
            "y_ptr": jax.ShapeDtypeStruct(
                (splits, rows, units * TILE), dtype if splits == 1 else jnp.float32
            )
        },
        constants,
    )
    assert y is not None
    return y


def in_order_of_lanes(x: jax.Array) -> jax.Array:
    """Of each 16 columns, the four that a lane decodes as two pairs, 8 apart."""
    rows, k = x.shape
    return x.reshape(rows, k // 16, 4, 2, 2).swapaxes(2, 3).reshape(rows, k)
