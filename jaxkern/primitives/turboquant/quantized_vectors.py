"""`QuantizedVectors`: a pytree of packed codes and scales, also a quantised cache."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.quant.quantized_tensor import repr_of
from jaxkern.primitives.turboquant.vector_codec import (
    VectorCodec,
    check_dims,
    code_bytes,
    group_size,
    num_dims,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedVectors:
    """Vectors `[..., d]`, each quantised by itself along its last dim.

    The leaves are `codes` and `scales`, so `jit`, `vmap`, `scan`, donation, sharding of
    every dim but the last and stacking (`jax.tree.map(jnp.stack, ...)`) act on both;
    the codec travels as static structure. As a key or value cache its dims are
    `[b, s, k, h]`: `update_quantized_kv_cache` writes it, `quantized_cache_attention`
    reads it.

    Attributes:
      codes: `[..., code_bytes]`, bits * d / 8 bytes. With 4 bits byte i has dim 2i in
        its low half, dim 2i + 1 in its high half; see vector_codec.py for the others.
      scales: `[..., groups]`, any float dtype.
      codec: what the codes mean, an IntCodec, Float8Codec or TurboQuantCodec.

    Example:
      >>> codec = jaxkern.IntCodec(4, group=32)
      >>> cache = jaxkern.QuantizedVectors.zeros((1, 8, 2, 64), codec)
      >>> cache.codes.shape, cache.scales.shape
      ((1, 8, 2, 32), (1, 8, 2, 2))
    """

    codes: UInt8[Array, "... code_bytes"]
    scales: Float[Array, "... groups"]
    codec: VectorCodec = field(metadata={"static": True})

    @classmethod
    def zeros(
        cls,
        shape: tuple[int, ...],
        codec: VectorCodec,
        scale_dtype: DTypeLike = jnp.float32,
    ) -> "QuantizedVectors":
        """Vectors of zeros: an empty cache."""
        *lead, d = shape
        check_dims("QuantizedVectors", codec, d)
        codes = jnp.zeros((*lead, code_bytes(codec, d)), jnp.uint8)
        scales = jnp.zeros((*lead, d // group_size(codec, d)), scale_dtype)
        return cls(codes, scales, codec)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the vectors: `[..., d]`."""
        *lead, num_bytes = self.codes.shape
        return (*lead, num_dims("QuantizedVectors", self.codec, num_bytes))

    @property
    def nbytes(self) -> int:
        """Bytes held, of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def __getitem__(self, index) -> "QuantizedVectors":
        """Index leading dims: `cache[0]`, `cache[:, position]`."""
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) >= self.codes.ndim or any(i is ... for i in indices):
            raise TypeError(
                f"QuantizedVectors: only the {self.codes.ndim - 1} leading dims of "
                f"{self.shape} can be indexed, the last one is packed."
            )
        return QuantizedVectors(self.codes[index], self.scales[index], self.codec)

    def __repr__(self) -> str:
        return repr_of(self, str(self.codec))


def check_quantized_vectors(op: str, name: str, x: object) -> None:
    if not isinstance(x, QuantizedVectors):
        raise TypeError(
            f"{op}: `{name}` must be QuantizedVectors, got {type(x).__name__}."
        )
