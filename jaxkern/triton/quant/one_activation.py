"""The product of packed rows that have minima, for one activation: a step of it.

    y = sum over groups j of 32 columns: d s_j (sum of code x) - dmin m_j (sum of x)

A program sums x by groups once, as it puts x into shared memory; then those sums need
no product of their own. Codes are multiplied as 128 + code, so that 128 (sum of x) is
taken off the sums of a group, and the minima are multiplied with the sums of x, in two
parts of bfloat16 each, by one matrix instruction a step.
"""

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.block_codes import codes_of
from jaxkern.triton.quant.fragments import (
    as_pair,
    barrier,
    float_of_half,
    fragment,
    in_lanes,
    in_lanes4,
    mma,
    pick,
    rows_of,
    shared_text,
    unsigned_codes,
)


@constexpr_function
def four_text(OFFSET):
    return f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{OFFSET}];"


@gluon_jit
def four_floats(at, OFFSET: gl.constexpr):
    return gl.inline_asm_elementwise(
        four_text(OFFSET),
        "=f,=f,=f,=f,r",
        [at],
        (gl.float32, gl.float32, gl.float32, gl.float32),
        False,
        1,
    )


@gluon_jit
def store_word(at, word):
    return gl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.b32 $0, $2;",
        "=r,r,r",
        [at, word],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def store_half(at, word):
    """The lower half."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $2; st.shared.b16 [$1], l;"
        " mov.b32 $0, $2; }",
        "=r,r,r",
        [at, word],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def low_float(pair):
    return (pair << 16).to(gl.float32, bitcast=True)


@gluon_jit
def high_float(pair):
    return (pair & -65536).to(gl.float32, bitcast=True)


@gluon_jit
def shared_base(any):
    """The address of the shared memory that Triton places arrays in."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, global_smem;", "=r,r", [any], gl.int32, False, 1
    )


@gluon_jit
def put_with_sums(
    x_ptr, norm_ptr, K: gl.constexpr, PADDED: gl.constexpr, EPS: gl.constexpr
):
    """x, normalised if there is a norm, as bfloat16 to shared memory; behind it sums.

    Word (f, c, i) has columns 16 f + 4 c + 2 i and the next. Behind them are 128 times
    the sum of each group, in float32; then word (step, c, part) has one of two parts of
    the sums of groups 8 step + 2 c and the next.
    """
    WARPS: gl.constexpr = gl.num_warps()
    GROUPS: gl.constexpr = PADDED // 32
    LANES: gl.constexpr = gl.BlockedLayout([4, 2], [32, 1], [WARPS, 1], [1, 0])
    pair = gl.arange(0, PADDED // 2, gl.SliceLayout(1, LANES))
    column = 2 * pair[:, None] + gl.arange(0, 2, gl.SliceLayout(0, LANES))[None, :]
    x = gl.load(x_ptr + column, column < K, 0.0).to(gl.float32)
    if norm_ptr is not None:
        weight = gl.load(norm_ptr + column, column < K, 0.0).to(gl.float32)
        mean = gl.sum(gl.sum(x * x, 1), 0) / K
        x = x * gl.rsqrt(mean + EPS) * weight
    low, high = gl.split(x)
    word = as_pair(low, high)
    both = low_float(word) + high_float(word)
    sums = gl.sum(gl.reshape(both, [GROUPS, 16]), 1)
    part = as_pair(sums, sums)
    left = sums - low_float(part)
    group = gl.arange(0, GROUPS, sums.type.layout)
    barrier()  # of the norm's sums the memory is free
    store_word(shared_base(pair) + 4 * pair, word)
    sums_at = shared_base(group) + 2 * PADDED + 4 * group
    store_word(sums_at, (sums * 128.0).to(gl.int32, bitcast=True))
    parts_at = shared_base(group) + 2 * PADDED + 4 * GROUPS
    parts_at += group // 2 * 8 + group % 2 * 2
    store_half(parts_at, part)
    store_half(parts_at + 4, as_pair(left, left))
    barrier()


@gluon_jit
def minima_of(low, high, c, magic):
    """Those of groups 2 c and 2 c + 1 as bfloat16, from bytes of groups 0-3 and 4-7."""
    word = gl.where(c < 2, low, high) >> (16 * (c % 2))
    return gl.inline_asm_elementwise(
        "{ .reg .b32 o, n; mov.b32 o, 0x3f803f80; mov.b32 n, 0xc300c300;"
        " fma.rn.bf16x2 $0, $1, o, n; }",
        "=r,r",
        [pick(word, magic, 0x4140)],
        gl.int32,
        True,
        1,
    )


@gluon_jit
def scale_at(word, d, less, magic, AT: gl.constexpr):
    """d times byte AT of the word, `less` being d * -2**23: exact, d having 11 bits."""
    return gl.fma(d, pick(word, magic, 0x7540 + AT).to(gl.float32, bitcast=True), less)


@gluon_jit
def add_step_of_one(
    words,
    c,
    x,
    sums_at,
    parts_at,
    totals,
    nothing,
    FROM: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """totals + the products of one step; `nothing` is a zero that no compiler knows."""
    magic = nothing + 0x43434343
    float_magic = nothing + 0x4B000000
    zeros = gl.full(totals[0].shape, 0.0, gl.float32, totals[0].type.layout)
    halves = rows_of(words[0])
    d0, d1 = float_of_half(halves[0]), float_of_half(halves[1])
    less0, less1 = d0 * -8388608.0, d1 * -8388608.0
    s = rows_of(words[1])
    m = rows_of(words[2])
    rest = rows_of(words[3])
    t0, t2 = totals[0], totals[2]
    of_x = four_floats(sums_at, 0) + four_floats(sums_at, 16)
    for j in gl.static_range(8):
        sums = (zeros, zeros, zeros, zeros)
        for i in gl.static_range(2):
            b = fragment(x, 2 * j + i, FROM)
            first, second = codes_of(words, c, nothing, 2 * j + i, FORMAT)
            a = unsigned_codes(first, second, magic)
            sums = mma(in_lanes4(a), b, sums)
        if j < 4:
            s0, s1 = s[0] & 0x3F3F3F3F, s[1] & 0x3F3F3F3F
        else:
            s0 = (rest[0] & 0x0F0F0F0F) | ((s[0] >> 2) & 0x30303030)
            s1 = (rest[1] & 0x0F0F0F0F) | ((s[1] >> 2) & 0x30303030)
        scale0 = in_lanes(scale_at(s0, d0, less0, float_magic, j % 4))
        scale1 = in_lanes(scale_at(s1, d1, less1, float_magic, j % 4))
        t0 = gl.fma(scale0, sums[0] - of_x[j], t0)
        t2 = gl.fma(scale1, sums[2] - of_x[j], t2)
    m0 = minima_of(
        m[0] & 0x3F3F3F3F,
        ((rest[0] >> 4) & 0x0F0F0F0F) | ((m[0] >> 2) & 0x30303030),
        c,
        magic,
    )
    m1 = minima_of(
        m[1] & 0x3F3F3F3F,
        ((rest[1] >> 4) & 0x0F0F0F0F) | ((m[1] >> 2) & 0x30303030),
        c,
        magic,
    )
    b = gl.inline_asm_elementwise(
        shared_text(0), "=r,=r,r", [parts_at], (gl.int32, gl.int32), False, 1
    )
    least = mma(in_lanes4((m0, m1, m0, m1)), b, (zeros, zeros, zeros, zeros))
    t0 = gl.fma(in_lanes(-float_of_half(halves[0] >> 16)), least[0], t0)
    t2 = gl.fma(in_lanes(-float_of_half(halves[1] >> 16)), least[2], t2)
    return t0, totals[1], t2, totals[3]
