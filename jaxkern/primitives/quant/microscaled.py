"""NVFP4, MXFP4 and MXFP8 weights: quantised, decoded, multiplied, looked up.

w = element * scale of its group * global_scale; the formats: `microscaled_tensor.py`.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.float8 import decode_float8, encode_float8
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.quant.dequantize import DEQUANTIZE
from jaxkern.primitives.quant.fp4 import (
    decode_e2m1,
    encode_e2m1,
    pack_pairs,
    unpack_pairs,
)
from jaxkern.primitives.quant.microscaled_tensor import (
    MICROSCALED,
    MicroscaledTensor,
    format_of,
    microscaled_width,
)
from jaxkern.primitives.quant.quantized_embedding import QUANTIZED_EMBEDDING
from jaxkern.primitives.quant.quantized_family import QuantizedFamily
from jaxkern.primitives.quant.quantized_matmul import QUANTIZED_MATMUL
from jaxkern.primitives.quant.quantized_matmul_id import QUANTIZED_MATMUL_ID
from jaxkern.primitives.quant.rounding import divide

NVFP4_RANGE = 6 * 448  # largest element times largest scale


@check_arguments
def quantize_microscaled(
    w: Float[Array, "... f d"], *, format: str = "nvfp4", two_level: bool = True
) -> MicroscaledTensor:
    """Quantises the last dim in groups of small floats with a scale each.

        nvfp4:  global_scale = max|w of the matrix| / (6 * 448)
                scale = e4m3fn(max|w of the group| / 6 / global_scale)
        mx:     scale = 2**ceil(log2(max|w of the group| / largest element))
        element = nearest(w / scale / global_scale), ties to even, saturating

    Bit for bit that of `mx.quantize`, but for what its CPU version does alone: ties of
    e2m1 go toward zero and zeros lose their sign. The scale of mx is rounded up, so
    that nothing saturates; the OCP text rounds it down. A group of zeros has scale 0 in
    nvfp4 and 1 in mx. Computed in float32; the result carries no gradient. On a GPU
    XLA's quotients may be a unit in the last place off, so a tie may fall otherwise.

    Source: https://arxiv.org/abs/2310.10537, https://arxiv.org/abs/2509.25149.

    Args:
      w: `[..., f, d]`, any float dtype; d a multiple of the group, 16 or 32.
      format: "nvfp4", "mxfp4" or "mxfp8".
      two_level: nvfp4 with a global scale, which a range beyond e4m3fn's needs.

    Returns:
      The container.

    Raises:
      TypeError: the group does not divide d.
      ValueError: `format` is none of the three.

    Example:
      >>> w = jaxkern.quantize_microscaled(jnp.ones((2, 32)), format="mxfp4")
      >>> w.codes.shape, w.scales.shape  # two codes a byte, a scale for 32
      ((2, 16), (2, 1))
      >>> jaxkern.dequantize(w)[0, :3]
      Array([1., 1., 1.], dtype=float32)
    """
    form = format_of("quantize_microscaled", format)
    if w.ndim < 2 or w.shape[-1] % form.group_size:
        raise TypeError(
            f"quantize_microscaled: `w` must be [..., f, d] with d a multiple of "
            f"{form.group_size}, got {w.shape}."
        )
    w = lax.stop_gradient(w)
    global_scale = widen = None
    if form.scale == "e4m3fn" and two_level:
        largest = jnp.abs(w).astype(jnp.float32)
        largest = jnp.max(largest, axis=(-2, -1), keepdims=True, initial=0)
        largest = jnp.where(largest > 0, largest, NVFP4_RANGE)[..., 0]  # [..., 1]
        global_scale = divide(largest, NVFP4_RANGE)[..., 0]
        widen = divide(jnp.full_like(largest, NVFP4_RANGE), largest)
        widen = jnp.broadcast_to(widen, w.shape[:-1])
    codes, scales = quantize_microscaled_p(w, widen, format=format)
    return MicroscaledTensor(codes, scales, global_scale, format)


def quantize_microscaled_reference(
    w: Float[Array, "... n*g"], widen: Float[Array, "..."] | None, *, format: str
) -> tuple[UInt8[Array, "... n*c"], UInt8[Array, "... n"]]:
    form = MICROSCALED[format]
    *lead, d = w.shape
    groups = w.astype(jnp.float32).reshape(*lead, d // form.group_size, form.group_size)
    amax = jnp.max(jnp.abs(groups), axis=-1, initial=0)
    ratio = divide(amax, form.largest)
    if form.scale == "e8m0":
        scales, unit = encode_power_of_two(ratio)
    else:
        wide = jnp.ones_like(ratio)
        if widen is not None:
            wide = widen.astype(jnp.float32)[..., None]
        scales = encode_float8(ratio * wide, "e4m3fn")
        scale = decode_float8(scales, "e4m3fn")
        unit = jnp.where(scale == 0, 0, wide / jnp.where(scale == 0, 1, scale))
    elements = (groups * unit[..., None]).reshape(w.shape)
    if form.bits == 4:
        return pack_pairs(encode_e2m1(elements)), scales
    return encode_float8(elements, "e4m3fn"), scales


quantize_microscaled_p = kernel_primitive(
    quantize_microscaled_reference,
    replicated=("g", "c"),  # a scale is of the largest of its group
)


def encode_power_of_two(
    x: Float[Array, "..."],
) -> tuple[UInt8[Array, "..."], Float[Array, "..."]]:
    """The e8m0 code of the least power of two not below x (1 for 0), its reciprocal."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    code = (bits >> 23) + ((bits & 0x7FFFFF) != 0)  # a float32 is 2**(code - 127) * 1.m
    code = jnp.where(x > 0, jnp.minimum(code, 254), 127)
    code = jnp.where(jnp.isfinite(x), code, 255)
    reciprocal = lax.bitcast_convert_type(jnp.maximum(254 - code, 1) << 23, jnp.float32)
    return code.astype(jnp.uint8), reciprocal


def decode_microscaled(
    codes: UInt8[Array, "... n*c"],
    scales: UInt8[Array, "... n"],
    global_scale: Float[Array, "..."] | None = None,
    *,
    format: str,
    dtype: jnp.dtype | None,
) -> Float[Array, "... n*g"]:
    """The weights, computed in float32 or wider and rounded once to `dtype`, if any."""
    form = MICROSCALED[format]
    *lead, n = scales.shape
    grouped = codes.reshape(*lead, n, form.group_size * form.bits // 8)
    if form.bits == 4:
        element = decode_e2m1(unpack_pairs(grouped))
    else:
        element = decode_float8(grouped, "e4m3fn")
    if form.scale == "e8m0":
        exponent = scales.astype(jnp.int32)[..., None]
        # 2**-127 is subnormal, which a platform may flush: halve the element instead
        element = jnp.where(exponent == 0, element / 2, element)
        scale = lax.bitcast_convert_type(jnp.maximum(exponent, 1) << 23, jnp.float32)
        scale = jnp.where(exponent == 255, jnp.nan, scale)
    else:
        scale = decode_float8(scales, "e4m3fn")[..., None]
    if global_scale is not None:
        scale = scale * at_least_f32(global_scale)[..., None, None]
    w = (element * scale).reshape(*lead, n * form.group_size)
    return w if dtype is None else w.astype(dtype)


def factor_of_rows(w: MicroscaledTensor) -> Float[Array, "..."] | None:
    """The factor of its matrix for each row."""
    if w.global_scale is None:
        return None
    rows = w.shape[:-1]
    return jnp.broadcast_to(w.global_scale[..., None] if rows else w.global_scale, rows)


FAMILY = QuantizedFamily(
    arrays={
        "codes": UInt8[Array, "f n*c"],
        "scales": UInt8[Array, "f n"],
        "global_scale": Float[Array, " f"],
    },
    optional=("global_scale",),
    layout=("format",),
    decode=decode_microscaled,
    width=lambda op, codes, scales, _, format: microscaled_width(
        op, codes, scales, format
    ),
    whole=("n", "c", "g"),  # as in quantized_matmul, a device decodes whole rows
    columns="n*g",
    arrays_of=lambda w: (w.codes, w.scales, factor_of_rows(w)),
)
dequantize_microscaled_p = FAMILY.dequantize(
    "dequantize_microscaled",
    __name__,
    whole=("c", "g"),  # a group has one scale
)
microscaled_matmul_p = FAMILY.matmul("microscaled_matmul", __name__)
microscaled_embedding_p = FAMILY.embedding("microscaled_embedding", __name__)
microscaled_matmul_id_p = FAMILY.matmul_id("microscaled_matmul_id", __name__)

DEQUANTIZE[MicroscaledTensor] = FAMILY.reader(dequantize_microscaled_p, "dtype")
QUANTIZED_MATMUL[MicroscaledTensor] = FAMILY.reader(
    microscaled_matmul_p, "compute_dtype"
)
QUANTIZED_EMBEDDING[MicroscaledTensor] = FAMILY.reader(microscaled_embedding_p, "dtype")
QUANTIZED_MATMUL_ID[MicroscaledTensor] = FAMILY.reader(
    microscaled_matmul_id_p, "compute_dtype"
)
