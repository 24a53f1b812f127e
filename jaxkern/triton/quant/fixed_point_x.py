"""Activations in fixed point in shared memory, for products of whole numbers.

Of each group of columns that share a scale, the scale and whole numbers of 16 bits, as
two digits of 8 bits in the order of the lanes, see fixed_point_codes.py.
"""

from jaxkern.gpu.bulk_ring import own_memory
from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.fixed_point_codes import (
    excess_of,
    group_of,
    place_of_sums,
    place_of_word,
    step_of_sums,
    step_of_x,
)
from jaxkern.triton.quant.fragments import barrier
from jaxkern.triton.quant.one_activation import store_word
from jaxkern.triton.quant.product_kernel import along


@constexpr_function
def bytes_of_x(PADDED, FORMAT):
    """What x takes of shared memory: digits, what is kept of groups, zeros."""
    return PADDED // 256 * (step_of_x() + step_of_sums(FORMAT)) + step_of_x()


@constexpr_function
def bytes_text(AT):
    """Byte AT of four words in one."""
    return f"""{{ .reg .b32 low, high;
        prmt.b32 low, $1, $2, {0x40 + 0x11 * AT:#x};
        prmt.b32 high, $3, $4, {0x40 + 0x11 * AT:#x};
        prmt.b32 $0, low, high, 0x5410; }}"""


@gluon_jit
def bytes_of_four(words, AT: gl.constexpr):
    return gl.inline_asm_elementwise(
        bytes_text(AT),
        "=r,r,r,r,r",
        [words[0], words[1], words[2], words[3]],
        gl.int32,
        True,
        1,
    )


@gluon_jit
def digits(number):
    """Those of four numbers, the last dim, in two words: a number is 256 high + low."""
    G: gl.constexpr = number.shape[0]
    W: gl.constexpr = number.shape[1]
    even, odd = gl.split(gl.reshape(number, [G, W, 2, 2]))
    n0, n2 = gl.split(even)
    n1, n3 = gl.split(odd)
    low = bytes_of_four((n0, n1, n2, n3), 0)
    return bytes_of_four((n0 + 128, n1 + 128, n2 + 128, n3 + 128), 1), low


@gluon_jit
def sum_of_bytes(word):
    return gl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, 0x01010101, 0;", "=r,r", [word], gl.int32, True, 1
    )


@constexpr_function
def words_of_lane(PADDED, WARPS):
    """How many of the words of a group a lane has, up to four."""
    return max(1, min(4, PADDED // (128 * WARPS)))


@constexpr_function
def lanes_of_x(PADDED, GROUP, WARPS):
    """[groups, words, 4]"""
    EACH = words_of_lane(PADDED, WARPS)
    OF_GROUP = GROUP // (4 * EACH)
    return gl.BlockedLayout(
        [1, EACH, 4], [32 // OF_GROUP, OF_GROUP, 1], [WARPS, 1, 1], [2, 1, 0]
    )


@gluon_jit
def inverse(x):
    """1 / x, but for the last bit."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1
    )


@gluon_jit
def columns_of(PADDED: gl.constexpr, FORMAT: gl.constexpr):
    """Numbers of groups, of their words and of the four columns, [1, 1, 4]."""
    GROUP: gl.constexpr = group_of(FORMAT)
    LANES: gl.constexpr = lanes_of_x(PADDED, GROUP, gl.num_warps())
    OF_WORDS: gl.constexpr = gl.SliceLayout(2, LANES)
    group = gl.arange(0, PADDED // GROUP, gl.SliceLayout(1, OF_WORDS))
    word = gl.arange(0, GROUP // 4, gl.SliceLayout(0, OF_WORDS))
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LANES)))
    return group, word, four[None, None, :]


@constexpr_function
def lanes_of_halves(PADDED, WARPS):
    """[groups, 2, words, 2]: what `lanes_of_x` has, in the order of the memory."""
    EACH = words_of_lane(PADDED, WARPS)
    return gl.BlockedLayout(
        [1, 2, EACH, 2], [4 * EACH, 1, 8 // EACH, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0]
    )


@gluon_jit
def read_columns(x_ptr, K: gl.constexpr, PADDED: gl.constexpr, FORMAT: gl.constexpr):
    """[groups, words, 4], of a vector of K numbers; zeros behind them."""
    start, within = columns_in_memory(PADDED, FORMAT)
    column = start + within
    if K == PADDED:
        x = gl.load(x_ptr + column)
    else:
        x = gl.load(x_ptr + column, column < K, 0.0)
    return in_words(x, FORMAT)


@gluon_jit
def columns_in_memory(PADDED: gl.constexpr, FORMAT: gl.constexpr):
    """Where the groups of a vector begin, and where columns are within their group."""
    GROUP: gl.constexpr = group_of(FORMAT)
    if FORMAT == "MXFP4":
        # two columns of a group of 32 and the two 16 behind them are a word's four
        LANES: gl.constexpr = lanes_of_halves(PADDED, gl.num_warps())
        start = 32 * along(0, PADDED // 32, LANES)
        within = 16 * along(1, 2, LANES) + 2 * along(2, 8, LANES) + along(3, 2, LANES)
        return start, within
    else:
        group, word, four = columns_of(PADDED, FORMAT)
        start = GROUP * gl.expand_dims(gl.expand_dims(group, 1), 2)
        within = gl.expand_dims(4 * gl.expand_dims(word, 0), 2) + four
        return start, within


@gluon_jit
def in_words(x, FORMAT: gl.constexpr):
    """[groups, words, 4] of what `columns_in_memory` says."""
    if FORMAT == "MXFP4":
        GROUPS: gl.constexpr = x.shape[0]
        OF_WORDS: gl.constexpr = lanes_of_x(32 * GROUPS, 32, gl.num_warps())
        x = gl.reshape(gl.permute(x, [0, 2, 3, 1]), [GROUPS, 8, 4])
        return gl.convert_layout(x, OF_WORDS, assert_trivial=True)
    else:
        return x


@gluon_jit
def put_digits(
    x,
    weight,
    K: gl.constexpr,
    PADDED: gl.constexpr,
    EPS: gl.constexpr,
    RING: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """x, normalised if there is a weight, to shared memory in fixed point; zeros."""
    x = x.to(gl.float32)
    if weight is not None:
        mean = gl.sum(gl.sum(gl.sum(x * x, 2), 1), 0) / K
        x = x * gl.rsqrt(mean + EPS) * weight.to(gl.float32)
    put_groups(x, None, 0, PADDED, PADDED, RING, FORMAT)
    clear(RING, bytes_of_x(PADDED, FORMAT) - step_of_x(), step_of_x())


@gluon_jit
def put_groups(
    x,
    factors,
    FIRST: gl.constexpr,
    COLUMNS: gl.constexpr,
    ALL: gl.constexpr,
    RING: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """COLUMNS of x in float32, from FIRST of ALL on; each group times its factor."""
    group, word, _ = columns_of(COLUMNS, FORMAT)
    # as whole numbers, of which those of NaN and infinity are the largest
    size = gl.max(gl.max(x.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 2), 1)
    largest = size.to(gl.float32, bitcast=True)
    small = largest < 1e-33
    factor = gl.where(small, 0.0, 32512.0 * inverse(largest))
    # the lowest bits of the sum are the whole number nearest to it
    number = gl.fma(x, gl.expand_dims(gl.expand_dims(factor, 1), 2), 12582912.0)
    high, low = digits(number.to(gl.int32, bitcast=True))
    total = gl.sum(sum_of_bytes(high) * 256 + sum_of_bytes(low), 1)
    group += FIRST // group_of(FORMAT)
    at = own_memory(group[:, None] + word[None, :], RING)
    at = at + place_of_word(group[:, None], word[None, :], FORMAT)
    high = gl.convert_layout(high, at.type.layout, assert_trivial=True)
    low = gl.convert_layout(low, at.type.layout, assert_trivial=True)
    total = gl.convert_layout(total, group.type.layout, assert_trivial=True)
    store_word(at, high)
    store_word(at + 16, low)
    scale = largest * (1 / 32512) + (largest - largest)  # NaN, not infinity
    if factors is not None:
        scale = scale * factors
    kept = own_memory(group, RING) + ALL // 256 * step_of_x()
    kept = kept + place_of_sums(group, FORMAT)
    store_word(kept, scale.to(gl.int32, bitcast=True))
    EXCESS: gl.constexpr = excess_of(FORMAT)
    if EXCESS > 0:
        BEHIND: gl.constexpr = 64 if group_of(FORMAT) == 16 else 8
        store_word(kept + BEHIND, total * -EXCESS)
    elif FORMAT != "Q8_0":
        whole = total.to(gl.float32) * scale
        store_word(kept + 8, whole.to(gl.int32, bitcast=True))


@gluon_jit
def clear(RING: gl.constexpr, AT: gl.constexpr, BYTES: gl.constexpr):
    """Zeros in a part of the program's own memory."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    place = gl.arange(0, BYTES // 4, FLAT)
    store_word(own_memory(place, RING) + AT + 4 * place, place * 0)
    barrier()
