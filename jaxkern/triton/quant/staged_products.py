"""Products of packed rows with up to 64 activations in stages: sizes, and the launch.

For Hopper (staged_activations.py).
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import compute_capability, num_sms
from jaxkern.gpu.launch import RING_ALIGNED
from jaxkern.gpu.triton_call import max_shared_bytes, sparse_call
from jaxkern.primitives.quant.interleaved_tensor import ROWS as TILE
from jaxkern.triton.quant.block_codes import STEP
from jaxkern.triton.quant.fixed_point_codes import bytes_of_step
from jaxkern.triton.quant.shared_codes import has_shared_words
from jaxkern.triton.quant.staged_activations import (
    bytes_of_memory,
    staged_activations_kernel,
)
from jaxkern.triton.quant.warpgroup_products import has_short_scales

HOPPER = 90
WARPS = 16  # of a program, one a multiprocessor
FEWEST = {"short": 9, "long": 33}  # activations, by scales; fewer are faster as codes
MOST = 64  # activations
# in steps of all warps, about 0.8 us: what a program takes beside them, a second launch
BESIDE, SUMMING = 4, 3
FULL = 0.8  # of the multiprocessors that have a program
PLAIN_BYTES = 2048  # of shared memory that the compiler and the driver may want


@dataclasses.dataclass(frozen=True)
class Stages:
    """Of a launch.

    Attributes:
      columns: activations of a program, a multiple of 8.
      groups: of its warps, each of which takes steps of its own.
      splits: programs that share the columns of a row.
      x_steps: of activations that have memory, in each group.
      w_steps: of weights that have memory, in each warp.
      warps: of a program, four or more of each group.
    """

    columns: int
    groups: int
    splits: int
    x_steps: int
    w_steps: int
    warps: int = WARPS


def stages_of(x: jax.Array, tiles: jax.Array, qtype: str) -> Stages | None:
    """As measured; None where other kernels are faster, or there is too little memory.

    Formats with short scales are decoded in the fewest instructions. Of others this was
    timed where one group of warps has enough rows for every multiprocessor.
    """
    rows, k = x.shape
    if compute_capability() < HOPPER or not has_shared_words(qtype) or k % STEP:
        return None
    short = has_short_scales(qtype)
    if not FEWEST["short" if short else "long"] <= rows <= MOST:
        return None
    units, steps = tiles.shape[0], k // STEP
    if tiles.shape[-1] != steps * bytes_of_step(qtype):
        return None
    if not short and -(-units // WARPS) < FULL * num_sms():
        return None
    columns = -(-rows // 8) * 8
    found = [
        (estimate(units, steps, groups, splits), -groups, stages)
        for groups, splits in ways(units, steps, short)
        if (stages := deepest(columns, groups, splits, qtype)) is not None
    ]
    return min(found, key=lambda way: way[:2])[2] if found else None


def ways(units: int, steps: int, short: bool) -> Iterator[tuple[int, int]]:
    """Groups and splits that divide the steps, and fit the GPU at once."""
    for groups in (4, 2, 1) if short else (1,):
        programs = -(-units * groups // WARPS)
        for splits in (1, 2, 4, 8):
            alone = splits == 1
            if steps % (groups * splits) == 0 and (
                alone or programs * splits <= num_sms()
            ):
                yield groups, splits


def estimate(units: int, steps: int, groups: int, splits: int) -> int:
    """Time, in steps of all warps of a program."""
    programs = -(-units * groups // WARPS) * splits
    rounds = -(-programs // num_sms())
    each = steps // (groups * splits) + BESIDE
    return rounds * each + (SUMMING if splits > 1 else 0)


def deepest(columns: int, groups: int, splits: int, qtype: str) -> Stages | None:
    """With as much on its way as there is memory for."""
    depths = ((2, 3), (2, 2)) if groups > 1 else ((4, 3), (4, 2), (3, 2))
    for x_steps, w_steps in depths:
        stages = Stages(columns, groups, splits, x_steps, w_steps)
        if memory_of(stages, qtype) <= max_shared_bytes() - PLAIN_BYTES:
            return stages
    return None


def memory_of(stages: Stages, qtype: str) -> int:
    """Bytes of shared memory that a program has for itself."""
    total = bytes_of_memory(
        qtype,
        stages.columns,
        stages.warps,
        stages.groups,
        stages.x_steps,
        stages.w_steps,
    )
    return -(-total // RING_ALIGNED) * RING_ALIGNED


def in_order_of_steps(x: jax.Array, columns: int) -> jax.Array:
    """`[blocks, k / 8, columns, 8]` of x `[rows, k]`, zeros where there are no rows.

    Of each 16 columns a lane's four are two pairs, in the first and the last eight.
    """
    rows, k = x.shape
    blocks = -(-rows // columns)
    x = jnp.pad(x, ((0, blocks * columns - rows), (0, 0)))
    x = x.reshape(blocks, columns, k // 16, 4, 2, 2).transpose(0, 2, 4, 1, 3, 5)
    return x.reshape(blocks, k // 8, columns, 8)


def staged_sums(
    x: jax.Array,
    tiles: jax.Array,
    qtype: str,
    stages: Stages,
    residual: jax.Array | None = None,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """`[splits, rows, 16 u]` of bfloat16 x `[rows, k]` and tiles `[u, bytes]`.

    One split is the product in `dtype`, with the residual; several are sums in float32.
    """
    rows, k = x.shape
    units, splits = tiles.shape[0], stages.splits
    x = in_order_of_steps(x, stages.columns)
    width = stages.warps // stages.groups
    alone = splits == 1
    [y] = sparse_call(
        staged_activations_kernel,
        (-(-units // width) * x.shape[0], splits),
        {
            "x_ptr": x,
            "tiles_ptr": tiles,
            "residual_ptr": residual if alone else None,
        },
        {
            "y_ptr": jax.ShapeDtypeStruct(
                (splits, rows, units * TILE), dtype if alone else jnp.float32
            )
        },
        {
            "ROWS": rows,
            "K": k,
            "TILES": units,
            "FORMAT": qtype,
            "COLUMNS": stages.columns,
            "BLOCKS": x.shape[0],
            "STEPS": k // STEP // splits,
            "GROUPS": stages.groups,
            "X_DEPTH": stages.x_steps,
            "W_DEPTH": stages.w_steps,
            "RING": memory_of(stages, qtype),
            "num_warps": stages.warps,
        },
    )
    assert y is not None
    return y
