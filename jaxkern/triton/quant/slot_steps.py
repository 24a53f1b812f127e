"""How programs walk over the experts of one token, as the constants of a launch."""

import dataclasses

from jaxkern.gpu.bulk_ring import ring_bytes
from jaxkern.gpu.device import next_power_of_2
from jaxkern.triton.quant.block_codes import STEP
from jaxkern.triton.quant.fixed_point_codes import bytes_of_step
from jaxkern.triton.quant.fixed_point_x import bytes_of_x

LANES = 32  # of a warp, each of which has four columns of x at a time, or more


@dataclasses.dataclass(frozen=True)
class SlotSteps:
    """The tiles of 16 rows of all slots, in steps of 256 columns.

    Of gate and up an item is a tile of both of one slot, so two rows of steps. Of the
    sum an item is a tile of the result, one row of the steps of all slots.

    Attributes:
      format: of the blocks.
      columns: of the weights.
      tiles: of a matrix.
      tile_bytes: of each.
      slots: of the token.
      experts: what ids are below.
      halves: 1 where gate and up are two arrays, 2 where they are one; 0 of the sum.
      warps: of a program.
      depth: steps of a warp that are on their way.
      programs: of the launch.
    """

    format: str
    columns: int
    tiles: int
    tile_bytes: int
    slots: int
    experts: int
    halves: int
    warps: int
    depth: int
    programs: int

    @property
    def steps(self) -> int:
        """Of a tile."""
        return -(-self.columns // STEP)

    @property
    def step_bytes(self) -> int:
        return bytes_of_step(self.format)

    @property
    def last_bytes(self) -> int:
        """Of the last step of a tile."""
        return self.tile_bytes - (self.steps - 1) * self.step_bytes

    @property
    def parts(self) -> int:
        """Rows of steps of an item."""
        return 2 if self.halves else 1

    @property
    def row_steps(self) -> int:
        return self.steps if self.halves else self.steps * self.slots

    @property
    def items(self) -> int:
        return self.tiles * (self.slots if self.halves else 1)

    @property
    def together(self) -> int:
        """Items of a program."""
        return next_power_of_2(-(-self.items // self.programs))

    @property
    def chunk(self) -> int:
        """Columns of x that a program takes in side by side."""
        return 4 * LANES * self.warps

    @property
    def x_columns(self) -> int:
        """What there is room for."""
        if self.halves:
            return next_power_of_2(max(self.columns, self.chunk))
        return -(-self.row_steps * STEP // self.chunk) * self.chunk

    @property
    def x_bytes(self) -> int:
        return bytes_of_x(self.x_columns, self.format)

    @property
    def sum_bytes(self) -> int:
        return self.together * self.parts * self.warps * 64

    @property
    def ring(self) -> int:
        """Bytes of shared memory that a program has for itself."""
        more = self.x_bytes + self.sum_bytes
        return ring_bytes(self.warps, self.depth, self.step_bytes, more)
