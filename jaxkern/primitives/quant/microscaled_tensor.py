"""`MicroscaledTensor`: NVFP4, MXFP4 and MXFP8, small floats with a scale a group.

Formats: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
and, for NVFP4, two levels of scale: https://arxiv.org/abs/2509.25149.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.quant.quantized_tensor import (
    QuantizedTensor,
    check_leading_index,
    repr_of,
)


class MicroscaledFormat(NamedTuple):
    """Elements of `bits` bits with the `largest` value, in groups with one scale."""

    bits: int
    largest: int
    group_size: int
    scale: str  # "e4m3fn" or "e8m0", a power of two


MICROSCALED = {
    "nvfp4": MicroscaledFormat(4, 6, 16, "e4m3fn"),
    "mxfp4": MicroscaledFormat(4, 6, 32, "e8m0"),
    "mxfp8": MicroscaledFormat(8, 448, 32, "e8m0"),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MicroscaledTensor(QuantizedTensor):
    """A weight of shape `[..., d]`, in small floats with a scale a group of its rows.

        w[..., g * size + i] = element * scale[..., g] * global_scale

    | format | element | group | scale |
    |---|---|---|---|
    | nvfp4 | e2m1, two a byte | 16 | e4m3fn, and `global_scale` |
    | mxfp4 | e2m1, two a byte | 32 | e8m0: 2**(byte - 127), 255 is NaN |
    | mxfp8 | e4m3fn | 32 | e8m0 |

    The bytes are those of `mx.quantize` (view its words as bytes) and of checkpoints
    with pairs along d; `unpack_fp4` reads the other layouts.

    Attributes:
      codes: `[..., d * bits / 8]`, uint8; of two in a byte the first is low.
      scales: `[..., d / group]`, uint8.
      global_scale: of nvfp4: `[...]`, one factor a matrix `[f, d]`, so `[]` for a
        matrix and `[e]` for `[e, f, d]`; or None for 1. MLX and ModelOpt keep other
        numbers: the largest |w|, which is 2688 times this one; its reciprocal.
      format: "nvfp4", "mxfp4" or "mxfp8".

    Example:
      >>> codes = jnp.full((1, 16), 0x22, jnp.uint8)  # 32 times the code of 1.0
      >>> scales = jnp.array([[128]], jnp.uint8)  # 2 ** (128 - 127)
      >>> w = jaxkern.MicroscaledTensor(codes, scales, None, "mxfp4")
      >>> jaxkern.dequantize(w)[0, :3]
      Array([2., 2., 2.], dtype=float32)
    """

    codes: UInt8[Array, "... bytes"]
    scales: UInt8[Array, "... groups"]
    global_scale: Float[Array, "..."] | None = None
    format: str = field(default="nvfp4", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights: `[..., d]`."""
        d = microscaled_width("MicroscaledTensor", self.codes, self.scales, self.format)
        lead = self.codes.shape[:-1]
        if self.scales.shape[:-1] != lead:
            raise TypeError(
                "MicroscaledTensor: `codes` and `scales` must share their leading "
                f"dims, got {self.codes.shape} and {self.scales.shape}."
            )
        if self.global_scale is not None and self.global_scale.shape != lead[:-1]:
            raise TypeError(
                "MicroscaledTensor: `global_scale` must have one number a matrix, "
                f"{lead[:-1]}, got {self.global_scale.shape}."
            )
        return (*lead, d)

    def __getitem__(self, index) -> "MicroscaledTensor":
        """Index leading dims: `stack[layer]`, `experts[ids]`, `rows[2:5]`."""
        if index is ...:
            return self
        check_leading_index(self, index)
        indices = index if isinstance(index, tuple) else (index,)
        factor = self.global_scale
        if factor is not None:
            factor = factor[indices[: factor.ndim]]
        return MicroscaledTensor(
            self.codes[index], self.scales[index], factor, self.format
        )

    def __repr__(self) -> str:
        return repr_of(self, self.format)


def format_of(op: str, name: str) -> MicroscaledFormat:
    if name not in MICROSCALED:
        raise ValueError(
            f"{op}: `format` must be one of {', '.join(MICROSCALED)}, got {name!r}."
        )
    return MICROSCALED[name]


def microscaled_width(op: str, codes: Array, scales: Array, name: str) -> int:
    """Weights in a row; TypeError in the name of `op` if the arrays do not fit."""
    form = format_of(op, name)
    d = scales.shape[-1] * form.group_size
    if codes.dtype != "uint8" or scales.dtype != "uint8":
        raise TypeError(
            f"{op}: codes and scales must be uint8, got {codes.dtype}, {scales.dtype}."
        )
    if codes.shape[-1] != d * form.bits // 8:
        raise TypeError(
            f"{op}: {scales.shape[-1]} groups of {name} need {d * form.bits // 8} "
            f"bytes a row, got {codes.shape[-1]}."
        )
    return d
