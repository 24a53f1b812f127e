"""q = round(rms_norm(x) / scale), scale = max|rms_norm(x)| / largest code.

8-bit activations for a quantised product (https://arxiv.org/abs/2209.05433; blocks of a
row: https://arxiv.org/abs/2412.19437, section 3.3).
"""

from typing import Literal, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.float8 import encode_float8
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.norm.rms_norm import rms_norm_fwd_reference

Format = Literal["e4m3fn", "int8"]
LARGEST = {"e4m3fn": 448.0, "int8": 127.0}


@check_arguments
def rms_norm_quantized(
    x: Float[Array, "... d"],
    weight: Float[Array, " d"] | None = None,
    *,
    format: Format = "e4m3fn",
    block: int | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Integer[Array, "... d"], Float[Array, "... nb"]]:
    """Normalises a row and rounds it to 8 bits, with a scale for each row or block.

        y     = x / sqrt(mean(x**2) + eps) * (weight + offset)
        scale = max|y of the block| / largest code;  code = round(y / scale)

    The norm stays in float32 (float64 for a float64 `x`) until it is rounded, once, to
    nearest, ties to even. A block of zeros has scale 1. Codes are constants of
    differentiation; scales follow the largest element of their block. To train through
    the rounding, normalise with `rms_norm` and quantise its result straight-through.

    Source: https://arxiv.org/abs/2209.05433, https://arxiv.org/abs/2412.19437.

    Args:
      x: `[..., d]`, any float dtype.
      weight: `[d]`, or None for no scale of the norm.
      format: "e4m3fn" (largest 448) or "int8" (symmetric, largest 127).
      block: elements of a row that share a scale, such as 128; None for the row.
      eps: added to the mean square, in units of x**2.
      offset: added to `weight`; 1.0 for Gemma, whose checkpoints store weight - 1.

    Returns:
      codes: `[..., d]`, int8, or for "e4m3fn" uint8 with the bits of
        `jnp.float8_e4m3fn`, which `lax.bitcast_convert_type` shows as such.
      scales: `[..., ceil(d / block)]`, float32; y is about codes times scale.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: another format, or a block below 1, or
        an eps that is negative or not finite.

    Example:
      >>> x = jnp.array([[3.0, -4.0]])
      >>> codes, scales = jaxkern.rms_norm_quantized(x, format="int8")
      >>> codes
      Array([[  95, -127]], dtype=int8)
      >>> codes * scales  # about rms_norm(x)
      Array([[ 0.846, -1.131]], dtype=float32)
    """
    check_format("rms_norm_quantized", format, block)
    width = x.shape[-1] if block is None else block
    return rms_norm_quantized_p(
        x, weight, format=format, block=width, eps=eps, offset=offset
    )


@check_arguments
def add_rms_norm_quantized(
    x: Float[Array, "... d"],
    residual: Float[Array, "... d"],
    weight: Float[Array, " d"] | None = None,
    *,
    format: Format = "e4m3fn",
    block: int | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Integer[Array, "... d"], Float[Array, "... nb"], Float[Array, "... d"]]:
    """`rms_norm_quantized` of a sum, and the sum: the seam before a quantised layer.

        total = x + residual;  codes, scales = rms_norm_quantized(total)

    The sum stays in float32 until the norm is done, as in `add_rms_norm`.

    Args:
      x, residual: `[..., d]`, any float dtype.
      weight, format, block, eps, offset: see rms_norm_quantized.

    Returns:
      codes, scales: see rms_norm_quantized.
      total: `[..., d]`, dtype of residual.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: another format, or a block below 1, or
        an eps that is negative or not finite.

    Example:
      >>> x, residual = jnp.array([[1.0, -2.0]]), jnp.array([[2.0, -2.0]])
      >>> results = jaxkern.add_rms_norm_quantized(x, residual, format="int8")
      >>> codes, scales, total = results
      >>> codes, total
      (Array([[  95, -127]], dtype=int8), Array([[ 3., -4.]], dtype=float32))
    """
    check_format("add_rms_norm_quantized", format, block)
    width = x.shape[-1] if block is None else block
    return add_rms_norm_quantized_p(
        x, residual, weight, format=format, block=width, eps=eps, offset=offset
    )


def check_format(op: str, format: str, block: int | None) -> None:
    if format not in LARGEST:
        raise ValueError(
            f"{op}: `format` must be one of {', '.join(LARGEST)}, got {format!r}."
        )
    if block is not None and block < 1:
        raise ValueError(f"{op}: `block` must be at least 1 or None, got {block}.")


def quantized(
    y: jax.Array, format: str, block: int
) -> tuple[Integer[Array, "... d"], Float[Array, "... nb"]]:
    """Codes and scales of rows, in blocks of `block`; the last one may be shorter."""
    *lead, d = y.shape
    count = -(-d // max(block, 1))
    whole = jnp.pad(y, [(0, 0)] * len(lead) + [(0, count * block - d)])
    blocks = whole.reshape(*lead, count, block)
    scale = jnp.max(jnp.abs(blocks), axis=-1, initial=0) / LARGEST[format]
    scale = jnp.where(scale == 0, 1, scale)
    fixed = lax.stop_gradient(blocks / scale[..., None])
    if format == "int8":
        codes = jnp.round(fixed).astype(jnp.int8)
    else:
        codes = encode_float8(fixed, format)
    return codes.reshape(*lead, count * block)[..., :d], scale


class QuantizedNorm(TypedDict):
    format: str
    block: int
    eps: float
    offset: float


def quantized_norm(x, weight, *, format, block, eps, offset):
    y, _ = rms_norm_fwd_reference(x, weight, None, eps=eps, offset=offset)
    return quantized(y, format, block)


def rms_norm_quantized_reference(
    x: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    **options: Unpack[QuantizedNorm],
) -> tuple[Integer[Array, "... d"], Float[Array, "... nb"]]:
    return quantized_norm(at_least_f32(x), weight, **options)


def add_rms_norm_quantized_reference(
    x: Float[Array, "... d"],
    residual: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    **options: Unpack[QuantizedNorm],
) -> tuple[Integer[Array, "... d"], Float[Array, "... nb"], Float[Array, "... d"]]:
    total = at_least_f32(x) + at_least_f32(residual)
    return *quantized_norm(total, weight, **options), total.astype(residual.dtype)


rms_norm_quantized_p = kernel_primitive(
    rms_norm_quantized_reference,
    replicated=("d", "nb"),  # the mean runs over d, and nb are parts of it
)
add_rms_norm_quantized_p = kernel_primitive(
    add_rms_norm_quantized_reference,
    replicated=("d", "nb"),  # the mean runs over d, and nb are parts of it
)
