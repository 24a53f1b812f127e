"""Codes of 8 bits and their transpose in one pass: x is read once, each written once.

    codes[r, c] = turned[c, r] = float8(x[r, c] / scale)

A program takes a tile of ROWS by BLOCK elements, converts it in registers, stores it,
turns it through shared memory and stores it again, both times whole lines of 128 bytes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compute_capability
from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import jit, sparse_call, tl
from jaxkern.primitives.float8 import FLOAT8

CONVERTS = 89  # the compute capability that has the conversion
TILE = {"ROWS": 128, "BLOCK": 128, "num_warps": 8}


def unsupported(**named: Any) -> str | None:
    if reason := bridge.unsupported(**named):
        return reason
    if (capability := compute_capability()) < CONVERTS:
        return f"the GPU has compute capability {capability}, below {CONVERTS}"
    return None


@jit
def encode_fp8_kernel(
    x_ptr,
    scale_ptr,
    codes_ptr,
    turned_ptr,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < NUM_ROWS) & (column[None, :] < D)
    at = row[:, None] * D + column[None, :]
    inverse = 1.0 / tl.load(scale_ptr).to(tl.float32)
    x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32) * inverse
    codes = x.to(codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + at, codes, inside)
    there = column[:, None] * NUM_ROWS + row[None, :]
    tl.store(turned_ptr + there, tl.trans(codes), tl.trans(inside))


def encode_fp8(
    x: jax.Array, scale: jax.Array, *, form: str
) -> tuple[jax.Array, jax.Array]:
    rows, d = num_rows(x), x.shape[-1]
    grid = -(-rows // TILE["ROWS"]), -(-d // TILE["BLOCK"])
    shapes = {"codes_ptr": x.shape, "turned_ptr": (d, *x.shape[:-1])}
    results = {p: jax.ShapeDtypeStruct(s, FLOAT8[form]) for p, s in shapes.items()}
    codes, turned = sparse_call(
        encode_fp8_kernel,
        grid,
        {"x_ptr": x, "scale_ptr": scale},
        results,
        {"NUM_ROWS": rows, "D": d, **TILE},
    )
    assert codes is not None and turned is not None
    as_bits = lax.bitcast_convert_type
    return as_bits(codes, jnp.uint8), as_bits(turned, jnp.uint8)
