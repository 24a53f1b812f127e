"""Matrices as WGMMA wants them, and products that add to what registers hold."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

WGMMA = plgpu.Layout.WGMMA


def tiled(rows: int, columns: int, *, contract_rows: bool = False) -> tuple:
    """How WGMMA wants a 16-bit matrix: tiles of 8 rows, swizzled as widely as fits."""
    for swizzle in (128, 64, 32):
        width = swizzle // 2
        if columns % width == 0 and not (contract_rows and rows % width):
            # abstract only to a type checker, as jax writes them
            tiling: Any = plgpu.TilingTransform
            swizzling: Any = plgpu.SwizzleTransform
            return tiling((8, width)), swizzling(swizzle)
    raise ValueError(f"tiled: [{rows}, {columns}] is no multiple of 16.")


def opaque(x: Any) -> Any:
    """x, but no loop holds in registers what is computed from it once and for all.

    Descriptors of wide matrices would take a hundred of them.
    """
    return lax.optimization_barrier(x)


def by_row(x, shape):
    return lax.broadcast_in_dim(x, shape, [0])


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
