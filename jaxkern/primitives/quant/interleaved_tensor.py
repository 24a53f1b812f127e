"""`InterleavedTensor`: blocks with 16 rows side by side, for vectors and for warps.

The same field of the same block of 16 neighbouring rows lies together: one vector
instruction then works on 16 rows, and a product with a vector needs no sum across
lanes. The bytes are those of a GGUF file in another order; other weights of 4 bits have
block formats of their own, `tile_formats.py`.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.quant.affine_tensor import AffineTensor
from jaxkern.primitives.quant.gguf_tensor import GGUFTensor
from jaxkern.primitives.quant.int_tensor import IntTensor
from jaxkern.primitives.quant.microscaled_tensor import MicroscaledTensor
from jaxkern.primitives.quant.quantized_tensor import (
    QuantizedTensor,
    check_leading_index,
    repr_of,
)
from jaxkern.primitives.quant.tile_blocks import blocks_of
from jaxkern.primitives.quant.tile_formats import TILE_FORMATS

ROWS = 16  # of a tile

# What stays together of a block: (bytes of a unit, number of units) in order.
UNITS = {q: form.units for q, form in TILE_FORMATS.items()}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InterleavedTensor(QuantizedTensor):
    """A weight of shape `[..., f, d]`, quantised along d, f a multiple of 16.

    Made by `interleave` from another container, used as one: `linear`,
    `quantized_matmul`, `quantized_matmul_id`, `quantized_embedding`, `dequantize`.

    Attributes:
      tiles: `[..., f / 16, 16 * row_bytes]`, uint8.
      qtype: name of the block format, a key of `UNITS` such as "Q4_K".

    Example:
      >>> w = jaxkern.interleave(jaxkern.quantize_gguf(jnp.ones((16, 32)), "Q8_0"))
      >>> isinstance(w, jaxkern.InterleavedTensor)
      True
      >>> w.shape, w.tiles.shape, w.qtype
      ((16, 32), (1, 544), 'Q8_0')
    """

    tiles: UInt8[Array, "... u tile_bytes"]
    qtype: str = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights: `[..., f, d]`."""
        *lead, u, tile_bytes = self.tiles.shape
        d = tile_width("InterleavedTensor", self.qtype, tile_bytes)
        return (*lead, u * ROWS, d)

    def __getitem__(self, index) -> "InterleavedTensor":
        """Index the dims before f: `stack[layer]`, `experts[ids]`."""
        if index is ...:
            return self
        check_leading_index(self, (index if isinstance(index, tuple) else (index,), 0))
        return InterleavedTensor(self.tiles[index], self.qtype)

    def __repr__(self) -> str:
        return repr_of(self, self.qtype)


@check_arguments
def interleave(
    w: GGUFTensor | MicroscaledTensor | IntTensor | AffineTensor,
) -> InterleavedTensor:
    """The same weights with 16 rows side by side, for the products of few activations.

    | w | blocks | their columns |
    |---|---|---|
    | GGUF | of the file | 32 or 256 |
    | MXFP4 | "MXFP4" of GGUF, where a scale of 255 is 2**128, not NaN | 32 |
    | NVFP4 | "NVFP4_256" | 256 |
    | integers of 4 bits, numbers of 16 | "INT4_64_BF16" and alike | 32, 64, 128 |
    | affine of 4 bits, numbers of 16 | "AFFINE4_64_BF16" and alike | 32, 64, 128 |

    On a GPU one launch takes such a product with its norm, gate or addition, and reads
    the weights of one activation near the rate of a copy. Loaders do this there.

    Args:
      w: `[..., f, d]` in one of these forms, f a multiple of 16, d of the columns.

    Returns:
      `[..., f, d]`, the same weights in as many bytes; of NVFP4 in 3 % more, and of
      integers without zero points in two more a group.

    Raises:
      TypeError: w is no matrix, f is no multiple of 16, or there are no such blocks.

    Example:
      >>> w = jaxkern.quantize_gguf(jnp.arange(512.0).reshape(16, 32), "Q8_0")
      >>> same = jaxkern.dequantize(jaxkern.interleave(w)) == jaxkern.dequantize(w)
      >>> bool(same.all())
      True
    """
    found = None if w.ndim < 2 or w.shape[-2] % ROWS else blocks_of(w)
    if found is None:
        raise TypeError(
            "interleave: `w` must be [..., f, d] in a block format with f a multiple "
            f"of {ROWS}, got {w!r}."
        )
    blocks, qtype = found
    return InterleavedTensor(interleaved(blocks, qtype), qtype)


def tile_width(op: str, qtype: str, tile_bytes: int) -> int:
    """Weights in each row of a tile; refuses in the name of `op`."""
    if qtype not in UNITS or tile_bytes % ROWS:
        raise TypeError(
            f"{op}: tiles of {tile_bytes} bytes are not {ROWS} rows of {qtype} blocks."
        )
    form = TILE_FORMATS[qtype]
    if tile_bytes // ROWS % form.bytes:
        raise TypeError(
            f"{op}: rows of {tile_bytes // ROWS} bytes are no whole {qtype} blocks of "
            f"{form.bytes} bytes."
        )
    return tile_bytes // ROWS // form.bytes * form.elements


def interleaved[Blocks: (jax.Array, np.ndarray)](blocks: Blocks, qtype: str) -> Blocks:
    """Tiles `[..., u, tile_bytes]` of rows `[..., f, row_bytes]`, uint8.

    The host does it where the rows are a numpy array: nothing is compiled.
    """
    xp: Any = np if isinstance(blocks, np.ndarray) else jnp
    *lead, f, row_bytes = blocks.shape
    size = TILE_FORMATS[qtype].bytes
    n = row_bytes // size
    b = blocks.reshape(*lead, f // ROWS, ROWS, n, size)
    b = xp.swapaxes(b, -3, -2)  # [... u n 16 size]
    parts, at = [], 0
    for unit, count in UNITS[qtype]:
        part = b[..., at : at + unit * count]
        part = part.reshape(*lead, f // ROWS, n, ROWS, count, unit)
        part = xp.swapaxes(part, -3, -2)  # [... u n count 16 unit]
        parts.append(part.reshape(*lead, f // ROWS, n, count * ROWS * unit))
        at += unit * count
    joined = xp.concatenate(parts, axis=-1)
    return joined.reshape(*lead, f // ROWS, ROWS * row_bytes)


def rows_of(
    tiles: UInt8[Array, "... tile_bytes"], qtype: str
) -> UInt8[Array, "... 16 row_bytes"]:
    """The 16 rows of each tile as the file has them: the inverse of `interleaved`."""
    *lead, tile_bytes = tiles.shape
    size = TILE_FORMATS[qtype].bytes
    n = tile_bytes // (ROWS * size)
    b = tiles.reshape(*lead, n, ROWS * size)
    parts, at = [], 0
    for unit, count in UNITS[qtype]:
        part = b[..., at : at + ROWS * unit * count]
        part = part.reshape(*lead, n, count, ROWS, unit)
        part = jnp.swapaxes(part, -3, -2)  # [... n 16 count unit]
        parts.append(part.reshape(*lead, n, ROWS, count * unit))
        at += ROWS * unit * count
    rows = jnp.swapaxes(jnp.concatenate(parts, axis=-1), -3, -2)  # [... 16 n size]
    return rows.reshape(*lead, ROWS, n * size)
