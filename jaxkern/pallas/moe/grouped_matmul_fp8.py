"""Grouped products of 8-bit floats on Hopper: y = x_scale w_scale (x w[group]^T).

The rows kernel of grouped_matmul.py on codes: tiles of 128 by 256, steps 128 deep in
four stages. WGMMA adds products of e4m3 in float32, of which tensor cores of 9.0 keep
13 binary digits every 32 columns: an error of 3.5e-3 of the largest result 2880 columns
deep. Sums that are added up in registers every few steps have all digits and are
slower, see docs/design/grouped_products.md.

Codes are bytes outside: as 8-bit floats XLA would copy them first. The copy engine
writes bytes to shared memory, where WGMMA reads the same ones as e4m3.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.gpu.moe.row_tiles import row_tiles
from jaxkern.pallas.moe.consumer import FLOAT8, buffers_of_bytes
from jaxkern.pallas.moe.grouped_matmul import (
    launch,
    problem,
    unsupported_dims,
    whole_tiles,
)
from jaxkern.pallas.moe.problem import ALIGN, BLOCK_M
from jaxkern.pallas.moe.rows_kernel import scaled_rows_kernel

BLOCK_K = 128
RESULTS = (jnp.bfloat16, jnp.float16, jnp.float32)


def unsupported(
    x: Any, x_scale: Any, w: Any, w_scale: Any, *, preferred_element_type: Any, **_: Any
) -> str | None:
    """A reason in words, or None."""
    if preferred_element_type not in RESULTS:
        return f"`preferred_element_type` is {jnp.dtype(preferred_element_type).name}"
    for name, scale in (("x_scale", x_scale), ("w_scale", w_scale)):
        if scale.dtype == jnp.float64:
            return f"`{name}` is float64"
    return unsupported_dims(x, w)


def scaled_grouped_matmul(
    x: jax.Array,
    x_scale: jax.Array,
    w: jax.Array,
    w_scale: jax.Array,
    group_sizes: jax.Array,
    *,
    preferred_element_type: Any,
    interpret: bool = False,
) -> jax.Array:
    """y `[r, f]`; `interpret` runs the kernel on a CPU."""
    (r, k), (e, n, _) = x.shape, w.shape
    c = problem(e, n, k, BLOCK_K)
    tiles, count = row_tiles(group_sizes, r, BLOCK_M, ALIGN)
    x = whole_tiles(x)
    if interpret:  # it knows no two views of one memory
        x, w = (lax.bitcast_convert_type(codes, FLOAT8) for codes in (x, w))
    # a tile may begin at the last row, and one of no group reads zeros
    by_row = jnp.pad(x_scale.astype(jnp.float32), (0, BLOCK_M))
    beyond = c.columns * c.block_n - n
    by_column = jnp.pad(w_scale.astype(jnp.float32), ((0, 1), (0, beyond)))
    # of a dim that is no multiple of 128 a tile as wide as a swizzle would be cut
    held = buffers_of_bytes(
        c, 64 if k % BLOCK_K else BLOCK_K, preferred_element_type, interpret
    )
    out = jax.ShapeDtypeStruct((x.shape[0], n), preferred_element_type)
    body = functools.partial(scaled_rows_kernel, c=c)
    operands = x, w, tiles, count, by_row, by_column
    y = launch(body, "scaled_grouped_matmul", c, held, out, interpret, *operands)
    return y[:r]
