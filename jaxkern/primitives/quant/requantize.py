"""From one format to another: exactly where the target can hold the weights."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.quant.affine_tensor import AffineTensor, pack_codes
from jaxkern.primitives.quant.block_fields import Unpacked
from jaxkern.primitives.quant.block_formats import KERNEL_FORMATS
from jaxkern.primitives.quant.dequantize import dequantize
from jaxkern.primitives.quant.fp8 import quantize_fp8
from jaxkern.primitives.quant.gguf_blocks import BLOCK_FORMATS
from jaxkern.primitives.quant.gguf_tensor import GGUFTensor
from jaxkern.primitives.quant.gguf_ternary import UNPACK_TERNARY
from jaxkern.primitives.quant.int_tensor import IntTensor, pack_int, quantize_int
from jaxkern.primitives.quant.microscaled import quantize_microscaled
from jaxkern.primitives.quant.nf4 import quantize_nf4
from jaxkern.primitives.quant.quantize_affine import quantize_affine
from jaxkern.primitives.quant.quantize_gguf import ENCODERS, quantize_gguf
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor

GGUF_TYPES = tuple(dict.fromkeys(qtype for qtype, _ in ENCODERS))
FLOAT_FORMATS = ("nvfp4", "mxfp4", "mxfp8")

QUANTIZE: dict[str, Callable[..., QuantizedTensor]] = {  # (w [..., d], **options)
    "affine": quantize_affine,
    "int": quantize_int,
    "fp8": quantize_fp8,
    **{f: functools.partial(quantize_microscaled, format=f) for f in FLOAT_FORMATS},
    **{q: functools.partial(quantize_gguf, qtype=q) for q in GGUF_TYPES},
    "nf4": quantize_nf4,
}

# Formats of one affine step in groups of 32 or more: their smallest code, their bits;
# bytes for the entries of a table. The scales of MXFP4 reach below the least normal
# float32.
AFFINE_CODES = {
    q: (-codes.zero, 8 if codes.table else codes.bits)
    for q, codes in KERNEL_FORMATS.items()
    if codes.group == 32 and q != "MXFP4"
} | dict.fromkeys(UNPACK_TERNARY, (-1, 2))
LARGEST_GROUP = 128  # of MLX
# Formats without an offset: the bits of their signed codes.
INT_CODES = {
    q: 4 if codes.bits <= 4 and not codes.table else 8
    for q, codes in KERNEL_FORMATS.items()
    if not codes.offset and q != "MXFP4"
}


@check_arguments
def requantize(
    w: Float[Array, "... d"] | QuantizedTensor, to: str, **options: Any
) -> QuantizedTensor:
    """The weights in another format.

    A `GGUFTensor` becomes the very same weights, bit by bit, where the target has room
    for its codes and the options do not ask for something else:

        "affine"  Q4_0 Q4_1 Q4_K (4 bits), Q5_0 Q5_1 Q5_K (5), Q8_0 IQ4_NL IQ4_XS (8),
                  groups of 32; TQ1_0 TQ2_0 (2), groups of 128
        "int"     Q4_0 (4 or 8 bits, groups of 32), Q5_0 Q8_0 IQ4_NL IQ4_XS (8, 32),
                  Q3_K (4 or 8, 16), Q6_K NVFP4 (8, 16)

    with float32 scales, and of its own GGUF type it stays as it is. Everything else is
    decoded and quantised anew.

    Args:
      w: `[..., d]`, an array or any container.
      to: "affine", "int", "fp8", "nf4", "nvfp4", "mxfp4", "mxfp8" or a GGUF type that
        `quantize_gguf` knows.
      options: those of `quantize_affine`, `quantize_int`, `quantize_fp8`,
        `quantize_nf4`, `quantize_microscaled`, `quantize_gguf`.

    Returns:
      A container of the same shape.

    Raises:
      ValueError: no such format.
      TypeError: the dims do not fit the format.

    Example:
      >>> w = jaxkern.quantize_gguf(jnp.arange(64.0).reshape(2, 32), "Q8_0")
      >>> affine = jaxkern.requantize(w, "affine")  # the very same weights
      >>> bool((jaxkern.dequantize(affine) == jaxkern.dequantize(w)).all())
      True
    """
    same = isinstance(w, GGUFTensor) and w.qtype == to
    if to not in QUANTIZE and not (same and not options):
        raise ValueError(
            f"requantize: `to` must be one of {', '.join(QUANTIZE)}, got {to!r}."
        )
    if isinstance(w, GGUFTensor):
        for exact in exact_forms(w, to):
            if options.items() <= vars(exact).items():
                return exact
    values = w if hasattr(w, "dtype") else dequantize(w)  # type: ignore[arg-type]
    return QUANTIZE[to](values, **options)


def exact_forms(w: GGUFTensor, to: str) -> Iterator[QuantizedTensor]:
    """The containers of kind `to` that hold exactly the weights of `w`."""
    if to == w.qtype:
        yield w
    if to == "affine" and w.qtype in AFFINE_CODES:
        yield _as_affine(w, *AFFINE_CODES[w.qtype])
    if to == "int" and w.qtype in INT_CODES:
        for bits in (4, 8):
            if bits >= INT_CODES[w.qtype]:
                yield _as_int(w, bits)


def _as_affine(w: GGUFTensor, low: int, bits: int) -> AffineTensor:
    code, scale, offset = _unpack(w)
    # w = scale * (code - low) + scale * low: both products are exact, so is their sum
    bias = scale * low if offset is None else offset
    codes = (code.astype(jnp.int32) - low).astype(jnp.uint8).reshape(w.shape)
    size = min(code.shape[-1], LARGEST_GROUP)
    scales, biases = (
        _by_group(jnp.repeat(a, code.shape[-1] // size, axis=-1)) for a in (scale, bias)
    )
    return AffineTensor(pack_codes(codes, bits), scales, biases, bits, size)


def _as_int(w: GGUFTensor, bits: int) -> IntTensor:
    code, scale, _ = _unpack(w)
    codes = pack_int(code.astype(jnp.int32).reshape(w.shape), bits, True)
    return IntTensor(codes, _by_group(scale), bits=bits, group_size=code.shape[-1])


def _unpack(w: GGUFTensor) -> Unpacked:
    form = BLOCK_FORMATS[w.qtype]
    assert form.unpack is not None  # the tables name no plain floats
    blocks = w.blocks.reshape(*w.shape[:-1], w.shape[-1] // form.elements, form.bytes)
    return form.unpack(blocks)


def _by_group(a: Float[Array, "... blocks groups n"]) -> Float[Array, "... groups"]:
    return a.reshape(*a.shape[:-3], math.prod(a.shape[-3:]))
