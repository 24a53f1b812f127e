"""`GGUFTensor`: a pytree over the raw blocks of a GGUF weight; its family of ops."""

from dataclasses import dataclass, field
from math import prod

import jax
from jaxtyping import Array, UInt8

from jaxkern.primitives.quant.gguf_blocks import decode_rows, elements_per_row
from jaxkern.primitives.quant.quantized_family import QuantizedFamily
from jaxkern.primitives.quant.quantized_tensor import (
    QuantizedTensor,
    check_leading_index,
    repr_of,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GGUFTensor(QuantizedTensor):
    """A weight of shape `[..., d]`, quantised along its last dim.

    The one leaf is `blocks`, so `jit`, `vmap`, `scan`, `device_put`, sharding of every
    dim but the last, indexing and stacking (`jax.tree.map(jnp.stack, ...)`) act on the
    bytes; the format travels as static structure. Not an array on purpose: arithmetic
    must say where it decodes. Use `linear`, `quantized_matmul`, `quantized_embedding`
    or `dequantize`.

    Attributes:
      blocks: `[..., row_bytes]`, uint8, exactly the bytes of the file.
      qtype: name of the block format, a key of `BLOCK_FORMATS` such as "Q4_K".

    Example:
      >>> w = jaxkern.quantize_gguf(jnp.ones((4, 64)), "Q4_0")
      >>> w.shape, w.blocks.shape, w.qtype  # 18 bytes for each 32 weights
      ((4, 64), (4, 36), 'Q4_0')
      >>> jaxkern.GGUFTensor(w.blocks, "Q4_0").shape  # from the bytes of a file
      (4, 64)
    """

    blocks: UInt8[Array, "... row_bytes"]
    qtype: str = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights: `[..., d]`."""
        if self.blocks.dtype != "uint8" or self.blocks.ndim == 0:
            raise TypeError(
                "GGUFTensor: `blocks` must be uint8 [..., row_bytes], got "
                f"{self.blocks.dtype} {self.blocks.shape}."
            )
        *lead, row_bytes = self.blocks.shape
        return (*lead, elements_per_row("GGUFTensor", self.qtype, row_bytes))

    @property
    def size(self) -> int:
        """Number of weights."""
        return prod(self.shape)

    def __getitem__(self, index) -> "GGUFTensor":
        """Index leading dims: `stack[layer]`, `experts[ids]`, `rows[2:5]`."""
        if index is ...:
            return self
        check_leading_index(self, index)
        return GGUFTensor(self.blocks[index], self.qtype)

    def __repr__(self) -> str:
        return repr_of(self, self.qtype)


GGUF = QuantizedFamily(
    arrays={"blocks": UInt8[Array, "f row_bytes"]},
    layout=("qtype",),
    decode=decode_rows,
    width=lambda op, blocks, qtype: elements_per_row(op, qtype, blocks.shape[-1]),
    whole=("d", "row_bytes"),  # blocks span d: a cut of d need not be one of bytes
)
