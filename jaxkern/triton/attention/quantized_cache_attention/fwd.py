"""Attention of a few queries over quantised keys and values, each read once.

A warp takes one key head and a share of its tokens. Blocks of codes are copied to
shared memory in advance, each warp's to a part of its own, so that no warp waits for
another. It reads them into the registers in which the tensor cores want them decoded:
four lanes share a key, eight lanes a value, and dims are numbered as the lanes hold
them, which changes no sum and only permutes the result. Where levels are integers of 4
or 8 bits or floats they are computed; else a code, or two of up to 4 bits, is the
number of an entry in a table of float16 levels, of which every lane has a copy in a
bank of its own; up to three planes make the bytes of four numbers at once. A register
of values has two tokens: their codes are put together before they are decoded.

A vector lies in shared memory with zeros up to the next power of two, and so that each
lane has a word: dims that a query has not, and that no result takes.

Scales never meet an element. Those of keys multiply scores; those of values multiply
weights, relative to the largest so far, so that float16 holds them. Where several
scales belong to a vector the largest does that, and levels take the quotients.

Tokens are the rows of the first product and queries its columns, two each: the value in
float16 and what that leaves, so products are exact to 22 bits. Four queries fill the
eight columns of the tensor cores, and a lane has no score of padding. Weights pass to
the second product by transposing 8 by 8 of them. Warps of a program merge their shares
of a head in shared memory, and merge_shares.py those of the programs.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkern.gpu.attention.over_sequences import over_sequences
from jaxkern.gpu.device import num_sms
from jaxkern.gpu.triton_call import gl, max_shared_bytes
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.turboquant.vector_codec import VectorCodec
from jaxkern.triton.attention.decode.attention import (
    FAR,
    MAX_QUERIES,
    MAX_SPLITS,
)
from jaxkern.triton.attention.merge_shares import run_and_merge
from jaxkern.triton.attention.quantized_cache_attention.formats import (
    FORMATS,
    Cache,
    cache_of,
    signs_of,
    tables_of,
    unsupported_cache,
)
from jaxkern.triton.attention.quantized_cache_attention.kernel import (
    quantized_decode_kernel,
)
from jaxkern.triton.attention.quantized_cache_attention.layouts import offsets_of
from jaxkern.triton.attention.quantized_cache_attention.levels import (
    ENTRY_BYTES,
    FLOAT8,
    INT4,
    INT8,
)
from jaxkern.triton.attention.quantized_cache_attention.problem import Problem

# Of keys and values alike, on an H200 at 65536 tokens, batch 1 and 16.
FASTEST = {
    INT8: {"BLOCK": 32, "STAGES": 4, "PER_SM": 2},
    FLOAT8: {"BLOCK": 64, "STAGES": 2, "PER_SM": 2},
    INT4: {"BLOCK": 64, "STAGES": 2, "PER_SM": 1},
    FORMATS[8]: {"BLOCK": 32, "STAGES": 2, "PER_SM": 1},
    FORMATS[7]: {"HEADS": 8, "BLOCK": 32, "STAGES": 2, "PER_SM": 1},
    FORMATS[6]: {"BLOCK": 32, "STAGES": 2, "PER_SM": 1},
    FORMATS[5]: {"BLOCK": 32, "STAGES": 2, "PER_SM": 1},
    FORMATS[4]: {"HEADS": 2, "BLOCK": 64, "STAGES": 2, "PER_SM": 1},
    FORMATS[3]: {"BLOCK": 32, "STAGES": 3, "PER_SM": 2},
    FORMATS[2]: {"BLOCK": 32, "STAGES": 3, "PER_SM": 2},
}
# where that differs for up to 64 dims
FASTEST_NARROW = FASTEST | {FORMATS[7]: {"BLOCK": 32, "STAGES": 2, "PER_SM": 2}}


def unsupported(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    mask: Any = None,
    key_codec: VectorCodec | None = None,
    value_codec: VectorCodec | None = None,
    key_codes: Any = None,
    value_codes: Any = None,
    **rest: Any,
) -> str | None:
    """A reason in words, or None."""
    if rest.get("dout") is not None or rest.get("dlse") is not None:
        return "the gradient has no kernel"
    if mask is not None:
        return "`mask` is not in the decode kernel"
    if query.shape[1] > MAX_QUERIES:
        return f"{query.shape[1]} queries, more than {MAX_QUERIES}"
    given = {
        **{"query": query, "key": key, "value": value},
        **{"key_codes": key_codes, "value_codes": value_codes, **rest},
    }
    for name, x in given.items():
        if getattr(x, "size", 1) == 0:
            return f"`{name}` is empty"
    caches = (
        ("key", key, key_codes, rest.get("key_scales"), key_codec),
        ("value", value, value_codes, rest.get("value_scales"), value_codec),
    )
    for name, x, codes, scales, codec in caches:
        reason = unsupported_cache(codes if x is None else x, scales, codec)
        if reason:
            return f"`{name}` has {reason}"
    return unsupported_anywhere(query=query, sinks=rest.get("sinks"))


def sizes_of(k: int, forms: tuple, groups: int, wide: bool, h: int) -> dict[str, int]:
    """Programs of a multiprocessor, as registers allow, and what each has.

    HEADS: neighbours, that programs read whole lines. SHARES: of the tokens of each.
    BLOCK: tokens of a warp. STAGES: blocks that it has room for. ROUNDS: of programs,
    where sequences can differ in length.

    Args:
      k: key heads.
      forms: formats of keys and of values.
      groups: the most scales that a vector has.
      wide: more than 8 rows of 128 dims.
      h: dims that the kernel has room for.
      dtype: of the cache.
    """
    narrow = not wide and groups <= 1
    table = FASTEST if h > 64 else FASTEST_NARROW
    best = table.get(forms[0], {}) if narrow and forms[0] == forms[1] else {}
    most = best.get("HEADS", 4)
    # a large table is for many warps, and so is a multiprocessor
    bytewise = any(FORMATS[bits] in forms for bits in (4, 7, 8))
    alone = best.get("PER_SM", 1 if bytewise else 2) == 1
    warps = 8 if narrow and alone else most
    rule = {"ROUNDS": 2}
    if wide or (groups > 1 and forms != (INT4, INT4)):
        rule |= {"BLOCK": 16, "STAGES": 3, "PER_SM": 2}
    elif groups > 1:
        rule |= {"BLOCK": 32, "STAGES": 3, "PER_SM": 2}
    elif best:
        rule |= best
    elif bytewise:
        rule |= {"BLOCK": 16, "STAGES": 3, "PER_SM": 1}
    elif any(form.together > 0 for form in forms):
        rule |= {"BLOCK": 16, "STAGES": 4, "PER_SM": 3}
    else:
        rule |= {"BLOCK": 16, "STAGES": 3, "PER_SM": 4}
    heads = math.gcd(k, most)
    return rule | {"HEADS": heads, "SHARES": warps // heads}


def num_shares(pairs: int, blocks: int, rounds: int, slots: int, alone: bool) -> int:
    """Programs for the tokens of each pair, so that all take the slots `rounds` times.

    Args:
      pairs: programs beside each other, of sequences, groups of heads and of rows.
      blocks: of tokens, the most that a program's warps of one head can have.
      rounds: more than one if sequences can differ in length.
      slots: programs that run at once; one more than fit would cost a round.
      alone: a program has a multiprocessor for itself, where the longest share decides:
        no more than have the same longest one, as long as few slots stay empty.
    """
    most = max(min(rounds * slots // pairs, blocks, MAX_SPLITS), 1)
    even = -(-blocks // -(-blocks // most))
    return even if alone and 16 * even >= 15 * most else most


class Room(NamedTuple):
    """The sizes of a program that its shared memory has room for, as Problem has them.

    `per_sm`: programs that a multiprocessor has room for.
    """

    heads: int
    shares: int
    block: int
    stages: int
    region: int
    shared: int
    per_sm: int


def fit(
    sizes: dict[str, int],
    whole: bool,
    rows: int,
    keys: Cache,
    values: Cache,
    tables_bytes: int,
) -> Room:
    """`sizes`, made smaller until a program fits. `whole`: one warp has all tokens."""
    heads, block, stages = sizes["HEADS"], sizes["BLOCK"], sizes["STAGES"]
    shares = 1 if whole else sizes["SHARES"]
    parts = keys.parts + values.parts

    def region() -> int:
        """Blocks of a warp, and later the sums that it leaves for those of its head."""
        sums = 4 * rows * (values.room + 1) if shares > 1 else 0
        return max(stages * offsets_of(block, parts).end, sums)

    while heads * shares * region() > max_shared_bytes() - tables_bytes:
        if block > 16:
            block //= 2
        elif stages > 2:
            stages -= 1
        elif shares > 1:
            shares //= 2
        else:
            heads //= 2
    shared = -(-(tables_bytes + heads * shares * region()) // 128) * 128
    per_sm = min(sizes["PER_SM"], (max_shared_bytes() + 1024) // (shared + 1024))
    return Room(heads, shares, block, stages, region(), shared, per_sm)


def launch(
    query: jax.Array,
    key: jax.Array,
    key_scales: jax.Array | None,
    value: jax.Array,
    value_scales: jax.Array | None,
    kv_lengths: jax.Array | None,
    q_offset: jax.Array | None,
    sinks: jax.Array | None,
    *,
    key_codec: VectorCodec | None,
    value_codec: VectorCodec | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> tuple:
    """The kernels over codes, or 16-bit floats, `[b, s, k, bytes or h]`."""
    b, t, n, h = query.shape
    s, k = key.shape[1:3]
    g = n // k
    key_scales, value_scales = (
        None if x is None else x.astype(jnp.float32) for x in (key_scales, value_scales)
    )
    keys = cache_of(key, key_scales, key_codec, True)
    values = cache_of(value, value_scales, value_codec, False)
    key_table, value_table = tables_of(key_codec, value_codec)
    dims = max(keys.room, values.room)
    rows = 4 if t * g <= 4 else 8 if t * g <= 8 or dims > 128 else 16
    tiles = -(-t * g // rows)
    forms = keys.form, values.form
    wide = max(rows, 8) * dims > 1024
    groups = max(keys.groups, values.groups)
    sizes = sizes_of(k, forms, groups, wide, dims)
    seen = s if window is None else min(s, window + t - 1)
    whole = seen <= sizes["BLOCK"]
    entries = [0 if x is None else x.size for x in (key_table, value_table)]
    room = fit(sizes, whole, rows, keys, values, ENTRY_BYTES * max(entries))
    warps, pairs = room.heads * room.shares, b * (k // room.heads) * tiles
    splits = 1
    if not whole:
        splits = num_shares(
            pairs,
            -(-seen // (room.shares * room.block)),
            sizes["ROUNDS"] if b > 1 and kv_lengths is not None else 1,
            num_sms() * room.per_sm,
            room.per_sm == 1,
        )
    in_all = {
        "query_ptr": query,
        "key_ptr": key,
        "key_scales_ptr": key_scales,
        "value_ptr": value,
        "value_scales_ptr": value_scales,
        "key_table_ptr": key_table,
        "value_table_ptr": value_table,
        "key_signs_ptr": signs_of(key_codec, h),
        "value_signs_ptr": signs_of(value_codec, values.dims),
        "kv_lengths_ptr": kv_lengths,
        "q_offset_ptr": q_offset if causal or window is not None else None,
        "sinks_ptr": sinks if splits == 1 else None,
    }
    of_floats = {"bfloat16": gl.bfloat16, "float16": gl.float16}
    types = [of_floats.get(x.dtype.name, gl.float16) for x in (key, value)]
    problem = Problem(
        queries=t,
        tokens=s,
        key_heads=k,
        group=g,
        keys=keys,
        values=values,
        key_type=types[0],
        value_type=types[1],
        key_entries=entries[0],
        value_entries=entries[1],
        scale=scale,
        causal=causal,
        window=None if window is None else min(window, FAR),
        softcap=softcap,
        rows=rows,
        tiles=tiles,
        heads=room.heads,
        shares=room.shares,
        block=room.block,
        stages=room.stages,
        region=room.region,
        shared=room.shared,
    )
    constants = {
        "P": problem,
        "SPLITS": splits,
        "num_warps": warps,
        "num_stages": 1,
        "max_registers": min(65536 // (32 * warps * room.per_sm) // 8 * 8, 255),
    }
    return run_and_merge(
        quantized_decode_kernel,
        pairs * splits,
        in_all,
        constants,
        jax.ShapeDtypeStruct((b, t, n, values.dims), query.dtype),
        sinks,
    )


def quantized_cache_attention_fwd(
    query,
    key,
    key_codes,
    key_scales,
    value,
    value_codes,
    value_scales,
    mask,
    kv_lengths,
    q_offset,
    sinks,
    **options,
):
    del mask  # the row refuses it
    return over_sequences(
        launch,
        (1, 2, 3, 4),
        (7,),
        query,
        key_codes if key is None else key,
        key_scales,
        value_codes if value is None else value,
        value_scales,
        kv_lengths,
        q_offset,
        sinks,
        **options,
    )
