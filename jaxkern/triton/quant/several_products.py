"""Products of packed rows with two activations and more: which kernel, and its sizes.

Up to 16 activations, and those of more digits than bfloat16 has, are multiplied with
codes as they are (several_activations.py). More take decoded weights from registers to
the matrix units of Hopper (many_activations.py), up to 64 in stages where those are
faster (staged_products.py), hundreds in larger tiles (wide_activations.py), unless
writing the weights takes less (`is_read_packed`).
"""

import dataclasses
import functools
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
from jaxkern.triton.quant.column_order import is_exchanged
from jaxkern.triton.quant.four_bit_codes import is_grouped
from jaxkern.triton.quant.lane_order import in_lane_order
from jaxkern.triton.quant.many_activations import many_activations_kernel
from jaxkern.triton.quant.several_activations import (
    bytes_of_memory,
    several_activations_kernel,
)
from jaxkern.triton.quant.staged_products import Stages, staged_sums, stages_of
from jaxkern.triton.quant.wide_activations import wide_activations_kernel

HOPPER = 90
FEW = 16  # activations of which codes are multiplied
MOST_BY_CODES = 64  # activations by terms
PAIRS_OF_LANE = 2  # neighbouring columns of every 16 that a lane decodes
WARPS = 8
NARROW, WIDE = 128, 256  # activations of a tile
FLOATS = 384  # activations whose gate's sums are float32
# Microseconds, as measured on an H200: a step of 256 columns of either kernel, a
# number that several programs add up, a weight that is written, a product of XLA's
NARROW_STEP = 2.1
WIDE_STEP = {"groups": 2.95, "blocks": 3.2}  # formats of four_bit_codes.py, others
ADDED, WRITTEN, BY_XLA = 2e-6, 7.2e-7, 2.5e-9


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


def is_read_packed(rows: int, terms: int, units: int, k: int, qtype: str) -> bool:
    """Whether these kernels multiply so many activations, each of so many terms.

    Else the weights, `[16 units, k]`, are written, and XLA multiplies.
    """
    if terms > 1 or compute_capability() < HOPPER:
        return rows <= MOST_BY_CODES // terms
    if rows <= NARROW:
        return True
    written = (WRITTEN + BY_XLA * rows) * 16 * units * k
    packed = time_of_narrow(rows, units, k), time_of_wide(rows, units, k, qtype)
    return min(packed) < written


def time_of_narrow(rows: int, units: int, k: int) -> float:
    """Microseconds that many_activations.py is expected to take."""
    sizes = sizes_of(rows, k, units, 1)
    steps = -(-k // STEP)
    programs = -(-units // sizes.warps) * -(-rows // sizes.columns) * sizes.splits
    rounds = -(-programs // num_sms())
    added = ADDED * rows * 16 * units * sizes.splits if sizes.splits > 1 else 0.0
    return rounds * -(-steps // sizes.splits) * NARROW_STEP + added


def time_of_wide(rows: int, units: int, k: int, qtype: str) -> float:
    """Microseconds that wide_activations.py is expected to take."""
    items = -(-units // WARPS) * -(-rows // WIDE)
    each = WIDE_STEP["groups" if is_grouped(qtype) else "blocks"]
    return -(-items // num_sms()) * -(-k // STEP) * each


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
    units, k = flat.shape[0], x.shape[1]
    if terms == 1 and is_wide(rows, units, k, qtype):
        multiplied = wide_product
    else:
        stages = stages_of(x, flat, qtype) if terms == 1 else None
        sizes = stages or sizes_of(x.shape[0], k, units, terms)
        multiplied = functools.partial(product, sizes=sizes)
    if terms == 1 and activation is None:
        y = multiplied(x, flat, qtype, residual=residual, dtype=result)
        return y.reshape(*leading, -1, TILE)
    # a gate of very many is rounded before, as it is where XLA multiplies
    sums = jnp.float32 if rows <= FLOATS else jnp.promote_types(result, jnp.bfloat16)
    y = multiplied(x, flat, qtype, dtype=sums)
    y = y.reshape(rows, terms, -1).sum(1) if terms > 1 else y
    if activation is not None:
        y = gated(y, up, activation)
    if residual is not None:
        y = y.astype(jnp.float32) + residual.reshape(y.shape).astype(jnp.float32)
    return y.astype(result).reshape(*leading, -1, TILE)


def is_wide(rows: int, units: int, k: int, qtype: str) -> bool:
    """Whether wide_activations.py is expected to take less than many_activations.py."""
    narrow = time_of_narrow(rows, units, k)
    return rows > NARROW and time_of_wide(rows, units, k, qtype) < narrow


def sizes_of(rows: int, k: int, units: int, terms: int) -> Sizes:
    """As measured: enough programs to fill the GPU, two a multiprocessor."""
    steps = -(-k // STEP)
    decoded = terms == 1 and rows > FEW and compute_capability() >= HOPPER
    columns = next_power_of_2(max(rows, 8))
    columns = min(max(columns, 32), NARROW) if decoded else min(columns, 32)
    programs = -(-units // WARPS) * -(-rows // columns)
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
    (rows, k), units = x.shape, tiles.shape[0]
    steps = -(-k // STEP)
    each = -(-steps // sizes.splits)
    splits = -(-steps // each)
    blocks = -(-rows // sizes.columns)
    constants: dict[str, Any] = {
        **constants_of(x, tiles, qtype),
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


def constants_of(x: jax.Array, tiles: jax.Array, qtype: str) -> dict[str, Any]:
    """What each of these kernels knows of its operands."""
    (rows, k), (units, tile_bytes) = x.shape, tiles.shape
    return {
        "ROWS": rows,
        "K": k,
        "NUM_BLOCKS": tile_bytes // (TILE * BYTES[qtype]),
        "TILES": units,
        "TILE_PAIRS": tile_bytes // 8,
        "FORMAT": qtype,
    }


def wide_product(
    x: jax.Array,
    tiles: jax.Array,
    qtype: str,
    residual: jax.Array | None = None,
    dtype: Any = jnp.bfloat16,
    columns: int = WIDE,
    warps: int = WARPS,
    programs: int | None = None,
) -> jax.Array:
    """`product` of hundreds of activations, as many as tiles of WIDE need."""
    rows, units = x.shape[0], tiles.shape[0]
    blocks = -(-rows // columns)
    items = -(-units // warps) * blocks
    programs = min(items, programs or num_sms())
    [y] = sparse_call(
        wide_activations_kernel,
        (programs,),
        {
            "x_ptr": x if is_exchanged(qtype) else in_lane_order(x, PAIRS_OF_LANE),
            "tiles_ptr": tiles,
            "residual_ptr": residual,
        },
        {"y_ptr": jax.ShapeDtypeStruct((rows, units * TILE), dtype)},
        {
            **constants_of(x, tiles, qtype),
            "COLUMNS": columns,
            "BLOCKS": blocks,
            "ITEMS": items,
            "PROGRAMS": programs,
            "num_warps": warps,
        },
    )
    assert y is not None
    return y


def in_order_of_lanes(x: jax.Array) -> jax.Array:
    """Of each 16 columns, the four that a lane decodes as two pairs, 8 apart."""
    rows, k = x.shape
    return x.reshape(rows, k // 16, 4, 2, 2).swapaxes(2, 3).reshape(rows, k)
