"""Rotations, and rows of queries and weights as the tensor cores want them.

A query is two columns of the first product, its value in 16 bits and what that leaves.
Of the second product a column has the weights of a row. A lane has neighbouring
columns, and rows 4 apart: with 4 rows every other column is empty.
"""

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.attention.quantized_cache_attention.copies import (
    in_place,
    warp_number,
)
from jaxkern.triton.attention.quantized_cache_attention.layouts import types_of


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


@gluon_jit
def merged_shares(
    out,
    lse,
    mine,
    RUN: gl.constexpr,
    HEADS: gl.constexpr,
    SHARES: gl.constexpr,
    REGION: gl.constexpr,
):
    """out [warps, rows, dims], lse [warps, rows] of all shares of the warp's head.

    Warps are numbered [shares, heads]; `mine` is where REGION bytes of a warp begin. A
    lane has the same elements in all warps, and reads what its likes have written.
    """
    ROWS: gl.constexpr = out.shape[1]
    HV: gl.constexpr = out.shape[2]
    L: gl.constexpr = out.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :]
    dim = gl.arange(0, HV, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    # neighbouring lanes have neighbouring words
    lane = row[:, :, None] % 4 + dim // RUN % 8 * 4
    element = (row[:, :, None] // 4 * (HV // (8 * RUN)) + dim // (8 * RUN)) * RUN
    at = ((element + dim % RUN) * 32 + lane) * 4
    row = row * 4 + ROWS * HV * 4
    mine = in_place("cp.async.wait_all; bar.warp.sync 0xffffffff;", mine)
    write_shared(mine + at, out)
    write_shared(mine + row, lse)
    mine = in_place("bar.sync 0;", mine)
    first = mine - warp_number(mine) // HEADS * (HEADS * REGION)
    top = lse
    for i in gl.static_range(SHARES):
        top = gl.maximum(top, read_shared(first + i * HEADS * REGION + row, lse))
    base = gl.where(top == -float("inf"), 0.0, top)
    total = gl.zeros_like(lse)
    y = gl.zeros_like(out)
    for i in gl.static_range(SHARES):
        there = first + i * HEADS * REGION
        weight = power_of_2(read_shared(there + row, lse) - base)
        total += weight
        y += read_shared(there + at, out) * gl.expand_dims(weight, 2)
    y = y / gl.expand_dims(gl.where(total == 0.0, 1.0, total), 2)
    return y, base + gl.log2(total)


@gluon_jit
def with_sink(out, lse, sink):
    """Normalised sums and base-2 log-sum-exps with a sink of each row."""
    top = gl.maximum(lse, sink)
    base = gl.where(top == -float("inf"), 0.0, top)
    weight = gl.exp2(lse - base)
    total = weight + gl.exp2(sink - base)
    weight = weight / gl.where(total == 0.0, 1.0, total)
    return out * gl.expand_dims(weight, 2), base + gl.log2(total)


@gluon_jit
def write_shared(at, x):
    at, x = gl.broadcast(at, x)
    gl.inline_asm_elementwise(
        "st.shared.f32 [$1], $2; mov.b32 $0, $1;", "=r,r,f", [at, x], gl.int32, False, 1
    )


@gluon_jit
def read_shared(at, like):
    """Words of the shape of `like`."""
    at, _ = gl.broadcast(at, like)
    return gl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];", "=f,r", [at], gl.float32, False, 1
    )
