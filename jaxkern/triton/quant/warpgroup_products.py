"""Products of decoded weights by the matrix units of Hopper, one statement each.

Weights are the left operand, from registers: what a lane unpacks of 16 rows of a tile
is what m64nNk16 expects of it, but for the order of the columns, in which activations
are to stand in shared memory. Triton's own operation has a barrier of the whole program
behind each wait, and one right operand for all warps; here warps wait for their own
products alone, and groups of four may have other activations:

    w = weights_of_columns(words, ...)      # of 64 columns
    totals = multiplied(w, x, totals, N)
    totals, before = awaited(totals, before, 1, N)
    before = w

All are of `[warps, 8, 4]`, one number in every lane. The sums of N activations are
N / 2: of activations 8 e + 2 c and the next, numbers 4 e and 4 e + 1 are of row 2 g of
the warp's tile, the next two of row 2 g + 1.
"""

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.block_codes import (
    codes_of,
    fragments_of_scale,
    middle_of,
    scales_of,
)
from jaxkern.triton.quant.four_bit_codes import is_bfloat16, is_grouped
from jaxkern.triton.quant.fragments import (
    as_pair,
    fma_of_pairs,
    twice,
    unsigned_codes,
)
from jaxkern.triton.quant.one_activation import low_float
from jaxkern.triton.quant.several_activations import store_two_floats

WORDS = 16  # of the weights of 64 columns in a lane


@constexpr_function
def product_text(N):
    """Four instructions of 16 columns each."""
    sums = ", ".join(f"${i}" for i in range(N // 2))
    first, lines = N // 2, []
    for k in range(4):
        a = ", ".join(f"${first + 4 * k + i}" for i in range(4))
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{N}k16.f32.bf16.bf16 "
            f"{{{sums}}}, {{{a}}}, x, 1, 1, 1, 0; add.s64 x, x, {2 * N};"
        )
    return f"""{{ .reg .b64 x; mov.b64 x, ${first + WORDS};
        wgmma.fence.sync.aligned; {" ".join(lines)}
        wgmma.commit_group.sync.aligned; }}"""


@constexpr_function
def product_constraints(N):
    """The sums come in where they go out."""
    same = [str(i) for i in range(N // 2)]
    return ",".join(["=f"] * (N // 2) + ["r"] * WORDS + ["l"] + same)


@constexpr_function
def wait_text(LATER):
    return f"wgmma.wait_group.sync.aligned {LATER};"


@constexpr_function
def wait_constraints(N):
    same = [str(i) for i in range(N // 2 + WORDS)]
    return ",".join(["=f"] * (N // 2) + ["=r"] * WORDS + same)


@constexpr_function
def types_of(FLOATS, INTS):
    return (gl.float32,) * FLOATS + (gl.int32,) * INTS


@gluon_jit
def described(address, N: gl.constexpr):
    """The descriptor of activations `[columns / 8, N, 8]` at an address.

    It counts 16 bytes: 16 N bytes from eight columns to the next, 128 from eight
    activations to the next.
    """
    return (address >> 4).to(gl.int64) + ((8 << 32) + (N << 16))


@gluon_jit
def nothing_yet(nothing, N: gl.constexpr):
    """Sums of no product, and words of which none is in use."""
    totals = ()
    for _ in gl.static_range(N // 2):
        totals += ((nothing * 0).to(gl.float32),)
    before = ()
    for _ in gl.static_range(16):
        before += (nothing,)
    return totals, before


@gluon_jit
def multiplied(w, x, totals, N: gl.constexpr):
    """Begins totals + the products of 64 columns of weights and of a descriptor's."""
    right = (x,)
    return gl.inline_asm_elementwise(
        product_text(N),
        product_constraints(N),
        w + right + totals,
        types_of(N // 2, 0),
        False,
        1,
    )


@gluon_jit
def awaited(totals, before, LATER: gl.constexpr, N: gl.constexpr):
    """Both, when all products but the LATER last are done: they use words till then."""
    found = gl.inline_asm_elementwise(
        wait_text(LATER),
        wait_constraints(N),
        totals + before,
        types_of(N // 2, 16),
        False,
        1,
    )
    return found[: N // 2], found[N // 2 :]


@constexpr_function
def has_short_scales(FORMAT):
    """Whether a scale is one bfloat16."""
    return is_grouped(FORMAT) and is_bfloat16(FORMAT)


@gluon_jit
def factors_of(words, J: gl.constexpr, FORMAT: gl.constexpr):
    """Of each of the two rows of a lane: the scale in two parts, what is added."""
    scales = scales_of(words, J, FORMAT)
    rows = ()
    for i in gl.static_range(2):
        high = as_pair(scales[i], scales[i])
        rest = scales[i] - low_float(high)
        offset = gl.fma(scales[i], 1.0 * middle_of(FORMAT), scales[2 + i])
        rows += ((high, as_pair(rest, rest), as_pair(offset, offset)),)
    return rows


@gluon_jit
def weights_of_pair(pair, row, nothing, FORMAT: gl.constexpr):
    """Two codes, 128 more than they are, to two weights."""
    less = nothing + twice(-128 - middle_of(FORMAT))
    code = fma_of_pairs(pair, nothing + 0x3F803F80, less)
    high, low, offset = row
    if not has_short_scales(FORMAT):
        offset = fma_of_pairs(code, low, offset)
    return fma_of_pairs(code, high, offset)


@gluon_jit
def weights_of_columns(words, c, nothing, Q: gl.constexpr, FORMAT: gl.constexpr):
    """Quarter Q of a step, 64 columns: of each fragment four words.

    Of formats with unsigned codes and offsets.
    """
    GROUP: gl.constexpr = fragments_of_scale(FORMAT)
    magic = nothing + 0x43434343
    found = ()
    for f in gl.static_range(4):
        rows = factors_of(words, (4 * Q + f) // GROUP, FORMAT)
        first, second = codes_of(words, c, nothing, 4 * Q + f, FORMAT)
        pairs = unsigned_codes(first, second, magic)
        for i in gl.static_range(4):
            found += (weights_of_pair(pairs[i], rows[i % 2], nothing, FORMAT),)
    return found


@constexpr_function
def pitch_of_sums(WARPS):
    """Bytes of an activation's sums: lanes meet different banks."""
    return 64 * WARPS + 16


@gluon_jit
def put_totals(totals, memory, warp, g, c, N: gl.constexpr, WARPS: gl.constexpr):
    """The sums to shared memory, `[activations, weights]` of a pitch."""
    PITCH: gl.constexpr = pitch_of_sums(WARPS)
    at = memory + warp * 64 + g * 8 + c * (2 * PITCH)
    all = 1 + 0 * c
    for e in gl.static_range(N // 8):
        to = at + e * (8 * PITCH)
        store_two_floats(to, totals[4 * e], totals[4 * e + 2], all)
        store_two_floats(to + PITCH, totals[4 * e + 1], totals[4 * e + 3], all)
