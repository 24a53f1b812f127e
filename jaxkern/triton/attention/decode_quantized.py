"""Attention of a few queries over quantised keys and values, each read once.

A warp takes one key head and a share of its tokens. Blocks of codes are copied to
shared memory in advance, each warp's to a part of its own, so that no warp waits for
another. It reads them into the registers in which the tensor cores want them decoded:
four lanes share a key, eight lanes a value, and dims are numbered as the lanes hold
them, which changes no sum and only permutes the result. Where levels are integers of 4
or 8 bits or floats they are computed; else a code, or two of up to 4 bits, is the
number of an entry in a table of float16 levels, of which every lane has a copy in a
bank of its own. A register of values has two tokens: their codes are put together
before they are decoded.

Scales never meet an element. Those of keys multiply scores; those of values multiply
weights, relative to the largest so far, so that float16 holds them. Where several
scales belong to a vector the largest does that, and levels take the quotients.

A query is two rows, its float16 value and what that leaves, so products with it are
exact to 22 bits. Shares are merged as in decode_attention.py. In Gluon, in which
layouts are chosen and not inferred.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.primitives.turboquant.vector_codec import (
    Float8Codec,
    IntCodec,
    VectorCodec,
)
from jaxkern.triton.attention.decode_attention import (
    FAR,
    LOG2E,
    MAX_QUERIES,
    MAX_SPLITS,
    over_sequences,
    run_and_merge,
)
from jaxkern.triton.attention.quantized_levels import (
    ENTRY_BYTES,
    FLOAT8,
    INT4,
    INT8,
    key_levels,
    levels_operands,
    registers,
    value_levels,
)
from jaxkern.triton.block_sizes import num_sms, tuned
from jaxkern.triton.triton_call import (
    compute_capability,
    constexpr_function,
    gl,
    gluon_jit,
    libdevice,
    max_shared_bytes,
    mma_v2,
)
from jaxkern.triton.triton_call import unsupported as unsupported_anywhere

SPREADS = True
HEAD_DIMS = (64, 128, 256)
# bits: width of the main plane, of the second one, codes of one lookup
FORMATS = {
    16: (16, 0, 0),  # float16 or bfloat16, not codes
    8: (8, 0, 1),
    6: (4, 2, 1),
    5: (4, 1, 1),
    4: (4, 0, 2),
    3: (2, 1, 2),
    2: (2, 0, 2),
}
FLOAT8_SINCE = 89  # the compute capability that converts them
# Of keys and values alike, on an H200 at 65536 tokens, batch 1 and 16.
FASTEST = {
    INT8: {"BLOCK": 64, "STAGES": 2, "PER_SM": 2},
    INT4: {"BLOCK": 64, "STAGES": 2, "PER_SM": 2},
    FORMATS[8]: {"BLOCK": 32, "STAGES": 2, "PER_SM": 1},
    FORMATS[4]: {"BLOCK": 64, "STAGES": 2, "PER_SM": 1},
    FORMATS[3]: {"BLOCK": 32, "STAGES": 3, "PER_SM": 3},
}
UNIT = 256.0  # the largest coordinate of a query in float16
WEIGHT = 32768.0  # the largest weight in float16


def unsupported(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    mask: Any = None,
    key_codec: VectorCodec | None = None,
    value_codec: VectorCodec | None = None,
    value_codes: Any = None,
    **rest: Any,
) -> str | None:
    """A reason in words, or None."""
    if rest.get("dout") is not None or rest.get("dlse") is not None:
        return "the gradient has no kernel"
    if mask is not None:
        return "`mask` is not in the decode kernel"
    _, t, _, h = query.shape
    if t > MAX_QUERIES:
        return f"{t} queries, more than {MAX_QUERIES}"
    hv = h
    for name, x, codec in (("key", key, key_codec), ("value", value, value_codec)):
        if codec is not None and codec.bits not in FORMATS:
            return f"codes of {codec.bits} bits in `{name}`"
        if x is not None and x.dtype not in (jnp.bfloat16, jnp.float16):
            return f"`{name}` is {x.dtype}"
    if value is not None:
        hv = value.shape[-1]
    elif value_codec is not None:
        hv = int(value_codes.shape[-1] * 8 // value_codec.bits)
    for name, d, codec in (("key", h, key_codec), ("value", hv, value_codec)):
        if d not in HEAD_DIMS:
            return f"head dim {d} of `{name}` is none of {HEAD_DIMS}"
        if codec is not None and d * FORMATS[int(codec.bits)][0] < 256:
            return f"{d} dims of {codec.bits} bits are less than a word for each lane"
    if 0 in query.shape or rest.get("s") == 0:
        return "an operand is empty"
    for name in ("key_codes", "key_scales", "value_scales", "sinks", "kv_lengths"):
        x = rest.get(name)
        if x is not None and x.size == 0:
            return f"`{name}` is empty"
    return unsupported_anywhere(query=query, sinks=rest.get("sinks"))


def form_of(codec: VectorCodec | None) -> tuple[int, int, int]:
    """The format of a cache: `FORMATS`, or one of which the levels are computed."""
    if codec is None:
        return FORMATS[16]
    if codec.bits == 8 and isinstance(codec, IntCodec):
        return INT8
    if codec.bits == 4 and isinstance(codec, IntCodec) and (codec.group or 8) >= 8:
        return INT4
    if isinstance(codec, Float8Codec) and compute_capability() >= FLOAT8_SINCE:
        return FLOAT8
    return FORMATS[int(codec.bits)]


def tables_of(key_codec: VectorCodec | None, value_codec: VectorCodec | None):
    """((format, table) of keys, of values), no second table if it is the first."""
    codecs = key_codec, value_codec
    forms = [form_of(codec) for codec in codecs]
    levels = [
        codec.table().astype(np.float16) if codec is not None and form[2] > 0 else None
        for codec, form in zip(codecs, forms, strict=True)
    ]
    ours, theirs = (entries(x, f) for f, x in zip(forms, levels, strict=True))
    if ours is not None and theirs is not None and np.array_equal(ours, theirs):
        theirs = None
    return (forms[0], ours), (forms[1], theirs)


def signs_of(codec: VectorCodec | None, d: int) -> np.ndarray | None:
    """The diagonal of an orthonormal rotation: its signs times d^-1/2."""
    signs = None if codec is None else codec.signs(d)
    return None if signs is None else (signs * d**-0.5).astype(np.float32)


def entries(levels: np.ndarray | None, form: tuple[int, int, int]) -> np.ndarray | None:
    """int32 words, each the levels of one or two codes in its low and high half."""
    if levels is None:
        return None
    width, second, together = form
    words = levels.view(np.uint16).astype(np.uint32)
    if together == 1:
        return words.view(np.int32)
    number = np.arange(levels.size**2)
    mains = number & (1 << 2 * width) - 1
    seconds = number >> 2 * width
    low, high = (
        (mains >> width * i & (1 << width) - 1)
        | (seconds >> second * i & (1 << second) - 1) << width
        for i in (0, 1)
    )
    return (words[low] | words[high] << 16).view(np.int32)


# Layouts. In a product a lane has columns 4 dims apart of the second operand, for the
# token lane // 4, and of the first one rows lane // 4, for the tokens of lane % 4.


@constexpr_function
def bases(count, base, axis, rank=3):
    """Of the bits of `count` steps of `base` along an axis."""
    steps = (base << i for i in range(count.bit_length() - 1))
    return [[step if a == axis else 0 for a in range(rank)] for step in steps]


@constexpr_function
def lane_layout(WARPS, LOW, AXIS, HIGH):
    """[warps, ., .] of which a lane has one: its low bits along AXIS, then the others.

    LOW and HIGH: how many along the two axes; lanes beyond repeat them.
    """
    lanes = bases(LOW, 1, AXIS) + bases(HIGH, 1, 3 - AXIS)
    shape = [WARPS, LOW, HIGH] if AXIS == 1 else [WARPS, HIGH, LOW]
    lanes += [[0, 0, 0]] * (5 - len(lanes))
    return gl.DistributedLinearLayout([], lanes, bases(WARPS, 1, 0), [], shape)


@constexpr_function
def query_layout(WARPS, ROWS, DIMS, RUN):
    """[warps, rows, dims]: two lanes have RUN neighbouring dims of every 4 RUN."""
    registers = bases(RUN // 2, 1, 2) + bases(ROWS // 4, 4, 1)
    registers += bases(DIMS // (4 * RUN), 4 * RUN, 2)
    lanes = bases(4, RUN, 2) + [[0, 0, RUN // 2]] + bases(4, 1, 1)
    shape = [WARPS, ROWS, DIMS]
    return gl.DistributedLinearLayout(registers, lanes, bases(WARPS, 1, 0), [], shape)


@constexpr_function
def token_layout(WARPS):
    """[warps, 8]: a lane has the token of its key, lane // 4."""
    lanes = bases(4, 0, 1, 2) + bases(8, 1, 1, 2)
    return gl.DistributedLinearLayout([], lanes, bases(WARPS, 1, 0, 2), [], [WARPS, 8])


@constexpr_function
def out_layout(WARPS, ROWS, DIMS, RUN):
    """[warps, rows, dims]: a lane has RUN neighbouring dims of every 8 RUN."""
    registers = bases(RUN, 1, 2) + bases(ROWS // 4, 4, 1)
    registers += bases(DIMS // (8 * RUN), 8 * RUN, 2)
    lanes = bases(4, 1, 1) + bases(8, RUN, 2)
    shape = [WARPS, ROWS, DIMS]
    return gl.DistributedLinearLayout(registers, lanes, bases(WARPS, 1, 0), [], shape)


@constexpr_function
def scores_layout(WARPS):
    return gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )


# What a warp has of a block in shared memory: rows of the planes and scales of keys and
# of values. It alone writes and reads them, so it waits for no other warp.


@constexpr_function
def key_run(D, FORMAT):
    """Neighbouring words that one of the four lanes of a key has."""
    return min(8, D * FORMAT[0] // 128)


@constexpr_function
def value_run(D, FORMAT):
    """Neighbouring words that one of the eight lanes of a value has."""
    return min(4, D * FORMAT[0] // 256)


@constexpr_function
def part_of(PART, H, HV, KEY, VALUE, KEY_ROW, VALUE_ROW, KEY_GROUPS, VALUE_GROUPS):
    """(bytes of a vector in memory, where a part begins, its size, pitch) of a part.

    The pitch is that of rows in shared memory: of keys such that eight lanes that read
    of two rows meet all banks.
    """
    dims, form, row = (H, KEY, KEY_ROW) if PART < 3 else (HV, VALUE, VALUE_ROW)
    main, second = dims * form[0] // 8, dims * form[1] // 8
    if PART % 3 == 0:
        return row, 0, main, main + (16 if PART == 0 and main >= 128 else 0)
    if PART % 3 == 1:
        return row, main, second, second
    size = 4 * (KEY_GROUPS if PART < 3 else VALUE_GROUPS)
    return size, 0, size, size


@constexpr_function
def offsets_of(BLOCK, PARTS):
    """Where the parts of a block begin, and the end."""
    at = [0]
    for part in PARTS:
        at.append(at[-1] + BLOCK * part[3])
    return tuple(at)


@constexpr_function
def parts_of(*SIZES):
    """Of keys the main and second plane and the scales, then of values."""
    return tuple(part_of(i, *SIZES) for i in range(6))


@constexpr_function
def nth(PARTS, NUMBER):
    """One of the parts; indexed in a kernel it would be no constant."""
    return PARTS[NUMBER]


@constexpr_function
def copies_of(PART, BLOCK):
    """(bytes of a copy, copies of a row, rows that a warp copies at once)."""
    row, at, size, _ = PART
    unit = min(16, *(x & -x for x in (row, at or 16, size)))
    return unit, size // unit, min(32 * unit // size, BLOCK)


@constexpr_function
def token_of(row, PAIRED):
    """The token of a row: of values neighbours lie four rows apart, pairs together."""
    if PAIRED:
        return row // 8 * 8 + row % 4 * 2 + row // 4 % 2
    return row


@constexpr_function
def swizzle_of(PART, BLOCK):
    """(rows, blocks): blocks of 32 bytes are numbered ^ (row // rows) % blocks.

    So that eight or sixteen lanes that read of four rows of values meet all banks.
    """
    _, at, size, _ = PART
    rows = max(128 // size, 1)
    if at != 0:
        return rows, 1
    return rows, max(min(size // 32, copies_of(PART, BLOCK)[2] // rows, 4), 1)


@constexpr_function
def copy_text(PART, BLOCK, K, PAIRED, SKIPS):
    """PTX of all copies of a lane for a block; zeros where a token is not to be read.

    Its operands are where to and where from for its first row, how many tokens are left
    from that row's on, and how many there are to skip.
    """
    row, _, _, pitch = PART
    unit, _, rows = copies_of(PART, BLOCK)
    kind = ("cg" if unit == 16 else "ca") + ".shared.global.L2::256B"
    # neighbouring heads are read by other warps: all of 256 bytes come at once
    text = "{ .reg .pred p; .reg .b32 n;"
    for i in range(0, BLOCK, rows):
        token = token_of(i, PAIRED)
        text += f" setp.gt.s32 p, $3, {token};"
        text += f" setp.le.and.s32 p, $4, {token}, p;" if SKIPS else ""
        text += f" selp.b32 n, {unit}, 0, p; cp.async.{kind}"
        text += f" [$1+{i * pitch}], [$2+{token * K * row}], {unit}, n;"
    return text + " mov.b32 $0, $1; }"


@constexpr_function
def loads_text(PLACES, COUNT, PAIRS, SIZE):
    """PTX of loads of COUNT words from each place, then of SIZE bytes a word.

    Args:
      PLACES: in bytes, of words and of what the second plane has for them.
      PAIRS: results of places 2 i and 2 i + 1 alternate.
      SIZE: 0 without a second plane.
    """
    total = len(PLACES) * COUNT
    inputs = total * (2 if SIZE else 1)

    def number(i, j):
        return 2 * (i // 2 * COUNT + j) + i % 2 if PAIRS else i * COUNT + j

    text = ""
    for i, places in enumerate(PLACES):
        place, second = places
        for j in range(0, COUNT, 4):
            out = [f"${number(i, x)}" for x in range(j, min(j + 4, COUNT))]
            kind = f"v{len(out)}.b32" if len(out) > 1 else "b32"
            out = f"{{{', '.join(out)}}}" if len(out) > 1 else out[0]
            text += f"ld.shared.{kind} {out}, [${inputs}+{place + 4 * j}]; "
        for j in range(COUNT if SIZE else 0):
            out = f"${total + number(i, j)}"
            at = second + SIZE * j
            text += f"ld.shared.u{8 * SIZE} {out}, [${inputs + 1}+{at}]; "
    return text


@constexpr_function
def key_loads(PART, SECOND, BLOCK, COUNT, SIZE):
    """COUNT words at once: of tokens 8 apart, then the parts of a token."""
    _, _, size, pitch = PART
    places = [
        (i * pitch + j, i * SECOND[3] + j // 4 * SIZE)
        for i in range(0, BLOCK, 8)
        for j in range(0, size, 16 * COUNT)
    ]
    return loads_text(places, COUNT, False, SIZE)


@constexpr_function
def value_loads(PART, SECOND, BLOCK, COUNT, SIZE):
    """COUNT words at once: of tokens 8 apart, parts of a token, both of a pair."""
    _, _, size, pitch = PART
    places = [
        (i * pitch + j, i * SECOND[3] + j // 4 * SIZE)
        for octet in range(0, BLOCK, 8)
        for j in range(0, size, 32 * COUNT)
        for i in (octet, octet + 4)
    ]
    return loads_text(places, COUNT, True, SIZE)


@constexpr_function
def scale_loads(BLOCK):
    """Scales of tokens 8 apart."""
    octets = BLOCK // 8
    return " ".join(f"ld.shared.f32 ${i}, [${octets}+{32 * i}];" for i in range(octets))


@constexpr_function
def types_of(TYPE, COUNT):
    return (TYPE,) * COUNT


@constexpr_function
def level_types(FORMAT, TYPE, COUNT):
    return (gl.int32,) * (COUNT // 2) if FORMAT[2] == 2 else (TYPE,) * COUNT


@gluon_jit
def both_halves(words, COUNT: gl.constexpr):
    """The float16 numbers of words, low halves first."""
    parts = ()
    for i in gl.static_range(COUNT):
        low = words[i].to(gl.int16).to(gl.float16, bitcast=True)
        high = (words[i] >> 16).to(gl.int16).to(gl.float16, bitcast=True)
        parts = parts + (low, high)
    return parts


@constexpr_function
def in_place_text(TEXT):
    return TEXT + " mov.b32 $0, $1;"


@gluon_jit
def in_place(TEXT: gl.constexpr, x):
    """x, after PTX that stays where it is among loads and copies."""
    return gl.inline_asm_elementwise(
        in_place_text(TEXT), "=r,r", [x], gl.int32, False, 1
    )


@gluon_jit
def warp_number(any):
    """Of the lane's warp; by a shuffle, so that the assembler sees it to be one."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 5;
        shfl.sync.idx.b32 $0, t, 0, 0x1f, 0xffffffff; }""",
        "=r,r",
        [any],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def stacked(parts, START: gl.constexpr, STRIDE: gl.constexpr, COUNT: gl.constexpr):
    """parts[START::STRIDE] along new dims of two, the last one the fastest."""
    if COUNT == STRIDE:
        y = parts[START]
    else:
        y = gl.join(
            stacked(parts, START, 2 * STRIDE, COUNT),
            stacked(parts, START + STRIDE, 2 * STRIDE, COUNT),
        )
    return y


@constexpr_function
def table_text(OFFSET):
    """What is looked up depends on this, so it comes after the barrier."""
    return f"bar.sync 0; mov.u32 $0, global_smem; add.u32 $0, $0, {OFFSET};"


@gluon_jit
def table_numbers(ENTRIES: gl.constexpr):
    """The entries that a lane loads and writes."""
    WARPS: gl.constexpr = gl.num_warps()
    SIZE: gl.constexpr = max(ENTRIES, 32 * WARPS)
    return gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [WARPS], [0]))


@gluon_jit
def table_in_shared(any, entry, ENTRIES: gl.constexpr, OFFSET: gl.constexpr):
    """Writes a table of which every lane has a copy in a bank of its own: where."""
    i = table_numbers(ENTRIES)
    table = shared_address(any, 0) + OFFSET
    for copy in gl.static_range(32):
        at = table + (i % ENTRIES) * 256 + (i + copy) % 32 * 4
        gl.inline_asm_elementwise(
            "st.shared.b32 [$1], $2; mov.b32 $0, $2;",
            "=r,r,r",
            [at, entry],
            gl.int32,
            False,
            1,
        )
    return gl.inline_asm_elementwise(
        table_text(OFFSET), "=r,r", [any], gl.int32, False, 1
    )


@gluon_jit
def first_copies(
    ptr,
    shared,
    where,
    K: gl.constexpr,
    HEADS: gl.constexpr,
    PARTS: gl.constexpr,
    AT: gl.constexpr,
    NUMBER: gl.constexpr,
    BLOCK: gl.constexpr,
    PAIRED: gl.constexpr,
):
    """What `copy_text` wants of a lane at first; zeros for an absent part."""
    PART: gl.constexpr = nth(PARTS, NUMBER)
    before, begin, first, end, group = where
    none = gl.to_tensor(0)
    copies = (none, none, none, none)
    if PART[2] != 0:
        W: gl.constexpr = gl.num_warps()
        BYTES: gl.constexpr = copies_of(PART, BLOCK)[0]
        UNITS: gl.constexpr = copies_of(PART, BLOCK)[1]
        ROWS: gl.constexpr = copies_of(PART, BLOCK)[2]
        L: gl.constexpr = lane_layout(W, UNITS, 2, ROWS)
        warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, L)))
        row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, L)))
        inner = gl.arange(0, UNITS, gl.SliceLayout(0, gl.SliceLayout(1, L)))
        warp, row = warp[:, None, None], row[None, :, None]
        inner = inner[None, None, :] * BYTES
        token, to = row, inner
        if PAIRED:
            token = row // 8 * 8 + row % 4 * 2 + row // 4 % 2
            SWIZZLE: gl.constexpr = swizzle_of(PART, BLOCK)
            to = inner ^ row // SWIZZLE[0] % SWIZZLE[1] * 32
        vector = before + begin.to(gl.int64) * K + (group * HEADS + warp % HEADS)
        origin = vector * PART[0] + token.to(gl.int64) * (K * PART[0])
        origin += (ptr.to(gl.int64) + PART[1]) + inner.to(gl.int64)
        every = gl.zeros([W, ROWS, UNITS], gl.int32, L)
        copies = (
            every + (shared + AT[NUMBER]) + row * PART[3] + to,
            origin,
            every + end - begin - token,
            every + first - begin - token,
        )
    return copies


@gluon_jit
def copy_block(
    copies,
    slot,
    K: gl.constexpr,
    PART: gl.constexpr,
    BLOCK: gl.constexpr,
    STEP: gl.constexpr,
    PAIRED: gl.constexpr,
    SKIPS: gl.constexpr,
):
    """Starts the copies of a block into a slot. Returns those of STEP tokens later."""
    to, origin, left, skip = copies
    if PART[2] != 0:
        gl.inline_asm_elementwise(
            copy_text(PART, BLOCK, K, PAIRED, SKIPS),
            "=r,r,l,r,r",
            [to + slot, origin, left, skip],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
        origin += STEP * K * PART[0]
        left -= STEP
        skip -= STEP
    return to, origin, left, skip


@gluon_jit
def copy_blocks(
    copies,
    slot,
    K: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK: gl.constexpr,
    STEP: gl.constexpr,
    SKIPS: gl.constexpr,
):
    """`copy_block` of all parts, as one group."""
    key, key_second, key_scales, value, value_second, value_scales = copies
    key = copy_block(key, slot, K, nth(PARTS, 0), BLOCK, STEP, False, SKIPS)
    key_second = copy_block(
        key_second, slot, K, nth(PARTS, 1), BLOCK, STEP, False, SKIPS
    )
    key_scales = copy_block(
        key_scales, slot, K, nth(PARTS, 2), BLOCK, STEP, False, SKIPS
    )
    value = copy_block(value, slot, K, nth(PARTS, 3), BLOCK, STEP, True, SKIPS)
    value_second = copy_block(
        value_second, slot, K, nth(PARTS, 4), BLOCK, STEP, True, SKIPS
    )
    value_scales = copy_block(
        value_scales, slot, K, nth(PARTS, 5), BLOCK, STEP, False, SKIPS
    )
    in_place("cp.async.commit_group;", slot)
    return key, key_second, key_scales, value, value_second, value_scales


@gluon_jit
def key_block(
    shared,
    table,
    PART: gl.constexpr,
    SECOND: gl.constexpr,
    AT: gl.constexpr,
    BLOCK: gl.constexpr,
    H: gl.constexpr,
    FORMAT: gl.constexpr,
    TYPE: gl.constexpr,
):
    """Levels of keys as [warps, tokens, parts, 4 lanes, dims of a lane]."""
    W: gl.constexpr = gl.num_warps()
    RUN: gl.constexpr = key_run(H, FORMAT)
    SIZE: gl.constexpr = 4 * FORMAT[1] // FORMAT[0]
    L: gl.constexpr = lane_layout(W, 4, 2, 8)
    row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    shared += gl.zeros([W, 8, 4], gl.int32, L)
    main = shared + AT[0] + row * PART[3] + lane * (4 * RUN)
    second = shared + AT[1] + row * SECOND[3] + lane * (RUN * SIZE)
    WORDS: gl.constexpr = BLOCK // 8 * (H * FORMAT[0] // 128)
    LOADED: gl.constexpr = WORDS * (2 if FORMAT[1] != 0 else 1)
    loaded = gl.inline_asm_elementwise(
        key_loads(PART, SECOND, BLOCK, RUN, SIZE),
        registers("r", LOADED, 2),
        [main, second],
        dtype=types_of(gl.int32, LOADED),
        is_pure=False,
        pack=1,
    )
    words = stacked(loaded, 0, 1, WORDS)
    COUNT: gl.constexpr = 32 // FORMAT[0]
    if FORMAT[2] > 0:
        seconds = words
        if FORMAT[1] != 0:
            seconds = stacked(loaded[WORDS:], 0, 1, WORDS)
        operands = (words, seconds, table)
    else:
        operands = (words,)
    parts = gl.inline_asm_elementwise(
        key_levels(FORMAT),
        levels_operands(FORMAT, 1),
        operands,
        dtype=level_types(FORMAT, TYPE, COUNT),
        is_pure=True,
        pack=1,
    )
    if FORMAT[2] == 2:
        parts = both_halves(parts, COUNT // 2)
    y = stacked(parts, 0, 1, COUNT)
    RUNS: gl.constexpr = H // (4 * RUN * COUNT)
    y = gl.reshape(y, [W, 8, 4, BLOCK // 8, RUNS, RUN * COUNT])
    y = gl.permute(y, (0, 3, 1, 4, 2, 5))
    return gl.reshape(y, [W, BLOCK, RUNS, 4, RUN * COUNT])


@gluon_jit
def value_block(
    shared,
    table,
    PART: gl.constexpr,
    SECOND: gl.constexpr,
    AT: gl.constexpr,
    BLOCK: gl.constexpr,
    HV: gl.constexpr,
    FORMAT: gl.constexpr,
    TYPE: gl.constexpr,
):
    """Levels of values as [warps, tokens, parts, 8 lanes, dims of a lane]."""
    W: gl.constexpr = gl.num_warps()
    RUN: gl.constexpr = value_run(HV, FORMAT)
    SIZE: gl.constexpr = 4 * FORMAT[1] // FORMAT[0]
    L: gl.constexpr = lane_layout(W, 4, 1, 8)
    row = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    lane = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    SWIZZLE: gl.constexpr = swizzle_of(PART, BLOCK)
    shared += gl.zeros([W, 4, 8], gl.int32, L)
    main = shared + AT[3] + row * PART[3]
    main += lane * (4 * RUN) ^ row // SWIZZLE[0] % SWIZZLE[1] * 32
    second = shared + AT[4] + row * SECOND[3] + lane * (RUN * SIZE)
    WORDS: gl.constexpr = BLOCK // 4 * (HV * FORMAT[0] // 256)
    LOADED: gl.constexpr = WORDS * (2 if FORMAT[1] != 0 else 1)
    loaded = gl.inline_asm_elementwise(
        value_loads(PART, SECOND, BLOCK, RUN, SIZE),
        registers("r", LOADED, 2),
        [main, second],
        dtype=types_of(gl.int32, LOADED),
        is_pure=False,
        pack=1,
    )
    ours, theirs = stacked(loaded, 0, 2, WORDS), stacked(loaded, 1, 2, WORDS)
    COUNT: gl.constexpr = 64 // FORMAT[0]
    if FORMAT[2] > 0:
        seconds, others = ours, theirs
        if FORMAT[1] != 0:
            seconds = stacked(loaded[WORDS:], 0, 2, WORDS)
            others = stacked(loaded[WORDS:], 1, 2, WORDS)
        operands = (ours, theirs, seconds, others, table)
    else:
        operands = (ours, theirs)
    parts = gl.inline_asm_elementwise(
        value_levels(FORMAT),
        levels_operands(FORMAT, 2),
        operands,
        dtype=level_types(FORMAT, TYPE, COUNT),
        is_pure=True,
        pack=1,
    )
    if FORMAT[2] == 2:
        parts = both_halves(parts, COUNT // 2)
    y = stacked(parts, 0, 1, COUNT)
    DIMS: gl.constexpr = RUN * COUNT // 2
    y = gl.reshape(y, [W, 4, 8, BLOCK // 8, HV // (8 * DIMS), DIMS, 2])
    y = gl.permute(y, (0, 3, 1, 6, 4, 2, 5))
    return gl.reshape(y, [W, BLOCK, HV // (8 * DIMS), 8, DIMS])


@gluon_jit
def read_scales(shared, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """Scales [warps, tokens] of one a token, as a lane has the tokens of scores."""
    W: gl.constexpr = gl.num_warps()
    L: gl.constexpr = token_layout(W)
    token = gl.arange(0, 8, gl.SliceLayout(0, L))[None, :]
    parts = gl.inline_asm_elementwise(
        scale_loads(BLOCK),
        registers("f", BLOCK // 8, 1),
        [gl.zeros([W, 8], gl.int32, L) + shared + token * 4],
        dtype=types_of(gl.float32, BLOCK // 8),
        is_pure=False,
        pack=1,
    )
    y = gl.reshape(stacked(parts, 0, 1, BLOCK // 8), [W, 8, BLOCK // 8])
    y = gl.reshape(gl.permute(y, (0, 2, 1)), [W, BLOCK])
    return gl.convert_layout(y, LAYOUT, assert_trivial=True)


@gluon_jit
def graded(y, shared):
    """Levels [warps, tokens, groups, dims] times scales over the largest one, and that.

    `shared`: where the scales are.
    """
    W: gl.constexpr = y.shape[0]
    BLOCK: gl.constexpr = y.shape[1]
    GROUPS: gl.constexpr = y.shape[2]
    L: gl.constexpr = gl.SliceLayout(3, y.type.layout)
    token = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    number = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    at = token[None, :, None] * (4 * GROUPS) + number[None, None, :] * 4
    scales = gl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];",
        "=f,r",
        [gl.zeros([W, BLOCK, GROUPS], gl.int32, L) + at + shared],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )
    largest = gl.max(gl.abs(scales), 2)
    one_over = gl.where(largest < 1e-37, 1.0, 1.0 / largest)
    part = scales * gl.expand_dims(one_over, 2)
    return y * gl.expand_dims(part.to(y.dtype), 3), largest


@gluon_jit
def power_of_2(x):
    """2**x, 0 instead of denormal numbers."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1
    )


@constexpr_function
def exchange_text(MASK):
    return f"shfl.sync.bfly.b32 $0, $1, {MASK}, 0x1f, 0xffffffff;"


@constexpr_function
def lane_of(MASKS, STEP):
    """Of neighbours STEP runs apart."""
    return MASKS[STEP.bit_length() - 1]


@gluon_jit
def hadamard_product(x, SIZE: gl.constexpr, RUN: gl.constexpr, MASKS: gl.constexpr):
    """x [warps, rows, dims] times Hadamard matrices of SIZE along dims.

    A lane has RUN neighbouring dims; bits of what lanes have beyond are those of MASKS.
    """
    W: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    D: gl.constexpr = x.shape[2]
    L: gl.constexpr = x.type.layout
    STEP: gl.constexpr = SIZE // 2
    if STEP > 1:
        x = hadamard_product(x, STEP, RUN, MASKS)
    if RUN <= STEP and STEP < RUN * 2 ** len(MASKS):
        other = gl.inline_asm_elementwise(
            exchange_text(lane_of(MASKS, STEP // RUN)),
            "=f,f",
            [x],
            gl.float32,
            False,
            1,
        )
        dim = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, L)))
        y = gl.where((dim & STEP == 0)[None, None, :], x, -x) + other
    else:
        y = gl.reshape(x, [W, ROWS, D // SIZE, 2, STEP])
        a, b = gl.split(gl.permute(y, (0, 1, 2, 4, 3)))
        y = gl.permute(gl.join(a + b, a - b), (0, 1, 2, 4, 3))
        y = gl.convert_layout(gl.reshape(y, [W, ROWS, D]), L, assert_trivial=True)
    return y


@constexpr_function
def in_two_text(TYPE):
    """PTX of two numbers in 16 bits and of what that leaves."""
    widen = "mov.b32 {l, h}, $0; cvt.f32.f16 a, l; cvt.f32.f16 b, h;"
    if TYPE == "bf16":
        widen = "shl.b32 a, $0, 16; and.b32 b, $0, 0xffff0000;"
    return f"""{{ .reg .b16 l, h; .reg .b32 a, b;
        cvt.rn.{TYPE}x2.f32 $0, $3, $2; {widen}
        sub.f32 a, $2, a; sub.f32 b, $3, b; cvt.rn.{TYPE}x2.f32 $1, b, a; }}"""


@gluon_jit
def query_columns(q, RUN: gl.constexpr, TYPE: gl.constexpr):
    """Queries [warps, rows, dims] as [warps, 2 rows, dims]: in 16 bits, and the rest.

    Lane 4 apart have halves of a run of one row; each gets the other's half of one.
    """
    W: gl.constexpr = q.shape[0]
    ROWS: gl.constexpr = q.shape[1]
    H: gl.constexpr = q.shape[2]
    L: gl.constexpr = q.type.layout
    near, rest = gl.inline_asm_elementwise(
        in_two_text("bf16" if TYPE == gl.bfloat16 else "f16"),
        "=&r,=&r,f,f",
        [q],
        dtype=types_of(TYPE, 2),
        is_pure=True,
        pack=2,
    )
    dim = gl.arange(0, H, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    lower = (dim & RUN // 2 == 0)[None, None, :]
    mine = gl.where(lower, near, rest)
    other = gl.inline_asm_elementwise(
        exchange_text(4), "=r,r", [gl.where(lower, rest, near)], near.dtype, False, 2
    )
    low, high = gl.where(lower, mine, other), gl.where(lower, other, mine)
    # the bit of dims that lanes 4 apart differ in says from here on which part it is
    y = gl.reshape(gl.join(low, high), [W, ROWS, H // (4 * RUN), 4, 2, RUN // 2, 2])
    y = gl.permute(y, (0, 1, 4, 2, 3, 6, 5))
    return gl.reshape(y, [W, 2 * ROWS, H])


@gluon_jit
def both_parts(x, ROWS: gl.constexpr):
    """Sums of neighbouring columns of x [warps, tokens, 2 ROWS]."""
    near, rest = gl.split(gl.reshape(x, [x.shape[0], x.shape[1], ROWS, 2]))
    return near + rest


# Of the second product a column has the weights of a row. A lane has neighbouring
# columns, and rows 4 apart: with 4 rows every other column is empty.


@constexpr_function
def transpose_text(TYPE):
    """PTX of two weights of 8 tokens, as one operand of the tensor cores wants them."""
    return f"""{{ .reg .b32 t; cvt.rn.{TYPE}x2.f32 t, $2, $1;
        movmatrix.sync.aligned.m8n8.trans.b16 $0, t; }}"""


@gluon_jit
def weights_by_column(p, ROWS: gl.constexpr, TYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Weights [warps, tokens, rows] in 16 bits as [warps, tokens, columns]."""
    W: gl.constexpr = p.shape[0]
    BLOCK: gl.constexpr = p.shape[1]
    TILES: gl.constexpr = max(ROWS // 8, 1)
    if ROWS == 4:
        even, odd = gl.reshape(p, [W, BLOCK, 1, 4]), 0.0
    else:
        p = gl.reshape(p, [W, BLOCK, TILES, 2, 4])
        even, odd = gl.split(gl.permute(p, (0, 1, 2, 4, 3)))
    words = gl.inline_asm_elementwise(
        transpose_text("bf16" if TYPE == gl.bfloat16 else "f16"),
        "=r,f,f",
        [even, odd],
        gl.int32,
        False,
        1,
    )
    # what lane // 4 had a token of it has a column of now, and of lane % 4 two tokens
    low = words.to(gl.int16).to(TYPE, bitcast=True)
    high = (words >> 16).to(gl.int16).to(TYPE, bitcast=True)
    y = gl.reshape(gl.join(low, high), [W, BLOCK // 8, 8, TILES, 4, 2])
    y = gl.reshape(gl.permute(y, (0, 1, 4, 5, 3, 2)), [W, BLOCK, 8 * TILES])
    return gl.convert_layout(y, LAYOUT, assert_trivial=True)


@gluon_jit
def split_columns(acc, ROWS: gl.constexpr):
    """acc [warps, dims, columns] of rows, and of 4 rows what other columns have."""
    W: gl.constexpr = acc.shape[0]
    HV: gl.constexpr = acc.shape[1]
    if ROWS == 4:
        y, other = gl.split(gl.reshape(acc, [W, HV, 4, 2]))
    else:
        y = gl.permute(gl.reshape(acc, [W, HV, ROWS // 8, 4, 2]), (0, 1, 2, 4, 3))
        y = gl.reshape(y, [W, HV, ROWS])
        other = y
    return y, other


@gluon_jit
def shrunk(acc, shrink, ROWS: gl.constexpr):
    """acc [warps, dims, columns] times shrink [warps, rows]."""
    L: gl.constexpr = acc.type.layout
    W: gl.constexpr = acc.shape[0]
    HV: gl.constexpr = acc.shape[1]
    y, other = split_columns(acc, ROWS)
    rows: gl.constexpr = gl.SliceLayout(1, y.type.layout)
    y = y * gl.expand_dims(gl.convert_layout(shrink, rows, assert_trivial=True), 1)
    if ROWS == 4:
        y = gl.reshape(gl.join(y, other), [W, HV, 8])
    else:
        y = gl.permute(gl.reshape(y, [W, HV, ROWS // 8, 2, 4]), (0, 1, 2, 4, 3))
        y = gl.reshape(y, [W, HV, ROWS])
    return gl.convert_layout(y, L, assert_trivial=True)


@constexpr_function
def wait_text(OTHERS):
    """All but the last copies of so many blocks have arrived, for every lane."""
    return f"cp.async.wait_group {OTHERS}; bar.warp.sync 0xffffffff;"


@gluon_jit
def use_shared(memory):
    """Has `global_smem` declared, the address of all shared memory; no instruction."""
    W: gl.constexpr = gl.num_warps()
    words = memory.index(0).load(gl.BlockedLayout([1], [32], [W], [0]))
    gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], gl.int32, False, 1)


@constexpr_function
def address_text(SIZE):
    return f"""{{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 5;
        mov.u32 $0, global_smem; mad.lo.u32 $0, t, {SIZE}, $0; }}"""


@gluon_jit
def shared_address(any, SIZE: gl.constexpr):
    """Of the kernel's shared memory, SIZE bytes further for every warp."""
    return gl.inline_asm_elementwise(
        address_text(SIZE), "=&r,r", [any], gl.int32, False, 1
    )


@gluon_jit
def quantized_decode_kernel(
    query_ptr,
    key_ptr,
    key_scales_ptr,
    value_ptr,
    value_scales_ptr,
    key_table_ptr,
    value_table_ptr,
    key_signs_ptr,
    value_signs_ptr,
    kv_lengths_ptr,
    q_offset_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    T: gl.constexpr,
    K: gl.constexpr,
    G: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    S: gl.constexpr,
    KEY: gl.constexpr,
    VALUE: gl.constexpr,
    KEY_TYPE: gl.constexpr,
    VALUE_TYPE: gl.constexpr,
    KEY_GROUPS: gl.constexpr,
    VALUE_GROUPS: gl.constexpr,
    KEY_ENTRIES: gl.constexpr,
    VALUE_ENTRIES: gl.constexpr,
    SCALE: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    FAR: gl.constexpr,
    LOG2E: gl.constexpr,
    UNIT: gl.constexpr,
    WEIGHT: gl.constexpr,
    SPLITS: gl.constexpr,
    HEADS: gl.constexpr,
    SHARES: gl.constexpr,
    SPREAD: gl.constexpr,
    ROWS: gl.constexpr,
    TILES: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    AT: gl.constexpr,
    SHARED: gl.constexpr,
):
    """SHARES of the SPLITS shares of tokens, HEADS key heads, ROWS rows of each.

    As decode_attention_kernel: normalised sums and base-2 log-sum-exps, or the result.
    """
    W: gl.constexpr = HEADS * SHARES
    program = gl.program_id(0)
    group = program % (K // HEADS)
    program //= K // HEADS
    tile = program % TILES
    program //= TILES
    split = program % (SPLITS // SHARES) * SHARES
    b = (program // (SPLITS // SHARES)).to(gl.int64)

    if kv_lengths_ptr is not None:
        length = gl.load(kv_lengths_ptr + b).to(gl.int64)
    if q_offset_ptr is not None:
        offset = gl.load(q_offset_ptr + b).to(gl.int64)
    # all that is read once is on its way before the length is here
    program = in_place("bar.warp.sync 0xffffffff;", program)
    # a lane loads of its queries what it reads of keys
    RUN: gl.constexpr = key_run(H, KEY) * (32 // KEY[0])
    VALUE_RUN: gl.constexpr = value_run(HV, VALUE) * (32 // VALUE[0])
    QUERIES: gl.constexpr = query_layout(W, ROWS, H, RUN)
    warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, QUERIES)))
    r = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, QUERIES)))
    dim = gl.arange(0, H, gl.SliceLayout(0, gl.SliceLayout(1, QUERIES)))
    head = group * HEADS + warp % HEADS
    row = (b * T + r // G) * (K * G) + r % G
    row = gl.expand_dims(row, 0) + gl.expand_dims(head * G, 1)
    at = row[:, :, None] * H + dim[None, None, :]
    q = gl.load(query_ptr + at, (r < T * G)[None, :, None], 0.0)
    if key_table_ptr is not None:
        key_entry = gl.load(key_table_ptr + table_numbers(KEY_ENTRIES) % KEY_ENTRIES)
    if value_table_ptr is not None:
        number = table_numbers(VALUE_ENTRIES) % VALUE_ENTRIES
        value_entry = gl.load(value_table_ptr + number)
    if key_signs_ptr is not None:
        key_signs = gl.load(key_signs_ptr + dim)
    OUT: gl.constexpr = out_layout(W, ROWS, HV, VALUE_RUN)
    out_dim = gl.arange(0, HV, gl.SliceLayout(0, gl.SliceLayout(1, OUT)))
    if value_signs_ptr is not None:
        value_signs = gl.load(value_signs_ptr + out_dim)[None, None, :]
    program = in_place("bar.warp.sync 0xffffffff;", program)

    # the keys that some row sees: first ... end - 1; a share has every SPLITS-th block
    STEP: gl.constexpr = SPLITS * BLOCK
    first = gl.to_tensor(0)
    end = gl.to_tensor(S)
    position = gl.to_tensor(S - T)
    if kv_lengths_ptr is not None:
        end = gl.minimum(gl.maximum(length, 0), S).to(gl.int32)
    if q_offset_ptr is not None:
        position = gl.minimum(gl.maximum(offset, -FAR), FAR).to(gl.int32)
    if CAUSAL:
        end = gl.minimum(end, position + T)
    if WINDOW is not None:
        first = gl.minimum(gl.maximum(position - WINDOW + 1, 0), S)
    # a warp has its own, and heads have different ones, so that no program has more
    warp = warp_number(program)
    share = (split + warp // HEADS + warp % HEADS * SPREAD) % SPLITS
    begin = first // 8 * 8 + share * BLOCK

    PRODUCT: gl.constexpr = scores_layout(W)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)

    before = b * (S * K)

    # blocks are on their way while queries are split and the table is written
    SKIPS: gl.constexpr = WINDOW is not None
    TABLES: gl.constexpr = max(KEY_ENTRIES, VALUE_ENTRIES) * 256
    SLOT: gl.constexpr = AT[6]
    memory = gl.allocate_shared_memory(
        gl.int32, [SHARED // 128, 32], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    use_shared(memory)
    mine = shared_address(program, STAGES * SLOT) + TABLES
    where = (before, begin, first, end, group)
    copies = (
        first_copies(key_ptr, mine, where, K, HEADS, PARTS, AT, 0, BLOCK, False),
        first_copies(key_ptr, mine, where, K, HEADS, PARTS, AT, 1, BLOCK, False),
        first_copies(key_scales_ptr, mine, where, K, HEADS, PARTS, AT, 2, BLOCK, False),
        first_copies(value_ptr, mine, where, K, HEADS, PARTS, AT, 3, BLOCK, True),
        first_copies(value_ptr, mine, where, K, HEADS, PARTS, AT, 4, BLOCK, True),
        first_copies(
            value_scales_ptr, mine, where, K, HEADS, PARTS, AT, 5, BLOCK, False
        ),
    )
    # a branch, or the assembler would do other work before it
    if begin < end:
        for i in gl.static_range(STAGES - 1):
            copies = copy_blocks(copies, i * SLOT, K, PARTS, BLOCK, STEP, SKIPS)

    key_table = program
    value_table = program
    if key_table_ptr is not None:
        key_table = table_in_shared(program, key_entry, KEY_ENTRIES, 0)
        value_table = key_table
    if value_table_ptr is not None:
        value_table = table_in_shared(program, value_entry, VALUE_ENTRIES, 128)

    q = q.to(gl.float32)
    if key_signs_ptr is not None:
        q = q * key_signs[None, None, :]
        q = hadamard_product(q, H, RUN // 2, (4, 1, 2))
    unit = gl.full([W, ROWS], SCALE, gl.float32, gl.SliceLayout(2, QUERIES))
    if KEY_TYPE == gl.float16:
        largest = gl.max(gl.abs(q), 2)
        largest = gl.where(largest == 0.0, 1.0, largest)
        q = q * gl.expand_dims(UNIT / largest, 2)
        unit = largest * (SCALE / UNIT)
    if SOFTCAP is None:
        unit = unit * LOG2E
    q = query_columns(q, RUN, KEY_TYPE)
    if KEY[0] == 4 and KEY[2] == 0:
        q = gl.reshape(q, [W, 2 * ROWS, H // 8, 2, 4])
        q = gl.permute(q, (0, 1, 2, 4, 3))
    q = gl.reshape(q, [W, 2 * ROWS, H // (4 * RUN), 4, RUN // 2, 2])
    q = gl.reshape(gl.permute(q, (0, 2, 4, 3, 5, 1)), [W, H, 2 * ROWS])
    q = gl.convert_layout(q, RIGHT, assert_trivial=True)

    none = gl.zeros([W, BLOCK, 2 * ROWS], gl.float32, PRODUCT)
    zeros = both_parts(none, ROWS)
    SCORES: gl.constexpr = zeros.type.layout
    STATE: gl.constexpr = gl.SliceLayout(1, SCORES)
    TOKENS: gl.constexpr = gl.SliceLayout(2, SCORES)
    unit = gl.expand_dims(gl.convert_layout(unit, STATE), 1)
    r = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, STATE))
    p_at = (position + r // G)[None, None, :]
    token = gl.zeros([W, BLOCK], gl.int32, TOKENS)
    token += gl.expand_dims(gl.arange(0, BLOCK, gl.SliceLayout(0, TOKENS)), 0)
    start = begin
    top = gl.full([W, ROWS], -float("inf"), gl.float32, STATE)
    total = gl.zeros([W, ROWS], gl.float32, STATE)
    largest = gl.zeros([W], gl.float32, gl.SliceLayout(1, TOKENS))
    acc = gl.zeros([W, HV, max(ROWS, 8)], gl.float32, PRODUCT)
    ready = gl.to_tensor(0)
    free = gl.to_tensor((STAGES - 1) * SLOT)
    for _ in range(begin, end, STEP):
        # the slot that was read last is free once all lanes are here
        ready = in_place(wait_text(STAGES - 2), ready)
        copies = copy_blocks(copies, free, K, PARTS, BLOCK, STEP, SKIPS)
        here = mine + ready
        y = key_block(
            here, key_table, nth(PARTS, 0), nth(PARTS, 1), AT, BLOCK, H, KEY, KEY_TYPE
        )
        if KEY_GROUPS > 1:
            y = gl.reshape(y, [W, BLOCK, KEY_GROUPS, H // KEY_GROUPS])
            y, key_scale = graded(y, here + AT[2])
            key_scale = gl.convert_layout(key_scale, TOKENS)
        if KEY_GROUPS == 1:
            key_scale = read_scales(here + AT[2], BLOCK, TOKENS)
        y = gl.reshape(y, [W, BLOCK, H // (4 * RUN), 4, RUN // 2, 2])
        y = gl.reshape(gl.permute(y, (0, 1, 2, 4, 3, 5)), [W, BLOCK, H])
        y = gl.convert_layout(y, LEFT, assert_trivial=True)
        z = both_parts(mma_v2(y, q, none), ROWS) * unit
        if KEY_GROUPS > 0:
            z = z * gl.expand_dims(key_scale, 2)
        if SOFTCAP is not None:
            z = SOFTCAP * LOG2E * libdevice.tanh(z / SOFTCAP)
        inside = token < end - start
        if WINDOW is not None:
            inside = inside & (token >= first - start)
        visible = gl.expand_dims(inside, 2)
        if CAUSAL and T > 1:
            visible = visible & (gl.expand_dims(start + token, 2) <= p_at)
        if WINDOW is not None and T > 1:
            visible = visible & (gl.expand_dims(start + token, 2) > p_at - WINDOW)
        start += STEP
        z = gl.where(visible, z, -float("inf"))
        higher = gl.maximum(top, gl.max(z, 1))
        base = gl.where(higher == -float("inf"), 0.0, higher)
        p = power_of_2(z - gl.expand_dims(base, 1))
        shrink = power_of_2(top - base)
        total = total * shrink + gl.sum(p, 1)
        top = higher

        y = value_block(
            here,
            value_table,
            nth(PARTS, 3),
            nth(PARTS, 4),
            AT,
            BLOCK,
            HV,
            VALUE,
            VALUE_TYPE,
        )
        if VALUE_GROUPS > 1:
            y = gl.reshape(y, [W, BLOCK, VALUE_GROUPS, HV // VALUE_GROUPS])
            y, scale = graded(y, here + AT[5])
            scale = gl.convert_layout(scale, TOKENS)
        if VALUE_GROUPS == 1:
            scale = read_scales(here + AT[5], BLOCK, TOKENS)
        if VALUE_GROUPS > 0:
            larger = gl.maximum(largest, gl.max(gl.abs(scale), 1))
            one_over = gl.where(larger < 1e-37, 0.0, 1.0 / larger)
            p = p * gl.expand_dims(scale * gl.expand_dims(one_over * WEIGHT, 1), 2)
            rest = gl.convert_layout(largest * one_over, gl.SliceLayout(1, STATE))
            shrink = shrink * gl.expand_dims(rest, 1)
            largest = larger
        p = weights_by_column(p, ROWS, VALUE_TYPE, RIGHT)
        y = gl.reshape(y, [W, BLOCK, HV // (8 * VALUE_RUN), 8, VALUE_RUN])
        y = gl.reshape(gl.permute(y, (0, 2, 4, 3, 1)), [W, HV, BLOCK])
        y = gl.convert_layout(y, LEFT, assert_trivial=True)
        acc = mma_v2(y, p, shrunk(acc, shrink, ROWS))
        free = ready
        ready = gl.where(ready == (STAGES - 1) * SLOT, 0, ready + SLOT)
    memory._keep_alive()

    acc, _ = split_columns(acc, ROWS)
    SUMS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    top = gl.convert_layout(top, SUMS)
    total = gl.convert_layout(total, SUMS)
    if VALUE_GROUPS > 0:
        unit = gl.convert_layout(largest, gl.SliceLayout(1, SUMS)) / WEIGHT
        acc = acc * gl.expand_dims(gl.expand_dims(unit, 1), 1)
    warp = gl.arange(0, W, gl.SliceLayout(1, SUMS))
    head = group * HEADS + warp % HEADS
    r = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))
    of_head = gl.expand_dims(head * G, 1) + gl.expand_dims(r % G, 0)
    row = gl.expand_dims((b * T + r // G) * (K * G), 0) + of_head
    present = gl.expand_dims(r < T * G, 0) & (of_head >= 0)
    if SPLITS == 1 and sinks_ptr is not None:
        sink = gl.load(sinks_ptr + of_head, present, 0.0).to(gl.float32) * LOG2E
        higher = gl.maximum(top, sink)
        base = gl.where(higher == -float("inf"), 0.0, higher)
        shrink = gl.exp2(top - base)
        total = total * shrink + gl.exp2(sink - base)
        acc = acc * gl.expand_dims(shrink, 1)
        top = base
    seen = total != 0.0
    total = gl.where(seen, total, 1.0)
    lse = gl.where(seen, top + gl.log2(total), -float("inf"))
    if SPLITS == 1:
        lse = lse / LOG2E
    to = row * SPLITS + gl.expand_dims(split + warp // HEADS, 1)
    gl.store(lse_ptr + to, lse, present)
    # the merge reads no share without keys
    if SPLITS > 1:
        present = present & seen
    # a lane has neighbouring dims and writes them together
    out = acc / gl.expand_dims(total, 1)
    out = gl.reshape(out, [W, HV // (8 * VALUE_RUN), VALUE_RUN, 8, ROWS])
    out = gl.reshape(gl.permute(out, (0, 4, 1, 3, 2)), [W, ROWS, HV])
    out = gl.convert_layout(out, OUT)
    if value_signs_ptr is not None:
        out = hadamard_product(out, HV, VALUE_RUN, (4, 8, 16))
        out = out * value_signs
    out = out.to(out_ptr.dtype.element_ty)
    to = gl.convert_layout(to, gl.SliceLayout(2, OUT))
    present = gl.convert_layout(present, gl.SliceLayout(2, OUT))
    gl.store(
        out_ptr + (to[:, :, None] * HV + out_dim[None, None, :]),
        out,
        present[:, :, None],
    )


def sizes_of(
    k: int, forms: tuple, groups: int, wide: bool, h: int, dtype: Any
) -> dict[str, int]:
    """Programs of a multiprocessor, as registers allow, and what each has.

    HEADS: neighbours, that programs read whole lines. SHARES: of the tokens of each.
    BLOCK: tokens of a warp. STAGES: blocks that it has room for. ROUNDS: of programs,
    where sequences can differ in length.

    Args:
      k: key heads.
      forms: formats of keys and of values.
      groups: the most scales that a vector has.
      wide: more than 8 rows of 128 dims.
      h: head dim.
      dtype: of the cache.
    """
    heads = math.gcd(k, 4)
    # a large table is for many warps
    bytewise = FORMATS[8] in forms or FORMATS[4] in forms
    warps = 8 if bytewise and not wide and groups <= 1 else 4
    rule = {"HEADS": heads, "SHARES": warps // heads, "ROUNDS": 2}
    if wide or (groups > 1 and forms != (INT4, INT4)):
        rule |= {"BLOCK": 16, "STAGES": 3, "PER_SM": 2}
    elif groups > 1:
        rule |= {"BLOCK": 32, "STAGES": 3, "PER_SM": 2}
    elif forms[0] == forms[1] and forms[0] in FASTEST:
        rule |= FASTEST[forms[0]]
    elif bytewise:
        rule |= {"BLOCK": 16, "STAGES": 3, "PER_SM": 1}
    elif any(form[2] > 0 for form in forms):
        rule |= {"BLOCK": 16, "STAGES": 4, "PER_SM": 3}
    else:
        rule |= {"BLOCK": 16, "STAGES": 3, "PER_SM": 4}
    return tuned("decode_quantized", h, dtype, rule)


def num_shares(pairs: int, blocks: int, rounds: int, slots: int) -> int:
    """Programs for the tokens of each pair, so that all take the slots `rounds` times.

    Args:
      pairs: programs beside each other, of sequences, groups of heads and of rows.
      blocks: of tokens, the most that a warp can have.
      rounds: more than one if sequences can differ in length.
      slots: programs that run at once; one more than fit would cost a round.
    """
    return max(min(rounds * slots // pairs, blocks, MAX_SPLITS), 1)


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
    hv = value.shape[-1]
    if value_codec is not None:
        hv = int(hv * 8 // value_codec.bits)
    (key_format, key_table), (value_format, value_table) = tables_of(
        key_codec, value_codec
    )
    dims = max(h, hv)
    rows = 4 if t * g <= 4 else 8 if t * g <= 8 or dims > 128 else 16
    tiles = -(-t * g // rows)
    groups = [0 if x is None else x.shape[-1] for x in (key_scales, value_scales)]
    forms = key_format, value_format
    wide = max(rows, 8) * dims > 1024
    sizes = sizes_of(k, forms, max(groups), wide, dims, key.dtype)
    per_sm, rounds, block = (sizes[x] for x in ("PER_SM", "ROUNDS", "BLOCK"))
    heads, shares, stages = (sizes[x] for x in ("HEADS", "SHARES", "STAGES"))
    keys = s if window is None else min(s, window + t - 1)
    whole = keys <= block * shares  # one part, which needs no merge
    shares = 1 if whole else shares
    rows_bytes = [x.shape[-1] * x.dtype.itemsize for x in (key, value)]
    parts = parts_of(h, hv, key_format, value_format, *rows_bytes, *groups)
    tables_bytes = ENTRY_BYTES * max(
        0 if x is None else x.size for x in (key_table, value_table)
    )
    room = max_shared_bytes() - tables_bytes
    while heads * shares * stages * (slot := offsets_of(block, parts)[-1]) > room:
        if block > 16:
            block //= 2
        elif stages > 2:
            stages -= 1
        elif shares > 1:
            shares //= 2
        else:
            heads //= 2
    warps = heads * shares
    shared = -(-(tables_bytes + warps * stages * slot) // 128) * 128
    per_sm = min(per_sm, (max_shared_bytes() + 1024) // (shared + 1024))
    splits = 1
    if not whole:
        splits = shares * num_shares(
            b * (k // heads) * tiles,
            -(-keys // (shares * block)),
            rounds if b > 1 and kv_lengths is not None else 1,
            num_sms() * per_sm,
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
        "value_signs_ptr": signs_of(value_codec, hv),
        "kv_lengths_ptr": kv_lengths,
        "q_offset_ptr": q_offset if causal or window is not None else None,
        "sinks_ptr": sinks if splits == 1 else None,
    }
    of_floats = {"bfloat16": gl.bfloat16, "float16": gl.float16}
    types = [of_floats.get(x.dtype.name, gl.float16) for x in (key, value)]
    constants = {
        "T": t,
        "K": k,
        "G": g,
        "H": h,
        "HV": hv,
        "S": s,
        "KEY": key_format,
        "VALUE": value_format,
        "KEY_TYPE": types[0],
        "VALUE_TYPE": types[1],
        "KEY_GROUPS": groups[0],
        "VALUE_GROUPS": groups[1],
        "KEY_ENTRIES": 0 if key_table is None else key_table.size,
        "VALUE_ENTRIES": 0 if value_table is None else value_table.size,
        "SCALE": scale,
        "CAUSAL": causal,
        "WINDOW": None if window is None else min(window, FAR),
        "SOFTCAP": softcap,
        "FAR": FAR,
        "LOG2E": LOG2E,
        "UNIT": UNIT,
        "WEIGHT": WEIGHT,
        "SPLITS": splits,
        "ROWS": rows,
        "TILES": tiles,
        "PARTS": parts,
        "AT": offsets_of(block, parts),
        "SHARED": shared,
        "HEADS": heads,
        "SHARES": shares,
        "SPREAD": splits // heads if SPREADS else 0,
        "BLOCK": block,
        "STAGES": stages,
        "num_warps": warps,
        "num_stages": 1,
        "max_registers": min(65536 // (32 * warps * per_sm) // 8 * 8, 255),
    }
    return run_and_merge(
        quantized_decode_kernel,
        b * (k // heads) * tiles * splits // shares,
        in_all,
        constants,
        jax.ShapeDtypeStruct((b, t, n, hv), query.dtype),
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
