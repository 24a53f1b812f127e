"""What is computed with an `InterleavedTensor`: weights, products, rows, experts.

Each is the op on the GGUF blocks with another order of the same bytes; the results
carry their rows as `[u, 16]` so that tiles can be sharded.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, UInt8

from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.quant.decoded_products import decoded_rows
from jaxkern.primitives.quant.dequantize import DEQUANTIZE
from jaxkern.primitives.quant.interleaved_tensor import (
    ROWS,
    InterleavedTensor,
    rows_of,
    tile_width,
)
from jaxkern.primitives.quant.quantized_embedding import QUANTIZED_EMBEDDING
from jaxkern.primitives.quant.quantized_family import QuantizedFamily
from jaxkern.primitives.quant.quantized_matmul import QUANTIZED_MATMUL
from jaxkern.primitives.quant.quantized_matmul_id import QUANTIZED_MATMUL_ID
from jaxkern.primitives.quant.tile_formats import decode_blocks


def read_interleaved(w: InterleavedTensor, dtype: jnp.dtype) -> Float[Array, "... f d"]:
    """`dequantize` for interleaved rows."""
    *lead, f, d = w.shape
    y = dequantize_interleaved_p(w.tiles, qtype=w.qtype, dtype=dtype)
    return y.reshape(*lead, f, d)


def dequantize_interleaved_reference(
    tiles: UInt8[Array, "... tile_bytes"], *, qtype: str, dtype: jnp.dtype
) -> Float[Array, "... 16 d"]:
    tile_width("dequantize_interleaved", qtype, tiles.shape[-1])
    return decode_tiles(tiles, qtype, dtype=dtype)


def interleaved_matmul(
    x: Float[Array, "... d"],
    w: InterleavedTensor,
    compute_dtype: jnp.dtype | None = None,
) -> Float[Array, "... f"]:
    """`quantized_matmul` for interleaved rows."""
    y = INTERLEAVED.reader(interleaved_matmul_p, "compute_dtype")(x, w, compute_dtype)
    return y.reshape(*x.shape[:-1], w.shape[-2])


def interleaved_matmul_id(
    x: Float[Array, "t d"],
    ids: Integer[Array, "t k"],
    w: InterleavedTensor,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "t k f"]:
    """`quantized_matmul_id` for interleaved rows."""
    read = INTERLEAVED.reader(interleaved_matmul_id_p, "compute_dtype")
    return read(x, ids, w, compute_dtype).reshape(*ids.shape, w.shape[-2])


def decode_tiles(
    tiles: UInt8[Array, "... tile_bytes"], qtype: str, *, dtype
) -> Float[Array, "... 16 d"]:
    return decode_blocks(rows_of(tiles, qtype), qtype, dtype=dtype)


def decode_flat(
    tiles: UInt8[Array, "... u tile_bytes"], qtype: str, *, dtype
) -> Float[Array, "... f d"]:
    w = decode_tiles(tiles, qtype, dtype=dtype)
    return w.reshape(*w.shape[:-3], w.shape[-3] * ROWS, w.shape[-1])


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
        return decode_blocks(row, qtype, dtype=dtype)

    return decoded_rows(ids // ROWS, (tiles,), decode, dtype)


INTERLEAVED = QuantizedFamily(
    arrays={"tiles": UInt8[Array, "u tile_bytes"]},
    layout=("qtype",),
    decode=decode_flat,
    width=lambda op, tiles, qtype: tile_width(op, qtype, tiles.shape[-1]),
    whole=("d", "tile_bytes"),  # blocks span both
    rows="u 16",
)
dequantize_interleaved_p = kernel_primitive(
    dequantize_interleaved_reference, replicated=INTERLEAVED.whole
)
interleaved_matmul_p = INTERLEAVED.matmul("interleaved_matmul", __name__)
interleaved_embedding_p = kernel_primitive(
    interleaved_embedding_reference,
    replicated=("u", *INTERLEAVED.whole),  # an id may name any row
)
interleaved_matmul_id_p = INTERLEAVED.matmul_id("interleaved_matmul_id", __name__)

DEQUANTIZE[InterleavedTensor] = read_interleaved
QUANTIZED_MATMUL[InterleavedTensor] = interleaved_matmul
QUANTIZED_EMBEDDING[InterleavedTensor] = INTERLEAVED.reader(
    interleaved_embedding_p, "dtype"
)
QUANTIZED_MATMUL_ID[InterleavedTensor] = interleaved_matmul_id
