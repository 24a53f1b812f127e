"""`FP8Tensor`: a pytree of 8-bit float codes and the scales of their blocks."""

from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.float8 import check_float8
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor, repr_of

WHOLE = 0  # a block that spans its dim


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FP8Tensor(QuantizedTensor):
    """A weight of shape `[..., f, d]` in 8-bit floats with a scale for each block.

        w[i, j] = float8(codes[i, j]) * scales[i // block[0], j // block[1]]

    | a scale for | block | shape of `scales` |
    |---|---|---|
    | the matrix | `(0, 0)` | `[..., 1, 1]` |
    | an output channel | `(1, 0)` | `[..., f, 1]` |
    | 128 x 128 (DeepSeek's `weight_scale_inv`) | `(128, 128)` | rounded up |
    | 128 activations of a token | `(1, 128)` | `[..., f, ceil(d / 128)]` |

    The scale multiplies, whatever a checkpoint calls it. `jit`, `scan`, `device_put`
    and stacking act on the two arrays.

    Attributes:
      codes: `[..., f, d]`, uint8; of a float8 array `x`, `x.view("uint8")`.
      scales: `[..., ceil(f / block[0]), ceil(d / block[1])]`, any float dtype.
      block: rows and columns that share a scale; 0 is the whole dim.
      format: "e4m3fn", "e4m3" (IEEE-like, largest 240) or "e5m2".

    Example:
      >>> codes = jnp.array([[1.0, 2.0]], jnp.float8_e4m3fn).view("uint8")
      >>> scales = jnp.array([[0.5]])
      >>> w = jaxkern.FP8Tensor(codes, scales, block=(0, 0), format="e4m3fn")
      >>> jaxkern.dequantize(w)
      Array([[0.5, 1. ]], dtype=float32)
    """

    codes: UInt8[Array, "... f d"]
    scales: Float[Array, "... nf nd"]
    block: tuple[int, int] = field(default=(WHOLE, WHOLE), metadata={"static": True})
    format: str = field(default="e4m3fn", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights: `[..., f, d]`."""
        check_float8("FP8Tensor", self.format)
        if self.codes.dtype != "uint8" or self.codes.ndim < 2:
            raise TypeError(
                "FP8Tensor: `codes` must be uint8 [..., f, d], got "
                f"{self.codes.dtype} {self.codes.shape}."
            )
        expected = scales_shape(self.codes.shape, self.block)
        if self.scales.shape != expected:
            raise TypeError(
                f"FP8Tensor: `scales` must have shape {expected} for codes "
                f"{self.codes.shape} in blocks of {self.block}, got "
                f"{self.scales.shape}."
            )
        return self.codes.shape

    def __getitem__(self, index) -> "FP8Tensor":
        """Index the dims in front of the matrix: `stack[layer]`, `experts[ids]`."""
        if index is ...:
            return self
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) > self.ndim - 2 or any(i is ... for i in indices):
            raise TypeError(
                f"FP8Tensor: only the {self.ndim - 2} leading dims of {self.shape} can "
                "be indexed, blocks span the last two. Use dequantize(w)[...] instead."
            )
        return jax.tree.map(lambda a: a[index], self)

    def __repr__(self) -> str:
        return repr_of(self, f"{self.format} / {self.block}")


def scales_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    *lead, f, d = shape
    return (
        *lead,
        *(1 if b == WHOLE else -(-n // b) for n, b in zip((f, d), block, strict=True)),
    )
