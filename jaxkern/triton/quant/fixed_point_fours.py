"""Weights of 4 bits for products of integers with one activation, lane by lane.

See fixed_point_codes.py. Of the groups of 256 columns

| format | columns of lane c |
|---|---|
| MXFP4, groups of 64 and 128 | 64 c to 64 c + 63, two groups of x |
| groups of 32 | 32 from 32 c on, and 32 from 128 + 32 c on |
| NVFP4_256 | 64 c to 64 c + 63, four groups of x |

Numbers of e2m1 come as 12 more than twice what they are. What the sums of codes are too
large by stands beside the scale of each group of x, as a whole number.
"""

from jaxkern.gpu.bulk_ring import shared_half, shared_pair
from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.four_bit_codes import (
    columns_of_group,
    is_grouped,
    is_nvfp4,
    scale_and_offset,
)
from jaxkern.triton.quant.fragments import float_of_half, pick, rows_of
from jaxkern.triton.quant.table_codes import (
    doubled_e2m1,
    scale_of_power,
    starts_of_tables,
    turned_over,
)
from jaxkern.triton.quant.whole_numbers import (
    add_products,
    as_float,
    four_words,
    of_digits,
    of_digits_from,
    word_of,
)


@constexpr_function
def is_four_bits(FORMAT):
    return FORMAT == "MXFP4" or is_nvfp4(FORMAT) or is_grouped(FORMAT)


@constexpr_function
def is_e2m1(FORMAT):
    return FORMAT == "MXFP4" or is_nvfp4(FORMAT)


@constexpr_function
def is_by_32(FORMAT):
    return is_grouped(FORMAT) and columns_of_group(FORMAT) == 32


@gluon_jit
def place_of_four_bits(j, word, FORMAT: gl.constexpr):
    """Of a word of group j of x in a step: lane, quarter, slot, which of two groups."""
    if is_nvfp4(FORMAT):
        c = j // 4
        return c, word // 2 + j // 2 % 2 * 2, word % 2 ^ (c % 2), j % 2
    elif FORMAT == "MXFP4":
        return j // 2, word // 2, word % 2, j % 2
    elif is_by_32(FORMAT):
        return j % 4, word % 4, word // 4, j // 4
    else:
        return j // 2, word % 4, word // 4, j % 2


@gluon_jit
def read_four_bits(at, g, c, FORMAT: gl.constexpr):
    """Eight words of codes of a lane of one step, then its scales."""
    words = ()
    if FORMAT == "MXFP4":
        first = at + 544 * c
        for half in gl.static_range(2):
            for w in gl.static_range(4):
                words += (shared_pair(first + 8 * g, half * 272 + 16 + 64 * w),)
        for half in gl.static_range(2):
            words += (shared_half(first + 2 * g, half * 272),)
    elif is_nvfp4(FORMAT):
        for w in gl.static_range(8):
            words += (word_of(at + 512 * c + 8 * g, c, w, 320),)
        words += (shared_pair(at + 64 * c + 8 * g, 64), shared_pair(at + 8 * g, 0))
    else:
        GROUP: gl.constexpr = columns_of_group(FORMAT)
        BLOCK: gl.constexpr = 64 + 8 * GROUP  # bytes
        FAR: gl.constexpr = 4 * BLOCK if GROUP == 32 else 256
        if GROUP == 128:
            block = at + c // 2 * BLOCK + 8 * g
            first = block + c % 2 * 512
        else:
            block = at + c * BLOCK + 8 * g
            first = block
        for half in gl.static_range(2):
            for w in gl.static_range(4):
                words += (shared_pair(first, half * FAR + 64 + 64 * w),)
        words += (shared_pair(block, 0),)
        if GROUP == 32:
            words += (shared_pair(block, FAR),)
    return words


@gluon_jit
def add_four_bits(words, x, kept, totals, nothing, FORMAT: gl.constexpr):
    if FORMAT == "MXFP4":
        return add_mxfp4(words, x, kept, totals, nothing)
    elif is_nvfp4(FORMAT):
        return add_nvfp4(words, x, kept, totals, nothing)
    else:
        return add_grouped(words, x, kept, totals, FORMAT)


@gluon_jit
def eight_e2m1(pair, starts):
    """12 more than twice the numbers of eight fields of either row, in two words."""
    word = rows_of(pair)
    turned = turned_over(word[0]), turned_over(word[1])
    return (
        doubled_e2m1(word[0], turned[0], starts),
        doubled_e2m1(word[1], turned[1], starts),
        doubled_e2m1(word[0] >> 16, turned[0] >> 16, starts),
        doubled_e2m1(word[1] >> 16, turned[1] >> 16, starts),
    )


@gluon_jit
def add_mxfp4(words, x, kept, totals, nothing):
    t0, t1 = totals
    starts = starts_of_tables(nothing)
    zero = x * 0
    near = (zero, zero, zero, zero)
    far = near
    for quarter in gl.static_range(4):
        b = four_words(x, 128 * quarter)
        a = eight_e2m1(words[quarter], starts)
        near = add_products(a, b[0], b[1], near, False)
        a = eight_e2m1(words[4 + quarter], starts)
        far = add_products(a, b[2], b[3], far, False)
    of_x = four_words(kept, 0)  # scales, what sums of codes are too large by
    for half in gl.static_range(2):
        s0, s1 = of_digits_from(near if half == 0 else far, of_x[2 + half])
        d = words[8 + half]
        scale = as_float(of_x[half])
        t0 = gl.fma(scale_of_power(d & 255) * scale, s0, t0)
        t1 = gl.fma(scale_of_power(d >> 8) * scale, s1, t1)
    return t0, t1


@gluon_jit
def two_groups(pair, starts):
    """`eight_e2m1`, the codes of the lower fields and those of the upper ones."""
    a = eight_e2m1(pair, starts)
    low = pick(a[0], a[2], 0x6420), pick(a[1], a[3], 0x6420)
    return low, (pick(a[0], a[2], 0x7531), pick(a[1], a[3], 0x7531))


@gluon_jit
def four_of_e4m3(word):
    """Four numbers of 8 bits, as pairs of float16: exact."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l;"
        " cvt.rn.f16x2.e4m3x2 $1, h; }",
        "=r,=r,r",
        [word],
        (gl.int32, gl.int32),
        True,
        1,
    )


@gluon_jit
def add_nvfp4(words, x, kept, totals, nothing):
    starts = starts_of_tables(nothing)
    zero = x * 0
    factors = four_words(kept, 0)  # the scales of x
    excess = four_words(kept, 64)
    scales = rows_of(words[8])
    s0 = four_of_e4m3(scales[0])
    s1 = four_of_e4m3(scales[1])
    found0 = zero.to(gl.float32)
    found1 = found0
    for half in gl.static_range(2):
        near = (zero, zero, zero, zero)
        far = near
        for pair in gl.static_range(2):
            b = four_words(x, 128 * (2 * half + pair))
            first = two_groups(words[4 * half + 2 * pair], starts)
            second = two_groups(words[4 * half + 2 * pair + 1], starts)
            a = (first[0][0], first[0][1], second[0][0], second[0][1])
            near = add_products(a, b[0], b[1], near, False)
            a = (first[1][0], first[1][1], second[1][0], second[1][1])
            far = add_products(a, b[2], b[3], far, False)
        for which in gl.static_range(2):
            sums = near if which == 0 else far
            y0, y1 = of_digits_from(sums, excess[2 * half + which])
            factor = as_float(factors[2 * half + which])
            scale0 = float_of_half(s0[half] >> (16 * which))
            scale1 = float_of_half(s1[half] >> (16 * which))
            found0 = gl.fma(scale0 * factor, y0, found0)
            found1 = gl.fma(scale1 * factor, y1, found1)
    d = rows_of(words[9])
    return (
        gl.fma(0.5 * as_float(d[0]), found0, totals[0]),
        gl.fma(0.5 * as_float(d[1]), found1, totals[1]),
    )


@gluon_jit
def eight_fields(pair):
    """Of either row four lower fields of 4 bits and four upper ones, a byte each."""
    first, second = rows_of(pair)
    return (
        first & 0x0F0F0F0F,
        second & 0x0F0F0F0F,
        (first >> 4) & 0x0F0F0F0F,
        (second >> 4) & 0x0F0F0F0F,
    )


@gluon_jit
def add_grouped(words, x, kept, totals, FORMAT: gl.constexpr):
    zero = x * 0
    near = (zero, zero, zero, zero)
    far = near
    for quarter in gl.static_range(4):
        b = four_words(x, 128 * quarter)
        near = add_products(eight_fields(words[quarter]), b[0], b[1], near, False)
        far = add_products(eight_fields(words[4 + quarter]), b[2], b[3], far, False)
    of_x = four_words(kept, 0)  # scales, and sums of x
    near_sums = of_digits(near)
    far_sums = of_digits(far)
    first = rows_of(words[8])
    last = rows_of(words[len(words) - 1])
    found = ()
    for r in gl.static_range(2):
        scale, offset = scale_and_offset(first[r], FORMAT)
        total = totals[r]
        if is_by_32(FORMAT):
            scale1, offset1 = scale_and_offset(last[r], FORMAT)
            total = gl.fma(scale * as_float(of_x[0]), near_sums[r], total)
            total = gl.fma(scale1 * as_float(of_x[1]), far_sums[r], total)
            total = gl.fma(offset, as_float(of_x[2]), total)
            total = gl.fma(offset1, as_float(of_x[3]), total)
        else:
            sums = as_float(of_x[1]) * far_sums[r]
            sums = gl.fma(as_float(of_x[0]), near_sums[r], sums)
            total = gl.fma(scale, sums, total)
            total = gl.fma(offset, as_float(of_x[2]) + as_float(of_x[3]), total)
        found += (total,)
    return found
