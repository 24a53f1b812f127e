"""Rows in 8-bit floats with a scale each: codes[i] = e4m3fn(x[i] / scale[i]).

    scale[i] = 2**e, the least power of two with max|x[i]| <= 448 scale[i]

What products read whose scales stand outside of the sums; `scaled_float8.py` says what
becomes of zeros, infinities and NaN, here row by row. The second op rounds what a gated
block of experts gives: x = swiglu(gate, up), which stays in float32 until then.
"""

from typing import TypedDict, Unpack

from jax import lax
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.activation.swiglu import split_packed, swiglu_reference
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.linear.scaled_float8 import OPERANDS, codes_of, scale_of


class SwiGLU(TypedDict):
    alpha: float
    limit: float | None
    up_offset: float


def encode_rows_fp8_reference(
    x: Float[Array, "... d"],
) -> tuple[UInt8[Array, "... d"], Float[Array, "..."]]:
    """Constants of differentiation."""
    x = lax.stop_gradient(x)
    scale = scale_of(x, OPERANDS, axis=-1)
    return codes_of(x, scale[..., None], OPERANDS), scale


encode_rows_fp8_p = kernel_primitive(
    encode_rows_fp8_reference,
    replicated=("d",),  # a scale is of the whole row
)


def swiglu_rows_fp8_reference(
    gate: Float[Array, "... n"],
    up: Float[Array, "... f"] | None,
    **options: Unpack[SwiGLU],
) -> tuple[UInt8[Array, "... f"], Float[Array, "..."]]:
    """Without `up` both halves are packed in `gate`, as of `swiglu`."""
    if up is None:
        gate, up = split_packed(gate, "swiglu_rows_fp8")
    if gate.shape != up.shape:
        raise TypeError(
            "swiglu_rows_fp8: `gate` and `up` must have one shape, got "
            f"{gate.shape} and {up.shape}."
        )
    y = swiglu_reference(at_least_f32(gate), at_least_f32(up), **options)
    return encode_rows_fp8_reference(y)


swiglu_rows_fp8_p = kernel_primitive(
    swiglu_rows_fp8_reference,
    replicated=("n", "f"),  # a scale is of the whole row
)
