"""NF4 weights: quantised, read, decoded, multiplied, looked up; see `nf4_tensor.py`."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.quant.dequantize import DEQUANTIZE
from jaxkern.primitives.quant.nf4_tensor import (
    LEVELS,
    OUTER_SIZE,
    NF4Tensor,
    check_group_size,
    decode_nf4,
    dynamic_levels,
    nf4_width,
)
from jaxkern.primitives.quant.quantized_embedding import QUANTIZED_EMBEDDING
from jaxkern.primitives.quant.quantized_family import QuantizedFamily
from jaxkern.primitives.quant.quantized_matmul import QUANTIZED_MATMUL
from jaxkern.primitives.quant.quantized_matmul_id import QUANTIZED_MATMUL_ID
from jaxkern.primitives.quant.rounding import divide


@check_arguments
def quantize_nf4(
    w: Float[Array, "... d"], *, group_size: int = 64, quantized_scales: bool = False
) -> NF4Tensor:
    """Rounds weights to the nearest of 16 quantiles of a normal distribution.

        absmax = max |w| over the group,    code = nearest level to w / absmax
        with quantized_scales, over each 256 groups of a row:
        offset = mean(absmax),    scale = max |absmax - offset|
        scale_code = nearest dynamic level to (absmax - offset) / scale

    bitsandbytes takes the mean over the whole matrix, and 256 groups across rows; both
    are read by `nf4_from_bitsandbytes`. 4.5 bits a weight with groups of 64, 4.13 with
    quantised scales. Codes are constants of differentiation, absmax follows the
    largest weight.

    Source: https://arxiv.org/abs/2305.14314.

    Args:
      w: `[..., d]`, any float dtype.
      group_size: weights that share an absmax; even, divides d.
      quantized_scales: keep absmax in 8 bits.

    Returns:
      The container, its scales in float32 (float64 for a float64 `w`).

    Raises:
      TypeError: `group_size` does not divide d.

    Example:
      >>> w = jaxkern.quantize_nf4(jnp.ones((3, 64)))
      >>> jaxkern.quantized_matmul(jnp.ones((2, 64)), w)
      Array([[64., 64., 64.],
             [64., 64., 64.]], dtype=float32)
    """
    *lead, d = w.shape
    check_group_size("quantize_nf4", group_size, d)
    groups = d // group_size
    wide = w.astype(jnp.promote_types(w.dtype, jnp.float32))
    parts = wide.reshape(*lead, groups, group_size)
    absmax = jnp.max(jnp.abs(parts), axis=-1)
    unit = divide(parts, jnp.where(absmax == 0, 1, absmax)[..., None])
    code = nearest(unit, np.array(LEVELS)).reshape(*lead, d // 2, 2)
    codes = (code[..., 0] << 4 | code[..., 1]).astype(jnp.uint8)
    if not quantized_scales:
        return NF4Tensor(codes, absmax, group_size=group_size)
    n = -(-groups // OUTER_SIZE)
    short = [(0, 0)] * len(lead) + [(0, n * OUTER_SIZE - groups)]
    blocks = jnp.pad(absmax, short).reshape(*lead, n, OUTER_SIZE)
    held = (jnp.arange(n * OUTER_SIZE) < groups).reshape(n, OUTER_SIZE)
    offset = jnp.sum(blocks, axis=-1) / jnp.sum(held, axis=-1)
    rest = jnp.where(held, blocks - offset[..., None], 0)
    scale = jnp.max(jnp.abs(rest), axis=-1)
    unit = divide(rest, jnp.where(scale == 0, 1, scale)[..., None])
    scale_codes = nearest(unit, dynamic_levels()).astype(jnp.uint8)
    scale_codes = scale_codes.reshape(*lead, n * OUTER_SIZE)[..., :groups]
    return NF4Tensor(codes, scale, scale_codes, offset, group_size)


def nearest(x: Float[Array, "..."], levels: np.ndarray) -> Array:
    """Place of the nearest of ascending levels; the lower one where two are as near."""
    middles = jnp.asarray((levels[:-1] + levels[1:]) / 2, x.dtype)
    return jnp.searchsorted(middles, x, side="left").astype(jnp.int32)


@check_arguments
def nf4_from_bitsandbytes(
    weight: UInt8[Array, "..."],
    absmax: Float[Array, "..."] | UInt8[Array, "..."],
    shape: tuple[int, int],
    *,
    nested_absmax: Float[Array, "..."] | None = None,
    nested_offset: Float[Array, "..."] | float = 0.0,
    group_size: int = 64,
) -> NF4Tensor:
    """The NF4 weight of a bitsandbytes checkpoint (https://arxiv.org/abs/2305.14314).

        w = level(code) * absmax      of each group; no number is rounded

    Args:
      weight: uint8 of f * d / 2 bytes in any shape, as stored.
      absmax: one for each `group_size` weights: float, or uint8 where it is nested.
      shape: (f, d) of the weight, in the quant state; `group_size` divides d.
      nested_absmax: one for each 256 entries of a nested `absmax`, else None.
      nested_offset: the mean that was taken off a nested absmax before, one number.
      group_size: the quant state's `blocksize`.

    Returns:
      The container `[f, d]`. Scales stay quantised where 256 groups begin and end with
      rows; else they are decoded to float32.

    Raises:
      TypeError: sizes do not fit.

    Example:
      >>> weight = jnp.full((32, 1), 0xF7, jnp.uint8)  # levels 1 and 0, as stored
      >>> w = jaxkern.nf4_from_bitsandbytes(weight, jnp.array([2.0]), (1, 64))
      >>> jaxkern.dequantize(w)[0, :4]
      Array([2., 0., 2., 0.], dtype=float32)
    """
    f, d = shape
    check_group_size("nf4_from_bitsandbytes", group_size, d)
    groups = d // group_size
    if weight.dtype != jnp.uint8 or 2 * weight.size != f * d:
        raise TypeError(
            f"nf4_from_bitsandbytes: `weight` must be uint8 of {f * d // 2} bytes, got "
            f"{weight.dtype}{list(weight.shape)}."
        )
    nested = nested_absmax is not None
    if absmax.size != f * groups or (absmax.dtype == jnp.uint8) != nested:
        raise TypeError(
            f"nf4_from_bitsandbytes: `absmax` must have {f * groups} numbers, uint8 "
            f"with a `nested_absmax` and else float, got {absmax.dtype}"
            f"{list(absmax.shape)}."
        )
    codes, absmax = weight.reshape(f, d // 2), absmax.reshape(f, groups)
    if nested_absmax is None:
        return NF4Tensor(codes, absmax, group_size=group_size)
    outer = jnp.asarray(nested_absmax).reshape(-1)
    if outer.size != -(-f * groups // OUTER_SIZE):
        raise TypeError(
            f"nf4_from_bitsandbytes: `nested_absmax` must have "
            f"{-(-f * groups // OUTER_SIZE)} numbers, got {outer.size}."
        )
    offset = jnp.asarray(nested_offset, outer.dtype)
    if groups and (OUTER_SIZE % groups == 0 or groups % OUTER_SIZE == 0):
        rows = jnp.arange(f)[:, None] * groups
        first = jnp.arange(0, groups, OUTER_SIZE)  # of each block in a row
        scales = outer[(rows + first) // OUTER_SIZE]
        offsets = jnp.full_like(scales, 1) * offset
        return NF4Tensor(codes, scales, absmax, offsets, group_size)
    each = jnp.repeat(outer, OUTER_SIZE)[: f * groups].reshape(f, groups)
    decoded = jnp.asarray(dynamic_levels())[absmax] * each + offset
    return NF4Tensor(codes, decoded, group_size=group_size)


NF4 = QuantizedFamily(
    arrays={
        "codes": UInt8[Array, "f bytes"],
        "scale_codes": UInt8[Array, "f groups"],
        "scales": Float[Array, "f outer"],
        "offsets": Float[Array, "f outer"],
    },
    optional=("scale_codes", "offsets"),
    layout=("group_size",),
    decode=decode_nf4,
    width=nf4_width,
    whole=("d", "bytes", "groups", "outer"),  # a scale spans all of them
)
dequantize_nf4_p = NF4.dequantize("dequantize_nf4", __name__)
nf4_matmul_p = NF4.matmul("nf4_matmul", __name__)
nf4_embedding_p = NF4.embedding("nf4_embedding", __name__)
nf4_matmul_id_p = NF4.matmul_id("nf4_matmul_id", __name__)

DEQUANTIZE[NF4Tensor] = NF4.reader(dequantize_nf4_p, "dtype")
QUANTIZED_MATMUL[NF4Tensor] = NF4.reader(nf4_matmul_p, "compute_dtype")
QUANTIZED_EMBEDDING[NF4Tensor] = NF4.reader(nf4_embedding_p, "dtype")
QUANTIZED_MATMUL_ID[NF4Tensor] = NF4.reader(nf4_matmul_id_p, "compute_dtype")
