"""How the codes of a cache are decoded: its format, table and rotation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.gpu.device import compute_capability
from jaxkern.primitives.turboquant.lloyd_max import lloyd_max_codebook
from jaxkern.primitives.turboquant.vector_codec import (
    Float8Codec,
    IntCodec,
    VectorCodec,
    group_size,
    num_dims,
)
from jaxkern.triton.attention.quantized_cache_attention.layouts import (
    Format,
    Part,
    can_be_copied,
    padded_dims,
    parts_of,
)
from jaxkern.triton.attention.quantized_cache_attention.levels import FLOAT8, INT4, INT8

# by bits of a code
FORMATS = {
    16: Format(16, 0, 0),  # float16 or bfloat16, not codes
    8: Format(8, 0, 1),
    7: Format(4, 3, 1),
    6: Format(4, 2, 1),
    5: Format(4, 1, 1),
    4: Format(4, 0, 2),
    3: Format(2, 1, 2),
    2.25: Format(2, 1, 2, later=64),
    2: Format(2, 0, 2),
    1: Format(1, 0, 2),
}
LONGEST = 256  # dims of a vector
FLOAT8_SINCE = 89  # the compute capability that converts them


def form_of(codec: VectorCodec | None) -> Format:
    """The format of a cache: of `FORMATS`, or one whose levels are computed."""
    if codec is None:
        return FORMATS[16]
    if codec.bits == 8 and isinstance(codec, IntCodec):
        return INT8
    if codec.bits == 4 and isinstance(codec, IntCodec) and (codec.group or 8) >= 8:
        return INT4
    if isinstance(codec, Float8Codec) and compute_capability() >= FLOAT8_SINCE:
        return FLOAT8
    return FORMATS[codec.bits]


class Cache(NamedTuple):
    """What the kernel knows of a cache.

    Attributes:
      dims: of a vector.
      room: dims that the kernel has, zeros behind those of a vector.
      form: see `form_of`.
      groups: scales that the kernel has of a vector.
      parts: see `parts_of`.
    """

    dims: int
    room: int
    form: Format
    groups: int
    parts: tuple[Part, Part, Part]


def cache_of(
    x: jax.Array, scales: jax.Array | None, codec: VectorCodec | None, keys: bool
) -> Cache:
    """Of codes or floats `[..., bytes or h]` and scales `[..., groups]`."""
    form = form_of(codec)
    d = row = x.shape[-1]
    if codec is not None:
        d = num_dims("quantized_cache_attention", codec, row)
    room = padded_dims(d, form, 4 if keys else 8)
    groups = 0 if scales is None else scales.shape[-1]
    parts = parts_of(d, room, form, row * x.dtype.itemsize, groups, keys)
    return Cache(d, room, form, parts[2].room // 4, parts)


def unsupported_cache(
    x: jax.Array, scales: jax.Array | None, codec: VectorCodec | None
) -> str | None:
    """A reason in words, or None."""
    if codec is None and x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {x.dtype}"
    if codec is not None and codec.bits not in FORMATS:
        return f"codes of {codec.bits} bits"
    cache = cache_of(x, scales, codec, False)
    if cache.dims > LONGEST:
        return f"head dim {cache.dims}, above {LONGEST}"
    if codec is not None and cache.groups > 1:
        size = group_size(codec, cache.dims)
        if size & (size - 1):
            return f"scales of {size} dims each, no power of 2"
    for part in cache.parts:
        if part.room and not can_be_copied(part):
            return f"vectors of {part.vector} bytes whose parts are no whole words"
    return None


def tables_of(key_codec: VectorCodec | None, value_codec: VectorCodec | None):
    """The tables of keys and of values, no second one if it is the first."""
    codecs = key_codec, value_codec
    forms = [form_of(codec) for codec in codecs]
    ours, theirs = map(entries, codecs, forms)
    if ours is not None and theirs is not None and np.array_equal(ours, theirs):
        theirs = None
    return ours, theirs


def signs_of(codec: VectorCodec | None, d: int) -> np.ndarray | None:
    """The diagonal of an orthonormal rotation: its signs times d^-1/2."""
    signs = None if codec is None else codec.signs(d)
    return None if signs is None else (signs * d**-0.5).astype(np.float32)


def entries(codec: VectorCodec | None, form: Format) -> np.ndarray | None:
    """int32 words, each the levels of one or two codes in its low and high half."""
    if codec is None or form.together < 1:
        return None
    if codec.bits == 2.25:
        parts = ((lloyd_max_codebook(bits), FORMATS[bits]) for bits in (3, 2))
        words = np.concatenate([words_of(*part) for part in parts])
        return np.pad(words, (0, 128 - words.size))  # a power of two
    return words_of(codec.table(), form)


def words_of(table: np.ndarray, form: Format) -> np.ndarray:
    """`entries` of levels for which a form has all bits."""
    width, behind, together = form.width, form.behind, form.together
    words = table.astype(np.float16).view(np.uint16).astype(np.uint32)
    if together == 1:
        return words.view(np.int32)
    number = np.arange(words.size**2)
    mains = number & (1 << 2 * width) - 1
    others = number >> 2 * width
    low, high = (
        (mains >> width * i & (1 << width) - 1)
        | (others >> behind * i & (1 << behind) - 1) << width
        for i in (0, 1)
    )
    return (words[low] | words[high] << 16).view(np.int32)
