"""Norm and rotation of queries and keys, keys and values to the cache: one launch.

A program takes a few vectors, heads of one or more tokens: the first programs queries,
the next ones keys, the last ones values. It computes its vectors in float32, quantises
them where the cache has codes, and writes each to the slot that it finds from the
token's position. The caches are operands and results in one buffer: what is written is
t rows of each sequence, and nothing of a cache is read.

XLA need not keep to that. Where a cache is a slice of a larger array, as in a scan over
layers or under vmap, it may hand over the slice of the old array and the slice of the
new one. The last programs compare the two addresses: they end at once where those are
the same, and else copy the rows that are not written.

A dim is turned by its partner, y[d] = x[d] cos +- x[partner] sin, which is loaded a
second time, from the caches of the multiprocessor. So a tile of heads is never taken
apart and keeps its dims in order, as codes want them.

CALL is (tokens, those of a sequence, slots of a sequence or of all pages, ring, rows of
the cache). HEAD is (h, the power of 2 that holds it, number of pairs, their distance or
0 for neighbours, eps, offset), VECTOR as vector_of says.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.primitives.turboquant.lloyd_max import lloyd_max_codebook
from jaxkern.primitives.turboquant.vector_codec import (
    Float8Codec,
    TurboQuantCodec,
    VectorCodec,
    group_size,
)
from jaxkern.triton import triton_call
from jaxkern.triton.block_sizes import next_power_of_2, num_sms, tuned
from jaxkern.triton.norm.rms_norm_quantized import FP8_CONVERSION, round_to_e4m3fn
from jaxkern.triton.triton_call import (
    compute_capability,
    jit,
    like,
    sparse_call,
    tl,
)

LONGEST = 2048  # dims of a vector: a program holds one whole
COPIED = 1024  # elements at once


def unsupported(*, key_codec=None, value_codec=None, **named) -> str | None:
    """A reason in words, or None."""
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


def unsupported_codec(codec: VectorCodec, d: int) -> str | None:
    size = group_size(codec, d)
    if codec.bits == 2.25:
        return "codes of two sizes"
    if size != d and size & (size - 1):
        return f"groups of {size} dims, not a power of 2"
    return None


@jit
def turned_heads(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    row,
    token,
    present,
    HEAD: tl.constexpr,
):
    """Heads [rows, dims] in float32, normed and rotated where there are tables."""
    H: tl.constexpr = HEAD[0]
    dim = tl.arange(0, HEAD[1])[None, :]
    x = tl.load(x_ptr + row * H + dim, present & (dim < H), 0.0).to(tl.float32)
    if cos_ptr is None:
        return x
    else:
        R: tl.constexpr = HEAD[2]
        APART: tl.constexpr = HEAD[3]
        EPS: tl.constexpr = HEAD[4]
        OFFSET: tl.constexpr = HEAD[5]
        if APART == 0:  # neighbours
            rotates = dim < 2 * R
            first = dim % 2 == 0
            partner = dim ^ 1
            pair = dim // 2
        else:
            first = dim < R
            rotates = first | ((dim >= APART) & (dim < APART + R))
            pair = tl.where(first, dim, dim - APART)
            partner = tl.where(first, dim + APART, pair)
        turns = present & rotates
        other = tl.load(x_ptr + row * H + partner, turns, 0.0).to(tl.float32)
        if EPS is not None:
            rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / H + EPS)
            x *= rstd
            other *= rstd
            if weight_ptr is not None:
                x *= tl.load(weight_ptr + dim, dim < H, 0.0).to(tl.float32) + OFFSET
                weight = tl.load(weight_ptr + partner, rotates, 0.0).to(tl.float32)
                other *= weight + OFFSET
        cos = tl.load(cos_ptr + token * R + pair, turns, 1.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * R + pair, turns, 0.0).to(tl.float32)
        return x * cos + other * tl.where(first, -sin, sin)


@jit
def rows_of(
    token,
    present,
    positions_ptr,
    lengths_ptr,
    slots_ptr,
    CALL: tl.constexpr,
):
    """The row of each token in the cache, as [b s] or [pages], and if it is written."""
    T: tl.constexpr = CALL[1]
    S: tl.constexpr = CALL[2]
    RING: tl.constexpr = CALL[3]
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + token, present, -1).to(tl.int64)
        return slot, present & (slot >= 0) & (slot < S)
    else:
        b = token // T
        i = token % T
        slot = tl.load(positions_ptr + b, present, 0).to(tl.int64) + i
        count = b * 0 + T
        if lengths_ptr is not None:
            lengths = tl.load(lengths_ptr + b, present, 0).to(tl.int64)
            count = tl.minimum(lengths, T)
        counts = present & (i < count)
        if RING:
            counts &= i >= count - S  # of more than s new tokens the last s
            slot = (slot % S + S) % S
        return b * S + slot, counts & (slot >= 0) & (slot < S)


@jit
def hadamard(y, ROWS: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr):
    """H_D y along the dims, a butterfly for each bit of their number."""
    for k in tl.static_range(STAGES):
        pairs = tl.reshape(y, [ROWS, D >> (k + 1), 2, 1 << k])
        a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        pairs = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
        y = tl.reshape(pairs, [ROWS, D])
    return y


@jit
def nearest_level(z, midpoints_ptr, BITS: tl.constexpr):
    """The number of the level nearest to z, by bisection over the midpoints."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    code = tl.zeros(z.shape, tl.int32)
    for k in tl.static_range(BITS):
        above = z > tl.load(midpoints_ptr + code + ((HALF >> k) - 1))
        code += tl.where(above, HALF >> k, 0)
    return code


@jit
def write_plane(
    code,
    codes_ptr,
    row,
    written,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The bits of the codes that lie in the plane of WIDTH; see vector_codec.py."""
    H: tl.constexpr = VECTOR[0]
    DIMS: tl.constexpr = VECTOR[1]
    BITS: tl.constexpr = VECTOR[2]
    BELOW: tl.constexpr = BITS & (16 - 2 * WIDTH)  # bits in the planes before
    part = (code >> BELOW) & ((1 << WIDTH) - 1)
    if WIDTH <= 1:
        low, high = tl.split(tl.reshape(part, [ROWS, DIMS // 2, 2]))
        part = low | (high << 1)
    if WIDTH <= 2:
        low, high = tl.split(tl.reshape(part, [ROWS, DIMS * WIDTH // 4, 2]))
        part = low | (high << 2)
    if WIDTH <= 4:
        low, high = tl.split(tl.reshape(part, [ROWS, DIMS * WIDTH // 8, 2]))
        part = low | (high << 4)
    byte = tl.arange(0, DIMS * WIDTH // 8)[None, :]
    at = row * (H * BITS // 8) + H * BELOW // 8 + byte
    tl.store(codes_ptr + at, part.to(tl.uint8), written & (byte < H * WIDTH // 8))


@jit
def write_vectors(
    y,
    cache_ptr,
    scales_ptr,
    signs_ptr,
    midpoints_ptr,
    row,
    written,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Vectors [rows, dims] to rows [rows, 1] of the cache; codes if it has scales."""
    H: tl.constexpr = VECTOR[0]
    DIMS: tl.constexpr = VECTOR[1]
    if scales_ptr is None:
        dim = tl.arange(0, DIMS)[None, :]
        tl.store(cache_ptr + row * H + dim, y, written & (dim < H))
    else:
        BITS: tl.constexpr = VECTOR[2]
        GROUP: tl.constexpr = VECTOR[3]
        TOP: tl.constexpr = VECTOR[4]  # of the codes that are numbers
        STAGES: tl.constexpr = VECTOR[5]
        HARDWARE: tl.constexpr = VECTOR[6]
        if signs_ptr is not None:
            signs = tl.load(signs_ptr + tl.arange(0, DIMS)[None, :]).to(tl.float32)
            ROOT: tl.constexpr = VECTOR[7]
            y = hadamard(y * signs, ROWS, DIMS, STAGES) * ROOT
        groups = tl.reshape(y, [ROWS, DIMS // GROUP, GROUP])
        if midpoints_ptr is not None:
            scale = tl.sqrt_rn(tl.sum(groups * groups, 2, keep_dims=True) / GROUP)
        else:
            largest = tl.max(tl.abs(groups), 2, keep_dims=True)
            bad = tl.max((groups != groups).to(tl.int32), 2, keep_dims=True)
            scale = tl.where(bad > 0, float("nan"), largest / TOP)
        z = tl.div_rn(groups, tl.where(scale == 0.0, 1.0, scale))
        z = tl.reshape(z, [ROWS, DIMS])
        if midpoints_ptr is not None:
            code = nearest_level(z, midpoints_ptr, BITS)
        elif TOP == 448.0:
            code = round_to_e4m3fn(z, HARDWARE).to(tl.int32)
        else:
            q = (z + 12582912.0) - 12582912.0  # 1.5 * 2**23: to the nearest, to even
            q = tl.minimum(tl.maximum(q, -TOP), TOP)
            code = (q + 2 ** (BITS - 1)).to(tl.int32)
        if BITS & 8:
            write_plane(code, cache_ptr, row, written, 8, ROWS, VECTOR)
        if BITS & 4:
            write_plane(code, cache_ptr, row, written, 4, ROWS, VECTOR)
        if BITS & 2:
            write_plane(code, cache_ptr, row, written, 2, ROWS, VECTOR)
        if BITS & 1:
            write_plane(code, cache_ptr, row, written, 1, ROWS, VECTOR)
        group = tl.arange(0, DIMS // GROUP)[None, :]
        groups_of_row: tl.constexpr = (H + GROUP - 1) // GROUP
        at = row * groups_of_row + group
        scale = tl.reshape(scale, [ROWS, DIMS // GROUP])
        tl.store(scales_ptr + at, scale, written & (group < groups_of_row))


@jit
def turn_queries(
    block,
    query_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    CALL: tl.constexpr,
    N: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One block of the heads of queries; a token has N."""
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    present = row < CALL[0] * N
    y = turned_heads(
        query_ptr,
        weight_ptr,
        cos_ptr,
        sin_ptr,
        row,
        row // N,
        present,
        HEAD,
    )
    dim = tl.arange(0, HEAD[1])[None, :]
    tl.store(y_ptr + row * HEAD[0] + dim, y, present & (dim < HEAD[0]))


@jit
def take_up(
    block,
    new_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    lengths_ptr,
    slots_ptr,
    cache_ptr,
    scales_ptr,
    signs_ptr,
    midpoints_ptr,
    CALL: tl.constexpr,
    K: tl.constexpr,
    HEAD: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One block of new keys, or of values where there are no tables, to the cache."""
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    token = row // K
    present = row < CALL[0] * K
    y = turned_heads(
        new_ptr,
        weight_ptr,
        cos_ptr,
        sin_ptr,
        row,
        token,
        present,
        HEAD,
    )
    place, written = rows_of(
        token, present, positions_ptr, lengths_ptr, slots_ptr, CALL
    )
    write_vectors(
        y,
        cache_ptr,
        scales_ptr,
        signs_ptr,
        midpoints_ptr,
        place * K + row % K,
        written,
        ROWS,
        VECTOR,
    )


@jit
def is_written(
    row,
    positions_ptr,
    lengths_ptr,
    slots_ptr,
    CALL: tl.constexpr,
):
    """For rows [rows, 1] of the cache: the inverse of rows_of."""
    TOKENS: tl.constexpr = CALL[0]
    T: tl.constexpr = CALL[1]
    S: tl.constexpr = CALL[2]
    RING: tl.constexpr = CALL[3]
    NUM_ROWS: tl.constexpr = CALL[4]
    if slots_ptr is not None:
        count = tl.zeros(row.shape, tl.int32)
        for first in range(0, TOKENS, 64):
            token = first + tl.arange(0, 64)[None, :]
            slot = tl.load(slots_ptr + token, token < TOKENS, -1).to(tl.int64)
            count += tl.sum((slot == row).to(tl.int32), 1, keep_dims=True)
        return count > 0
    else:
        b = row // S
        i = row % S - tl.load(positions_ptr + b, row < NUM_ROWS, 0).to(tl.int64)
        if RING:
            i = (i % S + S) % S
        count = b * 0 + T
        if lengths_ptr is not None:
            lengths = tl.load(lengths_ptr + b, row < NUM_ROWS, 0).to(tl.int64)
            count = tl.minimum(lengths, T)
        return (i >= 0) & (i < count)


@jit
def carry_over(
    program,
    old_ptr,
    new_ptr,
    positions_ptr,
    lengths_ptr,
    slots_ptr,
    CALL: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Every PROGRAMS-th block of the rows that this call does not write."""
    NUM_ROWS: tl.constexpr = CALL[4]
    LENGTH: tl.constexpr = TILE[0]
    WIDTH: tl.constexpr = TILE[1]
    HEIGHT: tl.constexpr = TILE[2]
    if old_ptr.to(tl.int64) != new_ptr.to(tl.int64):
        blocks: tl.constexpr = (NUM_ROWS + HEIGHT - 1) // HEIGHT
        for k in range(0, (blocks + PROGRAMS - 1) // PROGRAMS):
            first = (program + k * PROGRAMS).to(tl.int64) * HEIGHT
            row = first + tl.arange(0, HEIGHT)[:, None]
            stays = (row < NUM_ROWS) & (
                is_written(
                    row,
                    positions_ptr,
                    lengths_ptr,
                    slots_ptr,
                    CALL,
                )
                == 0
            )
            for start in range(0, LENGTH, WIDTH):
                column = start + tl.arange(0, WIDTH)[None, :]
                at = row * LENGTH + column
                mask = stays & (column < LENGTH)
                tl.store(new_ptr + at, tl.load(old_ptr + at, mask), mask)


@jit
def qk_norm_rope_cache_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cos_ptr,
    sin_ptr,
    old_key_cache_ptr,
    old_key_scales_ptr,
    old_value_cache_ptr,
    old_value_scales_ptr,
    positions_ptr,
    lengths_ptr,
    slots_ptr,
    key_signs_ptr,
    key_midpoints_ptr,
    value_signs_ptr,
    value_midpoints_ptr,
    y_query_ptr,
    key_cache_ptr,
    key_scales_ptr,
    value_cache_ptr,
    value_scales_ptr,
    CALL: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    HEAD: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    QUERY_PROGRAMS: tl.constexpr,
    KEY_PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    VALUE_ROWS: tl.constexpr,
    VALUE_PROGRAMS: tl.constexpr,
    COPY_PROGRAMS: tl.constexpr,
    KEY_COPY: tl.constexpr,
    KEY_SCALES_COPY: tl.constexpr,
    VALUE_COPY: tl.constexpr,
    VALUE_SCALES_COPY: tl.constexpr,
):
    program = tl.program_id(0)
    if program < QUERY_PROGRAMS:
        turn_queries(
            program,
            query_ptr,
            query_weight_ptr,
            cos_ptr,
            sin_ptr,
            y_query_ptr,
            CALL,
            N,
            HEAD,
            ROWS,
        )
    elif program < QUERY_PROGRAMS + KEY_PROGRAMS:
        take_up(
            program - QUERY_PROGRAMS,
            key_ptr,
            key_weight_ptr,
            cos_ptr,
            sin_ptr,
            positions_ptr,
            lengths_ptr,
            slots_ptr,
            key_cache_ptr,
            key_scales_ptr,
            key_signs_ptr,
            key_midpoints_ptr,
            CALL,
            K,
            HEAD,
            KEY,
            ROWS,
        )
    elif program < QUERY_PROGRAMS + KEY_PROGRAMS + VALUE_PROGRAMS:
        take_up(
            program - QUERY_PROGRAMS - KEY_PROGRAMS,
            value_ptr,
            None,
            None,
            None,
            positions_ptr,
            lengths_ptr,
            slots_ptr,
            value_cache_ptr,
            value_scales_ptr,
            value_signs_ptr,
            value_midpoints_ptr,
            CALL,
            K,
            VALUE,
            VALUE,
            VALUE_ROWS,
        )
    else:
        copy = program - QUERY_PROGRAMS - KEY_PROGRAMS - VALUE_PROGRAMS
        carry_over(
            copy,
            old_key_cache_ptr,
            key_cache_ptr,
            positions_ptr,
            lengths_ptr,
            slots_ptr,
            CALL,
            COPY_PROGRAMS,
            KEY_COPY,
        )
        carry_over(
            copy,
            old_value_cache_ptr,
            value_cache_ptr,
            positions_ptr,
            lengths_ptr,
            slots_ptr,
            CALL,
            COPY_PROGRAMS,
            VALUE_COPY,
        )
        if key_scales_ptr is not None:
            carry_over(
                copy,
                old_key_scales_ptr,
                key_scales_ptr,
                positions_ptr,
                lengths_ptr,
                slots_ptr,
                CALL,
                COPY_PROGRAMS,
                KEY_SCALES_COPY,
            )
            carry_over(
                copy,
                old_value_scales_ptr,
                value_scales_ptr,
                positions_ptr,
                lengths_ptr,
                slots_ptr,
                CALL,
                COPY_PROGRAMS,
                VALUE_SCALES_COPY,
            )


def tile_sizes(h: int, dtype) -> dict:
    """Few ELEMENTS a program: a decode step has few, for many multiprocessors."""
    rule = {"ELEMENTS": 1024, "num_warps": 4}
    return tuned("qk_norm_rope_cache", h, dtype, rule)


def vector_of(d: int, codec: VectorCodec | None) -> tuple:
    """The constant VECTOR of a cache.

    (d, the power of 2 that holds it) and, of codes, (bits, dims of a group, largest
    number or 0 for levels, bits of a dim's number, conversion in hardware, d ** -0.5).
    """
    dims = next_power_of_2(d)
    if codec is None:
        return d, dims
    size = group_size(codec, d)
    group = dims if size == d else size
    top = 0.0 if isinstance(codec, TurboQuantCodec) else codec_top(codec)
    hardware = compute_capability() >= FP8_CONVERSION
    stages = dims.bit_length() - 1
    return d, dims, int(codec.bits), group, top, stages, hardware, d**-0.5


def codec_top(codec) -> float:
    return 448.0 if isinstance(codec, Float8Codec) else float(codec.top)


def copy_tile(length: int) -> tuple[int, int, int]:
    """Length of a row of a cache, and columns and rows that are copied at once."""
    width = min(next_power_of_2(length), COPIED)
    return length, width, COPIED // width


def constants_of(d: int, codec: VectorCodec | None) -> Sequence[jax.Array | None]:
    """Signs and midpoints of a codec that has them."""
    if not isinstance(codec, TurboQuantCodec):
        return None, None
    levels = np.asarray(codec.codebook or lloyd_max_codebook(int(codec.bits)))
    midpoints = jnp.asarray((levels[1:] + levels[:-1]) / 2, jnp.float32)
    return jnp.asarray(codec.signs(d)), midpoints


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
) -> tuple[jax.Array | None, ...]:
    """The launch.

    Args:
      new: query, key, value, query_weight, key_weight, cos, sin.
      caches: keys, their scales, values, their scales.
      places: positions, new_lengths, slots.
      codecs: of keys and of values.
      slots: of one sequence, or of all pages.
      ring, eps, offset, pairing, pair_offset: options of the op.
    """
    query, key, value, *_, cos, _ = new
    assert query is not None and key is not None and value is not None
    assert cos is not None
    b, t, n, h = query.shape
    k, hv = value.shape[2:]
    sizes = tile_sizes(h, query.dtype)
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


def qk_norm_rope_paged_cache(*operands, **options):
    *new, key_pages, value_pages, slots = operands
    num_pages, page = key_pages.shape[:2]
    query, keys, _, values, _ = write(
        new,
        (key_pages, None, value_pages, None),
        (None, None, slots),
        (None, None),
        num_pages * page,
        False,
        **options,
    )
    return query, keys, values
