"""Matrices as WGMMA wants them, and products that add to what registers hold."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jaxlib.mlir.dialects import vector

from jaxkern.primitives.attention.attend import TAIL_SHIFT

WGMMA = plgpu.Layout.WGMMA


def tiled(rows: int, columns: int, *, contract_rows: bool = False) -> tuple:
    """How WGMMA wants a 16-bit matrix: tiles of 8 rows, swizzled as widely as fits."""
    for swizzle in (128, 64, 32):
        width = swizzle // 2
        if columns % width == 0 and not (contract_rows and rows % width):
            return swizzled(swizzle, itemsize=2)
    raise ValueError(f"tiled: [{rows}, {columns}] is no multiple of 16.")


def swizzled(swizzle: int, itemsize: int) -> tuple:
    """Tiles of 8 rows, as wide as the swizzle in bytes."""
    # abstract only to a type checker, as jax writes them
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    return tiling((8, swizzle // itemsize)), swizzling(swizzle)


def opaque(x: Any) -> Any:
    """x, but no loop holds in registers what is computed from it once and for all.

    Descriptors of wide matrices would take a hundred of them.
    """
    return lax.optimization_barrier(x)


def by_row(x, shape):
    return lax.broadcast_in_dim(x, shape, [0])


# What rounding takes from float32, as attend.tail_of has it.


def tail_of(exact, rounded):
    shift = TAIL_SHIFT[rounded.dtype.name]
    behind = bits_of(exact) - bits_of(rounded.astype(jnp.float32))
    tail = lax.shift_right_arithmetic(behind + (1 << (shift - 1)), jnp.int32(shift))
    within = jnp.logical_and(tail >= -128, tail <= 128)
    return jnp.where(within, jnp.minimum(tail, 127), 0).astype(jnp.int8)


def with_tail(rounded, tail, dtype):
    """`rounded` is of `dtype`, but in float32."""
    unit = 1 << TAIL_SHIFT[jnp.dtype(dtype).name]
    bits = bits_of(rounded) + tail.astype(jnp.int32) * unit
    return lax.bitcast_convert_type(bits, jnp.float32)


def store_bytes(x, ref, interpret) -> None:
    """A matrix of bytes; pallas moves no fewer than four of a thread."""

    def store(_, x, ref):
        for at, position in own_pairs(x.shape):
            vector.store(x.registers[at], ref, list(position))

    if interpret:
        ref[...] = x
    else:
        # what it decorates takes no context, which a type checker does not see
        inline: Any = plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
        inline(store)(x, ref)


def load_bytes(ref, interpret):
    if interpret:
        return ref[...]

    def load(_, ref):
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape(shape), object)
        pair = ir.VectorType.get((2,), ir.IntegerType.get_signless(8))
        for at, position in own_pairs(shape):
            registers[at] = vector.load(pair, ref, list(position))
        return mgpu.FragmentedArray(
            _registers=registers, _layout=layout, _is_signed=True
        )

    shape = ref.shape
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.int8), WGMMA)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    return inline(load)(ref)


def own_pairs(shape):
    """(register, [row, column]) of each two columns that a thread holds."""
    layout = mgpu.WGMMA_LAYOUT
    registers = np.ndindex(layout.registers_shape(shape))
    return zip(registers, layout.thread_idxs(shape), strict=True)


def bits_of(x):
    return lax.bitcast_convert_type(x, jnp.int32)


# A product that adds to what registers hold, its first matrix there too. The
# interpreter has neither, so it computes the whole of it at the end.


def set_sum(ref, x, interpret):
    if not interpret:
        ref[...] = x


def issue_sum(ref, a, b, interpret):
    if not interpret:
        plgpu.wgmma(ref, a, b)


def finished_sum(ref, x, a, b, interpret):
    if interpret:
        return x + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
    return ref[...]
