"""Experts of plain rows for one token, on Hopper and newer."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.bulk_ring import OLDEST_WITH_BULK_COPIES, ring_bytes
from jaxkern.gpu.device import WARP, compute_capability, next_power_of_2, num_sms
from jaxkern.gpu.triton_call import max_shared_bytes, sparse_call
from jaxkern.triton.quant.plain_rows import plain_hidden_kernel, plain_sum_kernel

WARPS = 16
TILE = 16  # rows of the sum that a program adds up
ON_THEIR_WAY = 98_304  # bytes of a program; two launches share a multiprocessor
MOST_COLUMNS = 2048  # of x in the registers of a warp; more spill
LATE = True  # what is behind gate and up may read ids before it waits


@dataclasses.dataclass(frozen=True)
class PlainRows:
    """How programs walk over the rows of one token's experts.

    Attributes:
      columns: of the weights.
      rows: of a matrix.
      itemsize: bytes of a weight.
      slots: of the token.
      experts: what ids are below.
      halves: 1 where gate and up are two arrays, 2 where they are one; 0 of the sum.
      warps: of a program.
      programs: of the launch.
    """

    columns: int
    rows: int
    itemsize: int
    slots: int
    experts: int
    halves: int
    warps: int
    programs: int

    @property
    def row_bytes(self) -> int:
        return self.columns * self.itemsize

    @property
    def unit(self) -> int:
        """Bytes that a lane reads at once."""
        return 16 if self.row_bytes % (16 * WARP) == 0 else 8

    @property
    def units(self) -> int:
        """Of a row that a lane reads."""
        return self.row_bytes // (WARP * self.unit)

    @property
    def step_rows(self) -> int:
        """Rows of a copy: about 4 KB of the sum."""
        if self.halves:
            return 1
        fitting = max(1, 4096 // self.row_bytes)
        return min(TILE, next_power_of_2(fitting + 1) // 2)

    @property
    def step_bytes(self) -> int:
        return self.step_rows * self.row_bytes

    @property
    def depth(self) -> int:
        """Steps of a warp that are on their way."""
        return max(2, ON_THEIR_WAY // (self.warps * self.step_bytes))

    @property
    def items(self) -> int:
        """Rows of hidden."""
        return self.slots * self.rows

    @property
    def turns(self) -> int:
        """Items of a warp."""
        return -(-self.items // (self.warps * self.programs))

    @property
    def tiles(self) -> int:
        return self.rows // TILE

    @property
    def together(self) -> int:
        """Tiles of a program."""
        return next_power_of_2(-(-self.tiles // self.programs))

    @property
    def parts(self) -> int:
        """Steps of a slot in a tile."""
        return TILE // self.step_rows

    @property
    def row_steps(self) -> int:
        """Of a tile."""
        return self.slots * self.parts

    @property
    def x_bytes(self) -> int:
        return 4 * self.slots * self.columns

    @property
    def sum_bytes(self) -> int:
        return 4 * TILE * self.slots * self.together

    @property
    def more(self) -> int:
        """Bytes beside the ring: of the sum, and a word for each lane."""
        return 0 if self.halves else self.x_bytes + self.sum_bytes + 4 * WARP

    @property
    def ring(self) -> int:
        return ring_bytes(self.warps, self.depth, self.step_bytes, self.more)


def pays(w: Any, f: int) -> bool:
    """Whether experts of f between their products are faster by rings.

    Those of bfloat16 are not, nor are bytes where f is a power of 2: the older sum has
    steps of such sizes, and leaves a quarter of its lanes empty at 768.
    """
    return w.dtype.itemsize == 1 and f != next_power_of_2(f)


def rows_of(x: Any, ids: Any, w: Any, columns: int, halves: int) -> PlainRows | None:
    """How programs walk over the experts `w` of one token; None where none does."""
    e, *_, rows, _ = w.shape
    itemsize = w.dtype.itemsize
    if compute_capability() < OLDEST_WITH_BULK_COPIES or x.dtype != jnp.bfloat16:
        return None
    if w.dtype not in (jnp.bfloat16, jnp.uint8, jnp.float8_e4m3fn):
        return None
    if math.prod(ids.shape[:-1]) != 1 or ids.shape[-1] > WARP:
        return None
    row_bytes = columns * itemsize
    if row_bytes % (8 * WARP) or columns > MOST_COLUMNS or (not halves and rows % TILE):
        return None
    found = PlainRows(
        *(columns, rows, itemsize, ids.shape[-1], e, halves),
        warps=WARPS,
        programs=num_sms(),
    )
    if halves:  # of a small matrix there are fewer rows than warps
        needed = -(-found.items // found.warps)
        found = dataclasses.replace(found, programs=min(needed, found.programs))
    if halves and found.turns > WARP:  # a lane has the scales of an item
        return None
    few_rows = not halves and found.step_rows < 2
    if few_rows or found.together > 4 or found.ring > max_shared_bytes() - 1024:
        return None
    return found


def hidden_of_one(c: PlainRows, x, ids, gate, up, scales, options):
    """`[..., k, f]`; `scales` of gate, of up, the shared expert and its scales."""
    of_gate, of_up, shared, of_shared = scales
    [y] = sparse_call(
        plain_hidden_kernel,
        (c.programs,),
        dict(
            x_ptr=x,
            ids_ptr=ids.astype(jnp.int32),
            gate_ptr=gate,
            gate_scales_ptr=of_gate,
            up_ptr=up,
            up_scales_ptr=of_up,
            shared_ptr=shared,
            shared_scales_ptr=of_shared,
        ),
        {"y_ptr": jax.ShapeDtypeStruct((*ids.shape, c.rows), x.dtype)},
        {"P": c, "RING": c.ring, "LATE": LATE, "num_warps": c.warps, **options},
    )
    return y


def sum_of_one(c: PlainRows, x, ids, weights, down, scales, residual):
    """`[..., d]`; `scales` of down, the shared expert and its scales."""
    of_down, shared, of_shared = scales
    [y] = sparse_call(
        plain_sum_kernel,
        (min(c.tiles, c.programs),),
        dict(
            x_ptr=x,
            early_ids_ptr=ids.astype(jnp.int32),
            weights_ptr=weights,
            early_down_ptr=down,
            early_scales_ptr=of_down,
            early_shared_ptr=shared,
            early_shared_scales_ptr=of_shared,
            residual_ptr=residual,
        ),
        {"y_ptr": jax.ShapeDtypeStruct((*ids.shape[:-1], c.rows), x.dtype)},
        {"P": c, "RING": c.ring, "num_warps": c.warps},
    )
    return y
