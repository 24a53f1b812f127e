"""Attention of a few queries over quantised keys and values, each read once.

A warp takes one key head and a share of its tokens. It loads codes from memory into the
registers in which the tensor cores want them decoded: four lanes share a key, eight
lanes a value, and dims are numbered as the lanes hold them, which changes no sum and
only permutes the result. Nothing passes through shared memory but lookups: a code, or
two of 4 bits, is the number of an entry in a table of float16 levels, of which every
lane has a copy in a bank of its own. Levels of 8 bits that are integers or floats are
computed.

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
from jaxkern.triton.block_sizes import num_sms, tuned
from jaxkern.triton.triton_call import (
    compute_capability,
    constexpr_function,
    gl,
    gluon_jit,
    libdevice,
    mma_v2,
)
from jaxkern.triton.triton_call import unsupported as unsupported_anywhere

HEAD_DIMS = (64, 128, 256)
TABLE_BYTES = 49152  # of both tables, what a kernel can have without being asked
COPIES = 128  # bytes that an entry takes: four for each lane
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
INT8 = (8, 0, 0)  # code - 128
FLOAT8 = (8, 0, -1)  # the bits of an e4m3fn float
FLOAT8_SINCE = 89  # the compute capability that converts them
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
    if key_codec is not None and value_codec is not None:
        if tables_of(key_codec, value_codec) is None:
            return "two codecs of 8 bits with different levels do not fit"
    return unsupported_anywhere(query=query, sinks=rest.get("sinks"))


def form_of(codec: VectorCodec | None) -> tuple[int, int, int]:
    """The format of a cache: `FORMATS`, or one of which the levels are computed."""
    if codec is None:
        return FORMATS[16]
    if codec.bits == 8 and isinstance(codec, IntCodec):
        return INT8
    if isinstance(codec, Float8Codec) and compute_capability() >= FLOAT8_SINCE:
        return FLOAT8
    return FORMATS[int(codec.bits)]


def tables_of(key_codec: VectorCodec | None, value_codec: VectorCodec | None):
    """((format, table) of keys, of values), the second table None if it is the first.

    None where no two tables fit.
    """
    codecs = key_codec, value_codec
    forms = [form_of(codec) for codec in codecs]
    levels = [
        codec.table().astype(np.float16) if codec is not None and form[2] > 0 else None
        for codec, form in zip(codecs, forms, strict=True)
    ]
    ours, theirs = levels
    if ours is not None and theirs is not None:
        if np.array_equal(ours, theirs, equal_nan=True):
            return (forms[0], entries(ours, forms[0])), (forms[1], None)
        # codes of 4 bits can be looked up one by one, in a smaller table
        forms = [{(4, 0, 2): (4, 0, 1)}.get(form, form) for form in forms]
    both = [(f, entries(x, f)) for f, x in zip(forms, levels, strict=True)]
    size = sum(COPIES * table.size for _, table in both if table is not None)
    return None if size > TABLE_BYTES else both


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


# Layouts of [warps, tokens, words]; a word holds neighbouring dims in 32 bits.


@constexpr_function
def bases(count, base, axis, rank=3):
    """Of the bits of `count` steps of `base` along an axis."""
    steps = (base << i for i in range(count.bit_length() - 1))
    return [[step if a == axis else 0 for a in range(rank)] for step in steps]


@constexpr_function
def run_of(WORDS, LANES):
    """Words that a lane loads at once: at most 16 bytes."""
    return min(4, WORDS // LANES)


@constexpr_function
def key_layout(WARPS, TOKENS, WORDS):
    """Four lanes a key: the columns of the second operand of a product."""
    run = run_of(WORDS, 4)
    return gl.DistributedLinearLayout(
        bases(run, 1, 2)
        + bases(TOKENS // 8, 8, 1)
        + bases(WORDS // (4 * run), 4 * run, 2),
        bases(4, run, 2) + bases(8, 1, 1),
        bases(WARPS, 1, 0),
        [],
        [WARPS, TOKENS, WORDS],
    )


@constexpr_function
def value_layout(WARPS, TOKENS, WORDS):
    """Eight lanes a value: rows of the first operand, neighbouring tokens in one."""
    run = run_of(WORDS, 8)
    return gl.DistributedLinearLayout(
        bases(run, 1, 2)
        + bases(2, 1, 1)
        + bases(TOKENS // 8, 8, 1)
        + bases(WORDS // (8 * run), 8 * run, 2),
        bases(4, 2, 1) + bases(8, run, 2),
        bases(WARPS, 1, 0),
        [],
        [WARPS, TOKENS, WORDS],
    )


@constexpr_function
def scores_layout(WARPS):
    return gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )


@constexpr_function
def lookup(FORMAT):
    """PTX of a word's levels, given the second plane's word and the table."""
    width, second, together = FORMAT
    if width == 16:
        return "mov.b32 {$0, $1}, $2;"
    if FORMAT == INT8:  # 1024 + code has the code in its last bits
        return """{ .reg .b32 a, b, c;
            mov.b32 c, 0x64806480;
            prmt.b32 a, $4, 0x64646464, 0x4140;
            prmt.b32 b, $4, 0x64646464, 0x4342;
            sub.f16x2 a, a, c;
            sub.f16x2 b, b, c;
            mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }"""
    if FORMAT == FLOAT8:
        return """{ .reg .b16 l, h; .reg .b32 a, b;
            mov.b32 {l, h}, $4;
            cvt.rn.f16x2.e4m3x2 a, l;
            cvt.rn.f16x2.e4m3x2 b, h;
            mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }"""
    count = 32 // width
    field, rest = width * together, second * together
    lines = []
    for i in range(count // together):
        lines += [
            f"bfe.u32 a, ${count}, {field * i}, {field};",
            f"mad.lo.u32 a, a, {COPIES}, ${count + 2};",
        ]
        if second:
            lines += [
                f"bfe.u32 s, ${count + 1}, {rest * i}, {rest};",
                f"mad.lo.u32 a, s, {COPIES << field}, a;",
            ]
        if together == 2:
            lines += [
                "ld.shared.b32 a, [a];",
                f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, a;",
            ]
        else:
            lines.append(f"ld.shared.b16 ${i}, [a];")
    return "{ .reg .b32 a, s; " + " ".join(lines) + " }"


@constexpr_function
def lookup_operands(FORMAT):
    width, _, together = FORMAT
    inputs = ",r,r,r" if together > 0 else ",r"
    return ",".join(["=h"] * (32 // width)) + inputs


@constexpr_function
def types_of(TYPE, COUNT):
    return (TYPE,) * COUNT


@constexpr_function
def allocation(ENTRIES):
    return f"{{ .shared .align 128 .b32 lut[{32 * ENTRIES}]; mov.u32 $0, lut; }}"


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


@gluon_jit
def decoded(words, seconds, table, FORMAT: gl.constexpr, TYPE: gl.constexpr):
    """The levels of words [warps, tokens, words] as [warps, tokens, dims]."""
    COUNT: gl.constexpr = 32 // FORMAT[0]
    if FORMAT[2] <= 0:
        parts = gl.inline_asm_elementwise(
            lookup(FORMAT),
            lookup_operands(FORMAT),
            [words],
            dtype=types_of(TYPE, COUNT),
            is_pure=True,
            pack=1,
        )
    else:
        own = gl.inline_asm_elementwise(
            "{ .reg .b32 t; mov.u32 t, %laneid; mad.lo.u32 $0, t, 4, $1; }",
            "=r,r",
            [table],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
        parts = gl.inline_asm_elementwise(
            lookup(FORMAT),
            lookup_operands(FORMAT),
            [words, seconds, own],
            dtype=types_of(TYPE, COUNT),
            is_pure=True,
            pack=1,
        )
    y = stacked(parts, 0, 1, COUNT)
    return gl.reshape(y, [words.shape[0], words.shape[1], words.shape[2] * COUNT])


@gluon_jit
def table_in_shared(table_ptr, ENTRIES: gl.constexpr):
    """The address of a table of which every lane has a copy in a bank of its own."""
    table = gl.inline_asm_elementwise(
        allocation(ENTRIES), "=r,r", [gl.program_id(0)], gl.int32, False, 1
    )
    WARPS: gl.constexpr = gl.num_warps()
    SIZE: gl.constexpr = max(ENTRIES, 32 * WARPS)
    i = gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [WARPS], [0]))
    entry = gl.load(table_ptr + i % ENTRIES)
    for copy in gl.static_range(32):
        at = table + (i % ENTRIES) * 128 + (i + copy) % 32 * 4
        gl.inline_asm_elementwise(
            "st.shared.b32 [$1], $2; mov.b32 $0, $2;",
            "=r,r,r",
            [at, entry],
            gl.int32,
            False,
            1,
        )
    # what is looked up depends on this, so it comes after the barrier
    return gl.inline_asm_elementwise(
        "bar.sync 0; mov.b32 $0, $1;", "=r,r", [table], gl.int32, False, 1
    )


@gluon_jit
def load_words(
    ptr,
    j,
    inside,
    heads,
    K: gl.constexpr,
    D: gl.constexpr,
    FORMAT: gl.constexpr,
    ROW: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Words of both planes of the tokens j of a sequence, [warps, tokens, words]."""
    WORDS: gl.constexpr = D * FORMAT[0] // 32
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    vector = gl.expand_dims(j.to(gl.int64) * K + heads, 2)
    mask = gl.expand_dims(inside, 2)
    main = ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    at = vector * (ROW // 4) + word[None, None, :]
    words = gl.load(main + at, mask, 0)
    seconds = words
    if FORMAT[1] != 0:
        SIZE: gl.constexpr = 4 * FORMAT[1] // FORMAT[0]
        KIND: gl.constexpr = gl.uint16 if SIZE == 2 else gl.uint8
        second = ptr.to(gl.pointer_type(KIND), bitcast=True) + 4 * WORDS // SIZE
        at = vector * (ROW // SIZE) + word[None, None, :]
        seconds = gl.load(second + at, mask, 0).to(gl.int32)
    return words, seconds


@gluon_jit
def load_scales(
    ptr,
    j,
    inside,
    heads,
    K: gl.constexpr,
    GROUPS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Scales of the tokens j: [warps, tokens], or with several [..., groups, 1]."""
    vector = j.to(gl.int64) * K + heads
    if GROUPS == 1:
        scales = gl.load(ptr + vector, inside, 0.0).to(gl.float32)
    else:
        TOKENS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))
        vector = gl.expand_dims(gl.convert_layout(vector, TOKENS), 2)
        mask = gl.expand_dims(gl.convert_layout(inside, TOKENS), 2)
        group = gl.arange(
            0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(1, TOKENS.parent))
        )
        at = vector * GROUPS + group[None, None, :]
        scales = gl.expand_dims(gl.load(ptr + at, mask, 0.0).to(gl.float32), 3)
    return scales


@gluon_jit
def graded(y, scales):
    """Levels [.., groups, dims] times their part of the largest scale, and that one."""
    largest = gl.max(gl.abs(scales), 2)
    whole = gl.where(largest == 0.0, 1.0, largest)
    part = scales / gl.expand_dims(whole, 2)
    return y * part.to(y.dtype), gl.max(largest, 2)


@gluon_jit
def halves(x, ROWS: gl.constexpr):
    """The 8 upper and the 8 lower of every 16 rows of x [warps, rows, ...]."""
    if len(x.shape) == 3:
        x = gl.reshape(x, [x.shape[0], ROWS // 8, 2, 8, x.shape[2]])
        upper, lower = gl.split(gl.permute(x, (0, 1, 3, 4, 2)))
        SHAPE: gl.constexpr = [x.shape[0], ROWS, x.shape[4]]
    else:
        x = gl.reshape(x, [x.shape[0], ROWS // 8, 2, 8])
        upper, lower = gl.split(gl.permute(x, (0, 1, 3, 2)))
        SHAPE: gl.constexpr = [x.shape[0], ROWS]
    return gl.reshape(upper, SHAPE), gl.reshape(lower, SHAPE)


@gluon_jit
def tokens_in(
    begin, count, end, group, HEADS: gl.constexpr, BLOCK: gl.constexpr, L: gl.constexpr
):
    """Tokens [warps, BLOCK] where each warp begins, their ends and heads [warps, 1]."""
    W: gl.constexpr = gl.num_warps()
    warp = gl.expand_dims(gl.arange(0, W, gl.SliceLayout(1, L)), 1)
    start = begin + warp // HEADS * count
    j = start + gl.expand_dims(gl.arange(0, BLOCK, gl.SliceLayout(0, L)), 0)
    return j, gl.minimum(start + count, end), group * HEADS + warp % HEADS


@gluon_jit
def quantized_decode_kernel(
    query_ptr,
    key_ptr,
    key_scales_ptr,
    value_ptr,
    value_scales_ptr,
    key_table_ptr,
    value_table_ptr,
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
    KEY_ROW: gl.constexpr,
    VALUE_ROW: gl.constexpr,
    KEY_BYTES: gl.constexpr,
    VALUE_BYTES: gl.constexpr,
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
    ROWS: gl.constexpr,
    TILES: gl.constexpr,
    BLOCK: gl.constexpr,
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

    # the keys that some row sees: first ... end - 1
    first = gl.to_tensor(0)
    end = gl.to_tensor(S)
    position = gl.to_tensor(S - T)
    if kv_lengths_ptr is not None:
        length = gl.load(kv_lengths_ptr + b).to(gl.int64)
        end = gl.minimum(gl.maximum(length, 0), S).to(gl.int32)
    if q_offset_ptr is not None:
        offset = gl.load(q_offset_ptr + b).to(gl.int64)
        position = gl.minimum(gl.maximum(offset, -FAR), FAR).to(gl.int32)
    if CAUSAL:
        end = gl.minimum(end, position + T)
    if WINDOW is not None:
        first = gl.minimum(gl.maximum(position - WINDOW + 1, 0), S)
    aligned = first // 8 * 8
    octets = (gl.maximum(end - aligned, 0) + 7) // 8
    count = (octets + SPLITS - 1) // SPLITS * 8

    PRODUCT: gl.constexpr = scores_layout(W)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    KEYS: gl.constexpr = key_layout(W, BLOCK, H * KEY[0] // 32)
    VALUES: gl.constexpr = value_layout(W, BLOCK, HV * VALUE[0] // 32)

    # the queries: row r as r % 8 + 16 (r // 8), what float16 leaves of it 8 below
    warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))
    line = gl.arange(0, 2 * ROWS, gl.SliceLayout(0, gl.SliceLayout(2, LEFT)))
    number = gl.arange(0, H, gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))
    RUN: gl.constexpr = run_of(H * KEY[0] // 32, 4) * (32 // KEY[0])
    pair = number // 2
    dim = (pair // (2 * RUN) * 4 + pair % 4) * RUN + pair // 4 % (RUN // 2) * 2
    dim += number % 2
    r = tile * ROWS + line % 8 + line // 16 * 8
    head = group * HEADS + warp % HEADS
    row = (b * T + r // G) * (K * G) + r % G
    row = (gl.expand_dims(row, 0) + gl.expand_dims(head * G, 1))[:, :, None]
    present = (r < T * G)[None, :, None]
    q = gl.load(query_ptr + row * H + dim[None, None, :], present, 0.0).to(gl.float32)
    unit = gl.full([W, 2 * ROWS], SCALE, gl.float32, gl.SliceLayout(2, LEFT))
    if KEY_TYPE == gl.float16:
        largest = gl.max(gl.abs(q), 2)
        largest = gl.where(largest == 0.0, 1.0, largest)
        q = q * gl.expand_dims(UNIT / largest, 2)
        unit = largest * (SCALE / UNIT)
    near = q.to(KEY_TYPE)
    left = (q - near.to(gl.float32)).to(KEY_TYPE)
    q = gl.where((line % 16 < 8)[None, :, None], near, left)

    VALUE_RUN: gl.constexpr = run_of(HV * VALUE[0] // 32, 8) * (32 // VALUE[0])
    # scores [W, ROWS, BLOCK] are in the registers that the second product wants
    none = gl.zeros([W, 2 * ROWS, BLOCK], gl.float32, PRODUCT)
    zeros, _ = halves(none, ROWS)
    SCORES: gl.constexpr = zeros.type.layout
    STATE: gl.constexpr = gl.SliceLayout(2, SCORES)
    TOKENS: gl.constexpr = gl.SliceLayout(1, SCORES)
    SUMS: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    unit, _ = halves(unit, ROWS)
    unit = gl.expand_dims(gl.convert_layout(unit, STATE), 2)

    begin = aligned + split * count
    many = gl.where(begin < end, count, 0)
    key_j, key_stop, key_heads = tokens_in(
        begin, count, end, group, HEADS, BLOCK, gl.SliceLayout(2, KEYS)
    )
    value_j, value_stop, value_heads = tokens_in(
        begin, count, end, group, HEADS, BLOCK, gl.SliceLayout(2, VALUES)
    )
    j, stop, heads = tokens_in(begin, count, end, group, HEADS, BLOCK, TOKENS)
    r = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, STATE))
    p_at = (position + r // G)[None, :, None]
    before = b * (S * K)
    key_ptr += before * (KEY_ROW // (KEY_BYTES))
    value_ptr += before * (VALUE_ROW // VALUE_BYTES)
    if KEY_GROUPS > 0:
        key_scales_ptr += before * KEY_GROUPS
    if VALUE_GROUPS > 0:
        value_scales_ptr += before * VALUE_GROUPS

    # what the first block needs is on its way while the table is written
    inside_keys = (key_j >= first) & (key_j < key_stop)
    words, seconds = load_words(
        key_ptr, key_j, inside_keys, key_heads, K, H, KEY, KEY_ROW, KEYS
    )
    inside_values = (value_j >= first) & (value_j < value_stop)
    value_words, value_seconds = load_words(
        value_ptr, value_j, inside_values, value_heads, K, HV, VALUE, VALUE_ROW, VALUES
    )
    inside = (j >= first) & (j < stop)
    if KEY_GROUPS == 1:
        key_scales = load_scales(key_scales_ptr, j, inside, heads, K, 1, TOKENS)
    if VALUE_GROUPS == 1:
        value_scales = load_scales(value_scales_ptr, j, inside, heads, K, 1, TOKENS)
    key_table = program
    value_table = program
    if key_table_ptr is not None:
        key_table = table_in_shared(key_table_ptr, KEY_ENTRIES)
        value_table = key_table
    if value_table_ptr is not None:
        value_table = table_in_shared(value_table_ptr, VALUE_ENTRIES)

    if KEY_GROUPS > 1:
        like_keys = decoded(words, seconds, key_table, KEY, KEY_TYPE)
        like_keys = gl.reshape(like_keys, [W, BLOCK, KEY_GROUPS, H // KEY_GROUPS])
        KEY_GRADES: gl.constexpr = like_keys.type.layout
        key_scales = load_scales(
            key_scales_ptr, key_j, inside_keys, key_heads, K, KEY_GROUPS, KEY_GRADES
        )
    if VALUE_GROUPS > 1:
        like_values = decoded(
            value_words, value_seconds, value_table, VALUE, VALUE_TYPE
        )
        like_values = gl.reshape(
            like_values, [W, BLOCK, VALUE_GROUPS, HV // VALUE_GROUPS]
        )
        VALUE_GRADES: gl.constexpr = like_values.type.layout
        value_scales = load_scales(
            value_scales_ptr,
            value_j,
            inside_values,
            value_heads,
            K,
            VALUE_GROUPS,
            VALUE_GRADES,
        )

    top = gl.full([W, ROWS], -float("inf"), gl.float32, STATE)
    total = gl.zeros([W, ROWS], gl.float32, STATE)
    largest = gl.zeros([W], gl.float32, gl.SliceLayout(1, TOKENS))
    acc = gl.zeros([W, HV, ROWS], gl.float32, PRODUCT)
    for _ in range(0, many, BLOCK):
        # whatever is used up makes room for that of the next block
        y = decoded(words, seconds, key_table, KEY, KEY_TYPE)
        key_j += BLOCK
        inside_keys = (key_j >= first) & (key_j < key_stop)
        words, seconds = load_words(
            key_ptr, key_j, inside_keys, key_heads, K, H, KEY, KEY_ROW, KEYS
        )
        if KEY_GROUPS > 1:
            y = gl.reshape(y, [W, BLOCK, KEY_GROUPS, H // KEY_GROUPS])
            y, key_scale = graded(y, key_scales)
            key_scale = gl.convert_layout(key_scale, TOKENS)
            key_scales = load_scales(
                key_scales_ptr, key_j, inside_keys, key_heads, K, KEY_GROUPS, KEY_GRADES
            )
        y = gl.reshape(y, [W, BLOCK, H // (4 * RUN), 4, RUN // 2, 2])
        y = gl.reshape(gl.permute(y, (0, 2, 4, 3, 5, 1)), [W, H, BLOCK])
        y = gl.convert_layout(y, RIGHT, assert_trivial=True)
        upper, lower = halves(mma_v2(q, y, none), ROWS)
        z = (upper + lower) * unit
        visible = gl.expand_dims(inside, 1)
        if CAUSAL and T > 1:
            visible = visible & (gl.expand_dims(j, 1) <= p_at)
        if WINDOW is not None and T > 1:
            visible = visible & (gl.expand_dims(j, 1) > p_at - WINDOW)
        j += BLOCK
        inside = (j >= first) & (j < stop)
        if KEY_GROUPS == 1:
            key_scale = key_scales
            key_scales = load_scales(key_scales_ptr, j, inside, heads, K, 1, TOKENS)
        if KEY_GROUPS > 0:
            z = z * gl.expand_dims(key_scale, 1)
        if SOFTCAP is not None:
            z = SOFTCAP * libdevice.tanh(z / SOFTCAP)
        z = gl.where(visible, z * LOG2E, -float("inf"))
        higher = gl.maximum(top, gl.max(z, 2))
        base = gl.where(higher == -float("inf"), 0.0, higher)
        p = gl.exp2(z - gl.expand_dims(base, 2))
        shrink = gl.exp2(top - base)
        total = total * shrink + gl.sum(p, 2)
        top = higher

        y = decoded(value_words, value_seconds, value_table, VALUE, VALUE_TYPE)
        value_j += BLOCK
        inside_values = (value_j >= first) & (value_j < value_stop)
        value_words, value_seconds = load_words(
            value_ptr,
            value_j,
            inside_values,
            value_heads,
            K,
            HV,
            VALUE,
            VALUE_ROW,
            VALUES,
        )
        if VALUE_GROUPS > 1:
            y = gl.reshape(y, [W, BLOCK, VALUE_GROUPS, HV // VALUE_GROUPS])
            y, scale = graded(y, value_scales)
            scale = gl.convert_layout(scale, TOKENS)
            value_scales = load_scales(
                value_scales_ptr,
                value_j,
                inside_values,
                value_heads,
                K,
                VALUE_GROUPS,
                VALUE_GRADES,
            )
        if VALUE_GROUPS == 1:
            scale = value_scales
            value_scales = load_scales(value_scales_ptr, j, inside, heads, K, 1, TOKENS)
        if VALUE_GROUPS > 0:
            larger = gl.maximum(largest, gl.max(gl.abs(scale), 1))
            one_over = gl.where(larger < 1e-37, 0.0, 1.0 / larger)
            p = p * gl.expand_dims(scale * gl.expand_dims(one_over * WEIGHT, 1), 1)
            rest = gl.convert_layout(largest * one_over, gl.SliceLayout(1, STATE))
            shrink = shrink * gl.expand_dims(rest, 1)
            largest = larger
        p = gl.convert_layout(
            gl.permute(p.to(VALUE_TYPE), (0, 2, 1)), RIGHT, assert_trivial=True
        )
        y = gl.reshape(y, [W, BLOCK, HV // (8 * VALUE_RUN), 8, VALUE_RUN])
        y = gl.reshape(gl.permute(y, (0, 2, 4, 3, 1)), [W, HV, BLOCK])
        y = gl.convert_layout(y, LEFT, assert_trivial=True)
        acc = acc * gl.expand_dims(gl.convert_layout(shrink, SUMS), 1)
        acc = mma_v2(y, p, acc)

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
    number = gl.arange(0, HV, gl.SliceLayout(0, gl.SliceLayout(2, PRODUCT)))
    lane = number % 8
    dim = (number // (8 * VALUE_RUN) * 8 + lane) * VALUE_RUN + number // 8 % VALUE_RUN
    at = gl.expand_dims(to, 1) * HV + dim[None, :, None]
    out = (acc / gl.expand_dims(total, 1)).to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + at, out, gl.expand_dims(present, 1))


def sizes_of(k: int, simple: bool, h: int, dtype: Any) -> dict[str, int]:
    """HEADS: neighbours, that programs read whole lines. BLOCK: tokens of a warp."""
    heads = math.gcd(k, 4)
    rule = {"HEADS": heads, "SHARES": 4 // heads}
    rule |= {"PER_SM": 3, "BLOCK": 32} if simple else {"PER_SM": 2, "BLOCK": 16}
    return tuned("decode_quantized", h, dtype, rule)


def num_shares(pairs: int, blocks: int, uneven: bool, slots: int) -> int:
    """Programs for the tokens of each pair: the slots once, or twice if uneven.

    Args:
      pairs: programs beside each other, of sequences, groups of heads and of rows.
      blocks: of tokens, the most that a warp can have.
      uneven: sequences can differ in length.
      slots: programs that run at once.
    """
    most = min(blocks, MAX_SPLITS)
    if uneven:
        return max(min(-(-2 * slots // pairs), most), 1)
    return max(min(slots // pairs, most), 1)


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
    hv = value.shape[-1]
    if value_codec is not None:
        hv = int(hv * 8 // value_codec.bits)
    tables = tables_of(key_codec, value_codec)
    assert tables is not None  # the row refuses
    (key_format, key_table), (value_format, value_table) = tables
    dims = max(h, hv)
    rows = 8 if t * g <= 8 or dims > 128 else 16
    tiles = -(-t * g // rows)
    # registers: of two programs a multiprocessor where there is more to hold
    bits = sum(16 if c is None else c.bits for c in (key_codec, value_codec))
    grades = [1 if x is None else x.shape[-1] for x in (key_scales, value_scales)]
    simple = rows * dims <= 1024 and bits <= 8 and bits % 4 == 0 and max(grades) == 1
    sizes = dict(sizes_of(k, simple, dims, key.dtype))
    per_sm, block = sizes.pop("PER_SM"), sizes["BLOCK"]
    heads, shares = sizes["HEADS"], sizes["SHARES"]
    keys = s if window is None else min(s, window + t - 1)
    if keys <= block * shares:  # one part, which needs no merge
        splits = sizes["SHARES"] = shares = 1
    else:
        splits = shares * num_shares(
            b * (k // heads) * tiles,
            -(-keys // (shares * block)),
            b > 1 and kv_lengths is not None,
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
        "KEY_GROUPS": 0 if key_scales is None else key_scales.shape[-1],
        "VALUE_GROUPS": 0 if value_scales is None else value_scales.shape[-1],
        "KEY_ROW": key.shape[-1] * key.dtype.itemsize,
        "VALUE_ROW": value.shape[-1] * value.dtype.itemsize,
        "KEY_BYTES": key.dtype.itemsize,
        "VALUE_BYTES": value.dtype.itemsize,
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
        "num_warps": heads * shares,
        "num_stages": 1,
        "max_registers": 65536 // (32 * heads * shares * per_sm) // 8 * 8,
    }
    return run_and_merge(
        quantized_decode_kernel,
        b * (k // heads) * tiles * splits // shares,
        in_all,
        constants | sizes,
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
