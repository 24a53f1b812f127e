"""Norm and rotation of queries and keys, keys and values to the cache: one launch.

    normed = x / rms(x) * (weight + offset);  y = normed, its pairs turned by (cos, sin)

New queries, keys and values are read once; of a cache the t rows of each sequence are
written and nothing is read, see cache_slots.py. The caches may hold floats or codes, in
sequences or in pages.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call
from jaxkern.gpu.device import next_power_of_2, num_sms
from jaxkern.gpu.triton_call import like, sparse_call
from jaxkern.primitives.turboquant.vector_codec import VectorCodec
from jaxkern.triton.kv_cache.cache_slots import copy_tile
from jaxkern.triton.kv_cache.qk_norm_rope_cache_kernel import qk_norm_rope_cache_kernel
from jaxkern.triton.turboquant.cache_codes import (
    constants_of,
    unsupported_codec,
    vector_of,
)

LONGEST = 2048  # dims of a vector: a program holds one whole


def unsupported(*, key_codec=None, value_codec=None, **named) -> str | None:
    """A reason in words, or None."""
    if named["at_end"]:
        return "`at_end`: the kernel turns the first dims of a head"
    arrays = {name: x for name, x in named.items() if hasattr(x, "shape")}
    for name, x in arrays.items():
        if x.size == 0:
            return f"`{name}` is empty"
        if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1:
            return f"`{name}` is float8"
    for name in ("key", "value"):
        if arrays[name].shape[-1] > LONGEST:
            d = arrays[name].shape[-1]
            return f"vectors of {d} dims, more than {LONGEST}, fill no program"
    for name, codec in (("key", key_codec), ("value", value_codec)):
        reason = codec and unsupported_codec(codec, arrays[name].shape[-1])
        if reason:
            return reason
    return triton_call.unsupported(**arrays)


def tile_sizes() -> dict:
    """Few ELEMENTS a program: a decode step has few, for many multiprocessors."""
    return {"ELEMENTS": 1024, "num_warps": 4}


def write(
    new: Sequence[jax.Array | None],
    caches: Sequence[jax.Array | None],
    places: Sequence[jax.Array | None],
    codecs: Sequence[VectorCodec | None],
    slots: int,
    ring: bool,
    eps: float | None,
    offset: float,
    pairing: str,
    pair_offset: int,
    at_end: bool,
    value_eps: float | None = None,
) -> tuple[jax.Array | None, ...]:
    """The launch.

    Args:
      new: query, key, value, query_weight, key_weight, cos, sin.
      caches: keys, their scales, values, their scales.
      places: positions, new_lengths, slots.
      codecs: of keys and of values.
      slots: of one sequence, or of all pages.
      ring, eps, offset, pairing, pair_offset, at_end, value_eps: options of the op.
    """
    del at_end  # refused
    query, key, value, *_, cos, _ = new
    assert query is not None and key is not None and value is not None
    assert cos is not None
    b, t, n, h = query.shape
    k, hv = value.shape[2:]
    sizes = tile_sizes()
    rows, value_rows = (
        max(1, sizes["ELEMENTS"] // next_power_of_2(d)) for d in (h, hv)
    )
    programs = [-(-b * t * heads // rows) for heads in (n, k)]
    programs.append(-(-b * t * k // value_rows))
    cache_rows = slots * (b if places[2] is None else 1)
    copies = [
        None if c is None else copy_tile(c.shape[-2] * c.shape[-1]) for c in caches
    ]
    copy_programs = min(num_sms(), cache_rows)
    apart = 0 if pairing == "interleaved" else pair_offset
    read = ("query", "key", "value", "query_weight", "key_weight", "cos", "sin")
    parts = ("key_cache", "key_scales", "value_cache", "value_scales")
    names = (
        *read,
        *(f"old_{part}" for part in parts),
        *("positions", "lengths", "slots"),
        *("key_signs", "key_midpoints", "value_signs", "value_midpoints"),
    )
    held = [*constants_of(h, codecs[0]), *constants_of(hv, codecs[1])]
    given = [*new, *caches, *places, *held]
    return sparse_call(
        qk_norm_rope_cache_kernel,
        (sum(programs) + copy_programs,),
        {f"{name}_ptr": x for name, x in zip(names, given, strict=True)},
        {"y_query_ptr": like(query)}
        | {f"{part}_ptr": like(x) for part, x in zip(parts, caches, strict=True)},
        {
            "CALL": (b * t, t, slots, ring, cache_rows),
            "N": n,
            "K": k,
            "HEAD": (h, next_power_of_2(h), cos.shape[-1], apart, eps, offset),
            "KEY": vector_of(h, codecs[0]),
            "VALUE": vector_of(hv, codecs[1]),
            "VALUE_EPS": value_eps,
            "QUERY_PROGRAMS": programs[0],
            "KEY_PROGRAMS": programs[1],
            "ROWS": rows,
            "VALUE_ROWS": value_rows,
            "VALUE_PROGRAMS": programs[2],
            "COPY_PROGRAMS": copy_programs,
            **{
                f"{part.removesuffix('_cache').upper()}_COPY": copy
                for part, copy in zip(parts, copies, strict=True)
            },
            "num_warps": sizes["num_warps"],
        },
        in_place={f"old_{part}_ptr": f"{part}_ptr" for part in parts},
    )


def qk_norm_rope_cache(*operands, ring, **options):
    *new, key_cache, value_cache, positions, new_lengths = operands
    query, keys, _, values, _ = write(
        new,
        (key_cache, None, value_cache, None),
        (positions, new_lengths, None),
        (None, None),
        key_cache.shape[1],
        ring,
        **options,
    )
    return query, keys, values


def qk_norm_rope_quantized_cache(*operands, key_codec, value_codec, ring, **options):
    *new, key_codes, key_scales, value_codes, value_scales, positions, lengths = (
        operands
    )
    return write(
        new,
        (key_codes, key_scales, value_codes, value_scales),
        (positions, lengths, None),
        (key_codec, value_codec),
        key_codes.shape[1],
        ring,
        **options,
    )
