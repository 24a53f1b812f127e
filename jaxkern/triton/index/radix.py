"""Places of a tile's elements by one digit of their keys, stably, in shared memory.

A warp has RUN times 32 consecutive elements. By 8 votes a lane knows which of the 32
have its digit; the warp's count of that digit, in shared memory, grows by so many. Then
the counts become places: of the digits below, and of the warps before. PTX, since a
tensor cannot be scattered to shared memory.
"""

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.attention.quantized_cache_attention.copies import (
    in_place,
    shared_address,
    use_shared,
)

BITS = 8
DIGITS = 2**BITS
SUMS = DIGITS // 32  # of 32 digits each


@constexpr_function
def same_digit_text():
    """Which lanes have the same digit."""
    text = "{ .reg .pred p; .reg .b32 v; mov.b32 $0, -1;"
    for bit in range(BITS):
        text += f"""and.b32 v, $1, {1 << bit}; setp.ne.u32 p, v, 0;
            vote.sync.ballot.b32 v, p, -1; @!p not.b32 v, v; and.b32 $0, $0, v;"""
    return text + "}"


@constexpr_function
def rank_text():
    """How many of a digit lie before in this warp, with the place of its count below.

    $1: the lanes of this digit, the last of which stores the count; $2: its place.
    """
    return """{ .reg .pred p; .reg .b32 lanes, count;
        ld.shared.u32 $0, [$2]; bar.warp.sync 0xffffffff;
        mov.u32 lanes, %lanemask_lt; and.b32 lanes, lanes, $1; popc.b32 lanes, lanes;
        add.u32 $0, $0, lanes; add.u32 count, $0, 1;
        mov.u32 lanes, %lanemask_gt; and.b32 lanes, lanes, $1; setp.eq.u32 p, lanes, 0;
        @p st.shared.u32 [$2], count; bar.warp.sync 0xffffffff;
        shl.b32 $0, $0, 16; or.b32 $0, $0, $2; }"""


@constexpr_function
def warp_scan_text():
    """Sums of 32 lanes; the last lane stores its own at $2."""
    text = """{ .reg .pred p; .reg .b32 lane, t;
        mov.u32 lane, %laneid; mov.b32 $0, $1;"""
    for step in (1, 2, 4, 8, 16):
        text += f"""shfl.sync.up.b32 t, $0, {step}, 0, -1;
            setp.ge.u32 p, lane, {step}; @p add.u32 $0, $0, t;"""
    return text + "setp.eq.u32 p, lane, 31; @p st.shared.u32 [$2], $0; }"


@constexpr_function
def warp_layout(WARPS, RUN):
    """[warps, run, 32 lanes]."""
    return gl.BlockedLayout([1, RUN, 1], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])


@constexpr_function
def line_layout(WARPS):
    return gl.BlockedLayout([1], [32], [WARPS], [0])


@gluon_jit
def load_shared(at):
    return gl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [at], gl.int32, False, 1
    )


@gluon_jit
def store_shared(at, word):
    gl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.b32 $0, $1;",
        "=r,r,r",
        [at, word],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def store_pair(at, a, b):
    gl.inline_asm_elementwise(
        "st.shared.v2.b32 [$1], {$2, $3}; mov.b32 $0, $1;",
        "=r,r,r,r",
        [at, a, b],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def load_pair(at):
    return gl.inline_asm_elementwise(
        "ld.shared.v2.b32 {$0, $1}, [$2];",
        "=r,=r,r",
        [at],
        (gl.uint32, gl.int32),
        False,
        1,
    )


@gluon_jit
def barrier(any):
    return in_place("bar.sync 0;", any)


@gluon_jit
def shared_memory(WORDS: gl.constexpr):
    """The allocation, to be kept alive, and its address."""
    memory = gl.allocate_shared_memory(
        gl.int32, [WORDS // 32, 32], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    use_shared(memory)
    return memory, shared_address(gl.program_id(0), 0)


@gluon_jit
def clear(base, WORDS: gl.constexpr):
    slot = gl.arange(0, WORDS, line_layout(gl.num_warps()))
    store_shared(base + slot * 4, gl.zeros_like(slot))


@gluon_jit
def warp_sums(x, digit, sums):
    """Sums of x up to each digit, of 32 digits; those of all 32 go to `sums`."""
    return gl.inline_asm_elementwise(
        warp_scan_text(),
        "=&r,r,r",
        [x, sums + digit // 32 * 4],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def sums_before(digit, sums, SUMS: gl.constexpr):
    """What `warp_sums` of the lower groups of 32 digits left."""
    before = gl.zeros_like(digit)
    for k in gl.static_range(SUMS):
        before += gl.where(digit // 32 > k, load_shared(sums + 4 * k), 0)
    return before


@gluon_jit
def places_of_lanes(W: gl.constexpr, RUN: gl.constexpr):
    """The number of each element's warp, and its place in the tile."""
    L: gl.constexpr = warp_layout(W, RUN)
    warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    run = gl.arange(0, RUN, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    warp = warp + gl.zeros([W, RUN, 32], gl.int32, L)
    return warp, warp * (RUN * 32) + run * 32 + lane


@gluon_jit
def ranks(digit, warp, base, DIGITS: gl.constexpr):
    """Of each element: how many of its digit lie before in its warp; see `rank_text`.

    Leaves DIGITS counts of each warp at `base` in shared memory.
    """
    clear(base, gl.num_warps() * DIGITS)
    base = barrier(base)
    same = gl.inline_asm_elementwise(
        same_digit_text(), "=&r,r", [digit], gl.int32, False, 1
    )
    count = base + (warp * DIGITS + digit) * 4
    return gl.inline_asm_elementwise(
        rank_text(), "=&r,r,r", [same, count], gl.int32, False, 1
    )


@gluon_jit
def places(rank):
    """Of what `ranks` returned, once `counts_to_places` is done."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 rank; shr.u32 rank, $1, 16; and.b32 $0, $1, 0xffff;
        ld.shared.u32 $0, [$0]; add.u32 $0, $0, rank; }""",
        "=&r,r",
        [rank],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def counts_to_places(base, row_totals, DIGITS: gl.constexpr, SUMS: gl.constexpr):
    """What `ranks` left becomes where each warp's elements of a digit begin.

    Returns where each digit begins in the sorted tile and, with `row_totals`, elements
    of each digit in a row, in the sorted row. 2 * SUMS words lie behind the counts.
    """
    W: gl.constexpr = gl.num_warps()
    sums = base + W * DIGITS * 4
    base = barrier(base)
    d = gl.arange(0, DIGITS, line_layout(W))
    counts = ()
    total = gl.zeros_like(d)
    for w in gl.static_range(W):
        count = load_shared(base + (w * DIGITS + d) * 4)
        counts += (count,)
        total += count
    start = warp_sums(total, d, sums) - total
    row_start = start
    if row_totals is not None:
        row_start = warp_sums(row_totals, d, sums + SUMS * 4) - row_totals
    base = barrier(base)
    start += sums_before(d, sums, SUMS)
    if row_totals is not None:
        row_start += sums_before(d, sums + SUMS * 4, SUMS)
    before = start
    for w in gl.static_range(W):
        store_shared(base + (w * DIGITS + d) * 4, before)
        before += counts[w]
    barrier(base)
    return start, row_start
