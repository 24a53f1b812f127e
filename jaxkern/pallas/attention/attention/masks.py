"""Which columns of a block a row sees, by bounds of each row."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from jaxkern.pallas.attention.attention.pairs import BY_ROW
from jaxkern.pallas.attention.attention.wgmma import WGMMA, by_row

FAR = 2**30  # no column is as far


def of_thread(rows):
    """What a thread holds of an array with a number for each row: two numbers."""
    return [vector.extract(x, [], [0]) for x in rows.registers.ravel()]


def up_to(last, shape, interpret, beyond=False):
    """Whether the number of a column is at most `last` of its row, or is `beyond` it.

    Numbers of columns are constants here. As an array they would not change from tile
    to tile, so that the compiler would keep them, and in memory.
    """
    if interpret:
        columns = lax.broadcasted_iota(jnp.int32, shape, 1)
        last = by_row(last, shape)
        return columns > last if beyond else columns <= last

    def emit(_, last):
        i1, i32 = (ir.IntegerType.get_signless(bits) for bits in (1, 32))
        lane = arith.remui(mgpu.utils.thread_idx(), mgpu.c(4, i32))
        first = arith.muli(lane, mgpu.c(2, i32))
        halves = [arith.subi(x, first) for x in of_thread(last)]
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape(shape), object)
        order = arith.CmpIPredicate.slt if beyond else arith.CmpIPredicate.sge
        pair = ir.VectorType.get((2,), i1)
        for at in np.ndindex(registers.shape):
            half = halves[sum(at[2:])]
            seen = [
                arith.cmpi(order, half, mgpu.c(8 * at[1] + i, i32)) for i in range(2)
            ]
            registers[at] = vector.from_elements(pair, seen)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=layout, _is_signed=False
        )

    seen = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.bool_), WGMMA)
    inline: Any = plgpu.inline_mgpu(arg_types=(BY_ROW,), return_type=seen)
    return inline(emit)(last)
