"""Packed weights of folders put together: matrices with one input, experts."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern import (
    AffineTensor,
    FP8Tensor,
    InterleavedTensor,
    IntTensor,
    MicroscaledTensor,
    NF4Tensor,
    dequantize,
    interleave,
    quantize_fp8,
)
from jaxkern.models.products import Matrices, Matrix
from jaxkern.primitives.float8 import decode_float8, encode_float8
from jaxkern.primitives.quant.interleaved_tensor import ROWS
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor
from jaxkern.primitives.quant.tile_blocks import tile_format

STEP = 256  # columns that the kernel for one activation takes at once
NAN_POWER = 255  # the scale of MXFP4 that is no number, for which blocks have no room
in_tiles = jax.jit(interleave)


def in_tiles_of(w: QuantizedTensor, formats: Collection[str]) -> QuantizedTensor:
    """The same weights `[f, d]`, 16 rows side by side if it is one of the formats."""
    return w if w.shape[-1] % STEP or not fits(w, formats) else in_tiles(w)


def experts_in_tiles(w: QuantizedTensor, formats: Collection[str]) -> QuantizedTensor:
    """Likewise experts `[e, f, d]` of MXFP4 and NVFP4; d may end within a step."""
    if not isinstance(w, MicroscaledTensor) or not fits(w, formats):
        return w
    return in_tiles(w)


def fits(w: QuantizedTensor, formats: Collection[str]) -> bool:
    """Whether its blocks are of one of the formats, 16 rows of them side by side."""
    if w.shape[-2] % ROWS or tile_format(w) not in formats:
        return False
    if isinstance(w, MicroscaledTensor) and w.format == "mxfp4":
        return not bool((w.scales == NAN_POWER).any())
    return True


def side_by_side(parts: Sequence[Matrix]) -> Matrices:
    """Containers of packed weights with their rows in one where they lie alike.

    So a product reads the activations once. A scale or an order of the whole matrix
    keeps it apart.
    """
    joined: list[Matrix] = []
    for w in parts:
        if joined and alike([joined[-1], w]) and has_rows_apart(joined[-1]):
            joined[-1] = jax.tree.map(lambda *a: jnp.concatenate(a), joined[-1], w)
        else:
            joined.append(w)
    return tuple(joined)


def has_rows_apart(w: Matrix) -> bool:
    """Whether rows can be put behind it."""
    if isinstance(w, IntTensor):
        return w.order is None
    if isinstance(w, FP8Tensor):
        rows = w.block[0]
        return rows > 0 and w.shape[0] % rows == 0
    if isinstance(w, MicroscaledTensor):
        return w.global_scale is None
    return isinstance(w, AffineTensor | NF4Tensor | InterleavedTensor)


def alike(parts: Sequence[Matrix]) -> bool:
    """Whether all are one container with the same options, dtypes and row sizes."""

    def form(w: Matrix) -> tuple[Any, ...]:
        leaves, kind = jax.tree.flatten(w)
        return kind, *((a.dtype, a.shape[1:]) for a in leaves)

    return len({form(w) for w in parts}) == 1


def stacked_containers(parts: Sequence[Matrix]) -> QuantizedTensor | None:
    """Experts on a new dim in front; None where they differ, or each has an order."""
    w = parts[0]
    if isinstance(w, jax.Array) or not alike(parts):
        return None
    if isinstance(w, IntTensor) and w.order is not None:
        return None
    return w if len(parts) == 1 else jax.tree.map(lambda *a: jnp.stack(a), *parts)


@jax.jit
def rows_of_blocks(
    w: FP8Tensor,
) -> tuple[FP8Tensor, Float[Array, ""], Float[Array, ""]]:
    """Experts `[e, f, d]` with scales of blocks as rows with one scale each.

    Where the scales of a row are powers of two of each other, as those of DeepSeek-V3.1
    are, its codes change their exponents alone, and the weights stay but for what falls
    below the least exponent. The codes of other rows are rounded once more.

    Returns:
      The experts; the sum of squares that they are off by; that of the weights.
    """
    f = w.shape[-2]

    def one(w: FP8Tensor):
        stored = dequantize(w)
        scales = jnp.repeat(w.scales, w.block[0] or f, axis=-2)[:f]
        scales = scales.astype(jnp.float32)
        largest = scales.max(-1, keepdims=True)
        mantissa, _ = jnp.frexp(scales)
        shifts = (mantissa == jnp.frexp(largest)[0]).all(-1, keepdims=True)
        scale = jnp.where(shifts, largest, quantize_fp8(stored, block=(1, 0)).scales)
        codes = encode_float8(stored / scale, w.format)
        off = decode_float8(codes, w.format) * scale - stored
        return codes, scale, (off**2).sum(), (stored**2).sum()

    # one expert after the other: decoded, all would take four times their bytes
    codes, scales, off, size = jax.lax.map(one, w)
    return FP8Tensor(codes, scales, (1, 0), w.format), off.sum(), size.sum()
