"""What is computed with an `InterleavedTensor`: weights, products, rows, experts.

Each is the op on the GGUF blocks with another order of the same bytes; the results
carry their rows as `[u, 16]` so that tiles can be sharded.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, UInt8

from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.quant.decoded_products import (
    decoded_product,
    decoded_rows,
    routed_product,
    routed_product_transpose,
)
from jaxkern.primitives.quant.dequantize import DEQUANTIZE
from jaxkern.primitives.quant.gguf_blocks import decode_rows
from jaxkern.primitives.quant.interleaved_tensor import (
    ROWS,
    InterleavedTensor,
    rows_of,
    tile_width,
)
from jaxkern.primitives.quant.quantized_embedding import QUANTIZED_EMBEDDING
from jaxkern.primitives.quant.quantized_matmul import QUANTIZED_MATMUL
from jaxkern.primitives.quant.quantized_matmul_id import QUANTIZED_MATMUL_ID


def dequantize_interleaved(
    w: InterleavedTensor, dtype: jnp.dtype
) -> Float[Array, "... f d"]:
    """`dequantize` for interleaved rows."""
    *lead, f, d = w.shape
    return decode_tiles(w.tiles, w.qtype, dtype=dtype).reshape(*lead, f, d)


def interleaved_matmul(
    x: Float[Array, "... d"],
    w: InterleavedTensor,
    compute_dtype: jnp.dtype | None = None,
) -> Float[Array, "... f"]:
    """`quantized_matmul` for interleaved rows."""
    y = interleaved_matmul_p(x, w.tiles, qtype=w.qtype, compute_dtype=compute_dtype)
    return y.reshape(*x.shape[:-1], w.shape[-2])


def interleaved_embedding(
    ids: Integer[Array, "..."], w: InterleavedTensor, dtype: jnp.dtype
) -> Float[Array, "... d"]:
    """`quantized_embedding` for interleaved rows."""
    return interleaved_embedding_p(ids, w.tiles, qtype=w.qtype, dtype=dtype)


def interleaved_matmul_id(
    x: Float[Array, "t d"],
    ids: Integer[Array, "t k"],
    w: InterleavedTensor,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "t k f"]:
    """`quantized_matmul_id` for interleaved rows."""
    y = interleaved_matmul_id_p(
        x, ids, w.tiles, qtype=w.qtype, compute_dtype=compute_dtype
    )
    return y.reshape(*ids.shape, w.shape[-2])


def decode_tiles(
    tiles: UInt8[Array, "... tile_bytes"], qtype: str, *, dtype
) -> Float[Array, "... 16 d"]:
    return decode_rows(rows_of(tiles, qtype), qtype, dtype=dtype)


def decode_flat(
    tiles: UInt8[Array, "... u tile_bytes"], qtype: str, *, dtype
) -> Float[Array, "... f d"]:
    w = decode_tiles(tiles, qtype, dtype=dtype)
    return w.reshape(*w.shape[:-3], w.shape[-3] * ROWS, w.shape[-1])


def interleaved_matmul_reference(
    x: Float[Array, "... d"],
    tiles: UInt8[Array, "u tile_bytes"],
    *,
    qtype: str,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... u 16"]:
    check_width("interleaved_matmul", x, tiles, qtype)
    decode = functools.partial(decode_flat, qtype=qtype)
    y = decoded_product(x, (tiles,), decode, 1, compute_dtype)
    return y.reshape(*x.shape[:-1], tiles.shape[0], ROWS)


def interleaved_matmul_bwd_reference(
    tiles: UInt8[Array, "u tile_bytes"],
    dy: Float[Array, "... u 16"],
    *,
    qtype: str,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... d"]:
    decode = functools.partial(decode_flat, qtype=qtype)
    dy = dy.reshape(*dy.shape[:-2], tiles.shape[0] * ROWS)
    return decoded_product(dy, (tiles,), decode, 0, compute_dtype)


def interleaved_embedding_reference(
    ids: Integer[Array, "..."],
    tiles: UInt8[Array, "u tile_bytes"],
    *,
    qtype: str,
    dtype: jnp.dtype,
) -> Float[Array, "... d"]:
    tile_width("interleaved_embedding", qtype, tiles.shape[-1])
    ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))

    def decode(tiles, *, dtype):  # of a tile the one row that was asked for
        rows = rows_of(tiles, qtype)
        place = (ids % ROWS)[..., None, None]
        row = jnp.take_along_axis(rows, place, axis=-2)[..., 0, :]
        return decode_rows(row, qtype, dtype=dtype)

    return decoded_rows(ids // ROWS, (tiles,), decode, dtype)


def interleaved_matmul_id_reference(
    x: Float[Array, "... d"],
    ids: Integer[Array, "... k"],
    tiles: UInt8[Array, "e u tile_bytes"],
    *,
    qtype: str,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... k u 16"]:
    check_width("interleaved_matmul_id", x, tiles, qtype)
    decode = functools.partial(decode_flat, qtype=qtype)
    y = routed_product(x, ids, (tiles,), decode, compute_dtype)
    return y.reshape(*ids.shape, tiles.shape[1], ROWS)


def interleaved_matmul_id_bwd_reference(
    ids: Integer[Array, "... k"],
    tiles: UInt8[Array, "e u tile_bytes"],
    dy: Float[Array, "... k u 16"],
    *,
    qtype: str,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... d"]:
    decode = functools.partial(decode_flat, qtype=qtype)
    dy = dy.reshape(*ids.shape, tiles.shape[1] * ROWS)
    return routed_product_transpose(dy, ids, (tiles,), decode, compute_dtype)


def check_width(op: str, x: Array, tiles: Array, qtype: str) -> None:
    d = tile_width(op, qtype, tiles.shape[-1])
    if x.shape[-1] != d:
        raise TypeError(f"{op}: dim `d` is {x.shape[-1]} in `x` but {d} in `w`.")


WHOLE = ("d", "tile_bytes")  # blocks span both

interleaved_matmul_p = kernel_primitive(
    interleaved_matmul_reference,
    bwd=interleaved_matmul_bwd_reference,
    linear=("x",),
    replicated=WHOLE,
)
interleaved_embedding_p = kernel_primitive(
    interleaved_embedding_reference,
    replicated=("u", *WHOLE),  # an id may name any row
)
interleaved_matmul_id_p = kernel_primitive(
    interleaved_matmul_id_reference,
    bwd=interleaved_matmul_id_bwd_reference,
    linear=("x",),
    replicated=("e", "k", *WHOLE),  # an id may name any expert
)

DEQUANTIZE[InterleavedTensor] = dequantize_interleaved
QUANTIZED_MATMUL[InterleavedTensor] = interleaved_matmul
QUANTIZED_EMBEDDING[InterleavedTensor] = interleaved_embedding
QUANTIZED_MATMUL_ID[InterleavedTensor] = interleaved_matmul_id
