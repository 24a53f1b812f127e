"""8-bit float weights with block scales: quantised, decoded, multiplied, looked up.

w = float8(code) * scale of its block  (https://arxiv.org/abs/2209.05433; blocks:
https://arxiv.org/abs/2412.19437, section 3.3).

The primitives see whole blocks, `nf * bf` by `nd * bd`, and are cut between blocks; a
matrix with a part of a block at its edge is padded with zeros first.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, UInt8

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.float8 import (
    check_float8,
    decode_float8,
    encode_float8,
    largest_float8,
)
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.quant.dequantize import DEQUANTIZE
from jaxkern.primitives.quant.fp8_tensor import WHOLE, FP8Tensor, scales_shape
from jaxkern.primitives.quant.quantized_embedding import QUANTIZED_EMBEDDING
from jaxkern.primitives.quant.quantized_family import QuantizedFamily
from jaxkern.primitives.quant.quantized_matmul import QUANTIZED_MATMUL
from jaxkern.primitives.quant.rounding import divide


@check_arguments
def quantize_fp8(
    w: Float[Array, "... f d"],
    *,
    block: tuple[int, int] = (WHOLE, WHOLE),
    format: str = "e4m3fn",
) -> FP8Tensor:
    """Quantises to 8-bit floats, the largest of each block to the largest code.

        scale = max|w of the block| / largest finite value;  code = float8(w / scale)

    Rounds to nearest even and saturates. A block of zeros has scale 1. Codes are
    constants of differentiation, scales follow the largest value.

    Source: https://arxiv.org/abs/2209.05433, https://arxiv.org/abs/2412.19437.

    Args:
      w: `[..., f, d]`, any float dtype.
      block: rows and columns that share a scale, 0 for the whole dim: `(0, 0)` one
        scale a matrix, `(1, 0)` one a row, `(128, 128)` DeepSeek's, `(1, 128)` its
        activations'.
      format: "e4m3fn" (largest 448), "e4m3" (IEEE-like, 240) or "e5m2" (57344).

    Returns:
      The container, its scales in float32 (float64 for a float64 `w`).

    Raises:
      TypeError: `w` has less than two dims.
      ValueError: `block` or `format` is none of these.

    Example:
      >>> w = jaxkern.quantize_fp8(jnp.ones((256, 128)), block=(128, 128))
      >>> w.codes.dtype, w.scales.shape
      (dtype('uint8'), (2, 1))
    """
    check_float8("quantize_fp8", format)
    if len(block) != 2 or min(block) < 0:
        raise ValueError(
            f"quantize_fp8: `block` must be (rows, columns), 0 for all, got {block}."
        )
    if w.ndim < 2:
        raise TypeError(f"quantize_fp8: `w` must be [..., f, d], got {w.shape}.")
    if w.size == 0:  # a dim of no numbers is one block all the same
        scales = jnp.ones(scales_shape(w.shape, block), at_least_f32(w).dtype)
        return FP8Tensor(
            jnp.zeros(w.shape, jnp.uint8), scales, (block[0], block[1]), format
        )
    f, d = w.shape[-2:]
    rows, columns = (n if b == WHOLE else b for n, b in zip((f, d), block, strict=True))
    codes, scales = quantize_fp8_p(
        pad_last(w, blocks_size(f, rows), blocks_size(d, columns)),
        block=(rows, columns),
        format=format,
    )
    return FP8Tensor(codes[..., :f, :d], scales, (block[0], block[1]), format)


def quantize_fp8_reference(
    w: Float[Array, "... nf*bf nd*bd"], *, block: tuple[int, int], format: str
) -> tuple[UInt8[Array, "... nf*bf nd*bd"], Float[Array, "... nf nd"]]:
    nf, nd = (n // max(b, 1) for n, b in zip(w.shape[-2:], block, strict=True))
    blocks = split_blocks(at_least_f32(w), nf, nd)
    amax = jnp.max(jnp.abs(blocks), axis=(-3, -1), keepdims=True, initial=0)
    scale = divide(amax, largest_float8(format))
    scale = jnp.where(scale > 0, scale, 1)
    codes = merge_blocks(encode_float8(blocks / scale, format))
    return codes, scale[..., 0, :, 0]


quantize_fp8_p = kernel_primitive(
    quantize_fp8_reference,
    replicated=("bf", "bd"),  # a scale is of the largest of its block
)


def split_blocks(x: Array, nf: int, nd: int) -> Array:
    """`[..., nf*bf, nd*bd]` as `[..., nf, bf, nd, bd]`; explicit meshes split one dim
    at a time."""
    *lead, f, d = x.shape
    rows = x.reshape(*lead, nf, f // max(nf, 1), d)
    return rows.reshape(*rows.shape[:-1], nd, d // max(nd, 1))


def merge_blocks(x: Array) -> Array:
    """The inverse of `split_blocks`."""
    *lead, nf, bf, nd, bd = x.shape
    return x.reshape(*lead, nf, bf, nd * bd).reshape(*lead, nf * bf, nd * bd)


def decode_fp8(
    codes: UInt8[Array, "... nf*bf nd*bd"],
    scales: Float[Array, "... nf nd"],
    *,
    format: str,
    dtype: jnp.dtype | None,
) -> Float[Array, "... nf*bf nd*bd"]:
    """The weights, computed in float32 or wider and rounded once to `dtype`, if any."""
    blocks = split_blocks(codes, *scales.shape[-2:])
    scales = at_least_f32(scales)[..., :, None, :, None]
    w = merge_blocks(decode_float8(blocks, format) * scales)
    return w if dtype is None else w.astype(dtype)


def decode_fp8_row(
    codes: UInt8[Array, "... nd*bd"],
    scales: Float[Array, "... nd"],
    *,
    format: str,
    dtype: jnp.dtype | None,
) -> Float[Array, "... nd*bd"]:
    """One row, which has scales of its own."""
    row = (codes[..., None, :], scales[..., None, :])
    return decode_fp8(*row, format=format, dtype=dtype)[..., 0, :]


FP8 = QuantizedFamily(
    arrays={
        "codes": UInt8[Array, "nf*bf nd*bd"],
        "scales": Float[Array, "nf nd"],
    },
    layout=("format",),
    decode=decode_fp8,
    whole=("nd", "bd"),  # as in quantized_matmul, a device decodes whole rows
    columns="nd*bd",
    rows="nf*bf",
    matrix=True,
)
dequantize_fp8_p = FP8.dequantize("dequantize_fp8", __name__, whole=())
fp8_matmul_p = FP8.matmul("fp8_matmul", __name__)
fp8_embedding_p = FP8.embedding("fp8_embedding", __name__, decode=decode_fp8_row)


# How the ops of all containers read this one.


def blocks_size(n: int, block: int) -> int:
    """Size of a dim in whole blocks."""
    return n if block == WHOLE else -(-n // block) * block


def pad_last(x: Array, *sizes: int) -> Array:
    """Zeros behind the last dims up to `sizes`."""
    held = x.shape[x.ndim - len(sizes) :]
    if held == sizes:
        return x
    ends = [(0, size - n) for n, size in zip(held, sizes, strict=True)]
    return jnp.pad(x, [(0, 0)] * (x.ndim - len(sizes)) + ends)


def whole_blocks(w: FP8Tensor) -> UInt8[Array, "... nf*bf nd*bd"]:
    f, d = w.shape[-2:]
    return pad_last(w.codes, blocks_size(f, w.block[0]), blocks_size(d, w.block[1]))


def dequantize_fp8(w: FP8Tensor, dtype: jnp.dtype) -> Float[Array, "... f d"]:
    f, d = w.shape[-2:]
    y = dequantize_fp8_p(whole_blocks(w), w.scales, format=w.format, dtype=dtype)
    return y[..., :f, :d]


def multiply_fp8(
    x: Float[Array, "... d"], w: FP8Tensor, compute_dtype: jnp.dtype | None
) -> Float[Array, "... f"]:
    f, d = w.shape
    if x.shape[-1:] != (d,):
        raise TypeError(
            f"quantized_matmul: `x` must be [..., {d}] as `w` is {w.shape}, got "
            f"{x.shape}."
        )
    codes = whole_blocks(w)
    x = pad_last(x, codes.shape[1])
    options = {"format": w.format, "compute_dtype": compute_dtype}
    return fp8_matmul_p(x, codes, w.scales, **options)[..., :f]


def look_up_fp8(
    ids: Integer[Array, "..."], w: FP8Tensor, dtype: jnp.dtype
) -> Float[Array, "... d"]:
    v, d = w.shape
    rows = w.block[0] or v  # rows that share a scale
    scales = jnp.repeat(w.scales, rows, axis=0)[:v]
    codes = pad_last(w.codes, blocks_size(d, w.block[1]))
    y = fp8_embedding_p(ids, codes, scales, format=w.format, dtype=dtype)
    return y[..., :d]


DEQUANTIZE[FP8Tensor] = dequantize_fp8
QUANTIZED_MATMUL[FP8Tensor] = multiply_fp8
QUANTIZED_EMBEDDING[FP8Tensor] = look_up_fp8
