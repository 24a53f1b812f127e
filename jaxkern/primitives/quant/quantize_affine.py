"""Affine quantisation in groups: the quantiser of MLX and the plain min-max one."""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.quant.affine_tensor import (
    AffineTensor,
    check_affine_options,
    pack_codes,
)
from jaxkern.primitives.quant.rounding import divide, round_half_away

MLX_MIN_SCALE = 1e-7  # of mx.quantize, for groups that are constant


@check_arguments
def quantize_affine(
    w: Float[Array, "... d"],
    *,
    bits: int = 4,
    group_size: int = 64,
    quantizer: str = "mlx",
    packed: bool = True,
) -> AffineTensor:
    """Quantises the last dim in groups: code = round((w - bias) / scale).

    With n = 2**bits - 1 and the group's min and max:

        "minmax"  scale = (max - min) / n (1 if that is 0), bias = min, half away from 0
        "mlx"     the edge e, min or max, that is farther from 0 becomes a multiple of
                  the scale, so that 0 is a code: scale = e / round(e / scale),
                  bias = e; half to even

    "mlx" gives the bits of `mx.quantize` on a CPU. Computed in float32 (float64 for a
    float64 `w`); the codes are those of the scales before they are rounded to w.dtype.
    Codes are constants of differentiation, scales and biases follow the extremes.

    Args:
      w: `[..., d]`, any float dtype.
      bits: 2, 3, 4, 5, 6 or 8.
      group_size: a divisor of d; MLX has 32, 64 and 128.
      quantizer: "mlx" or "minmax".
      packed: codes in 32-bit words as MLX has them, or one a byte.

    Returns:
      The container, its scales and biases in w.dtype.

    Raises:
      ValueError: an option is none of these.
      TypeError: `group_size` does not divide d.

    Example:
      >>> w = jnp.arange(64.0).reshape(2, 32)
      >>> w = jaxkern.quantize_affine(w, bits=8, group_size=32)
      >>> w.codes.shape, w.codes.dtype, w.scales.shape
      ((2, 8), dtype('uint32'), (2, 1))
    """
    check_affine_options("quantize_affine", bits, group_size)
    if quantizer not in QUANTIZERS:
        raise ValueError(
            f"quantize_affine: `quantizer` must be one of {', '.join(QUANTIZERS)}, "
            f"got {quantizer!r}."
        )
    codes, scales, biases = quantize_affine_p(
        w, bits=bits, group_size=group_size, quantizer=quantizer, packed=packed
    )
    return AffineTensor(codes, scales, biases, bits, group_size)


def quantize_affine_reference(
    w: Float[Array, "... d"],
    *,
    bits: int,
    group_size: int,
    quantizer: str,
    packed: bool,
) -> tuple[
    UInt[Array, "... words"], Float[Array, "... groups"], Float[Array, "... groups"]
]:
    *lead, d = w.shape
    if d % group_size:
        raise TypeError(
            f"quantize_affine: d = {d} is not a multiple of group_size {group_size}."
        )
    groups = at_least_f32(w).reshape(*lead, d // group_size, group_size)
    scale, bias, code = QUANTIZERS[quantizer](groups, 2**bits - 1)
    codes = code.reshape(*lead, d).astype(jnp.uint8)
    return (
        pack_codes(codes, bits) if packed else codes,
        scale[..., 0].astype(w.dtype),
        bias[..., 0].astype(w.dtype),
    )


def _mlx(w: Float[Array, "... groups size"], n: int):
    low, high = w.min(-1, keepdims=True), w.max(-1, keepdims=True)
    from_low = jnp.abs(low) > jnp.abs(high)
    scale = jnp.maximum(divide(high - low, n), MLX_MIN_SCALE)
    scale = jnp.where(from_low, scale, -scale)
    edge = jnp.where(from_low, low, high)
    at_edge = jnp.round(edge / scale)  # the code distance from 0 to the edge
    snapped = at_edge != 0
    scale = jnp.where(snapped, edge / jnp.where(snapped, at_edge, 1), scale)
    bias = jnp.where(snapped, edge, 0)
    return scale, bias, jnp.clip(jnp.round(divide(w - bias, scale)), 0, n)


def _minmax(w: Float[Array, "... groups size"], n: int):
    low, high = w.min(-1, keepdims=True), w.max(-1, keepdims=True)
    scale = jnp.where(high > low, divide(high - low, n), 1)
    return scale, low, jnp.clip(round_half_away(divide(w - low, scale)), 0, n)


QUANTIZERS = {"mlx": _mlx, "minmax": _minmax}

quantize_affine_p = kernel_primitive(
    quantize_affine_reference,
    replicated=("d", "words", "groups"),  # a group spans all three
)
