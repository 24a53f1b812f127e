"""The kernel of products of one normalised activation and rows of bfloat16.

    y = n(x) w^T,  or  silu(n(x) gate^T) * (n(x) up^T),  n(x) = x norm / rms(x)

On Hopper the rows of a program come to shared memory by bulk copies, which take no
registers. So a multiprocessor has room for programs of the kernel ahead and of the one
behind. A lane has 8 columns of each row side by side, and of x; the factor of the norm
is that of the sums.
"""

from jaxkern.gpu.bulk_ring import (
    ask_up_to,
    begin_ring,
    has_come,
    own_memory,
    shared_word,
)
from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.fixed_point_kernel import places_of_lanes
from jaxkern.triton.quant.fragments import barrier
from jaxkern.triton.quant.lane_products import float_of_lane, load_words, put
from jaxkern.triton.quant.one_activation import high_float, low_float
from jaxkern.triton.quant.product_kernel import (
    activated,
    begin_early,
    use_shared,
    wait_for_those_ahead,
)

BARS = 16  # bytes: the copies of gate and up are waited for one by one
MOST_SUMS = 16  # of a warp
ALIGNED = 128  # bytes


def bytes_before_rows(WARPS):
    return -(-(BARS + 4 * MOST_SUMS * WARPS) // ALIGNED) * ALIGNED


def memory_of(copied: int, warps: int, d: int) -> int:
    """The bytes of a constant RING, of the rows of a program, both of a pair."""
    return bytes_before_rows(warps) + -(-2 * d * copied // ALIGNED) * ALIGNED


rows_at = constexpr_function(bytes_before_rows)


@constexpr_function
def sums_at():
    return BARS


@constexpr_function
def bytes_of_sums():
    return 4 * MOST_SUMS


@constexpr_function
def shared_text(OFFSET):
    return f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{OFFSET}];"


@gluon_jit
def shared_words(at, OFFSET: gl.constexpr):
    """16 bytes of shared memory."""
    return gl.inline_asm_elementwise(
        shared_text(OFFSET),
        "=r,=r,=r,=r,r",
        [at],
        (gl.int32, gl.int32, gl.int32, gl.int32),
        False,
        1,
    )


@gluon_jit
def shared_float(at, OFFSET: gl.constexpr):
    return shared_word(at, OFFSET).to(gl.float32, bitcast=True)


@gluon_jit
def sum_of_warp(x, lane):
    for i in gl.static_range(5):
        x += float_of_lane(x, lane ^ (1 << i))
    return x


@gluon_jit
def times_norm(x, first, second, CHUNKS: gl.constexpr):
    """x times the norm's weight, and the sum of x's squares, of a lane.

    `first` and `second` are the weights of four columns each of every eight.
    """
    normal = ()
    even = x[0].to(gl.float32) * 0.0
    odd = even
    for k in gl.static_range(CHUNKS):
        for i in gl.static_range(4):
            a, b = low_float(x[4 * k + i]), high_float(x[4 * k + i])
            even += a * a
            odd += b * b
            four = first if i < 2 else second
            u = four[4 * k + i % 2 * 2].to(gl.float32, bitcast=True)
            v = four[4 * k + i % 2 * 2 + 1].to(gl.float32, bitcast=True)
            normal += (a * u, b * v)
    return normal, even + odd


@gluon_jit
def sum_of_row(at, normal, OFFSET: gl.constexpr, CHUNKS: gl.constexpr):
    """A lane's part of the product of a row and x."""
    even = at.to(gl.float32) * 0.0
    odd = even
    LANES: gl.constexpr = 32 * gl.num_warps()
    for k in gl.static_range(CHUNKS):
        w = shared_words(at, OFFSET + k * 16 * LANES)
        for i in gl.static_range(4):
            even += low_float(w[i]) * normal[8 * k + 2 * i]
            odd += high_float(w[i]) * normal[8 * k + 2 * i + 1]
    return even + odd


@gluon_jit
def total_of(at, NUMBER: gl.constexpr):
    """The sum over warps of what each has under a number."""
    total = shared_float(at, 4 * NUMBER)
    for i in gl.static_range(1, gl.num_warps()):
        total += shared_float(at, 4 * NUMBER + bytes_of_sums() * i)
    return total


@gluon_jit
def copied_products_kernel(
    x_ptr,
    norm_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    F: gl.constexpr,
    D: gl.constexpr,
    EPS: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ROWS: gl.constexpr,
    RING: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """ROWS rows of w `[F, D]`, or of each of w `[2, F, D]`; D as all lanes read it.

    Rows and the norm's weight are asked for before the kernel ahead has ended.
    RING: `memory_of`.
    """
    if AHEAD:
        begin_early(AHEAD == 2)
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = 32 * WARPS
    CHUNKS: gl.constexpr = D // (8 * LANES)
    COPIED: gl.constexpr = 2 * ROWS if GATED else ROWS
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    use_shared(gl.allocate_shared_memory(gl.int32, [1, 32], LINE))
    warp, g, c = places_of_lanes(WARPS)
    lane = 4 * g + c
    thread = 32 * warp + lane
    first = gl.program_id(0) * ROWS
    own = own_memory(thread, RING)
    copies = own + rows_at(WARPS)
    leads = (thread == 0).to(gl.int32)
    begin_ring(own, leads, 2)
    count = gl.minimum(F - first, ROWS) * (2 * D) + thread * 0
    source = w_ptr.to(gl.int64) + first.to(gl.int64) * (2 * D)
    source = source + thread.to(gl.int64) * 0
    ask_up_to(own, copies, source, count, leads)
    if GATED:
        ask_up_to(own + 8, copies + ROWS * 2 * D, source + 2 * F * D, count, leads)
    at = norm_ptr.to(gl.int64) + thread.to(gl.int64) * 32
    first_four = load_words(at, CHUNKS, 32 * LANES, "")
    second_four = load_words(at + 16, CHUNKS, 32 * LANES, "")
    barrier()  # what is waited for is ready
    if AHEAD == 2:
        wait_for_those_ahead()
    row = first + thread
    here = (thread < ROWS) & (row < F)
    added = thread.to(gl.float32) * 0.0
    if bias_ptr is not None:
        added = gl.load(bias_ptr + row, here, 0.0).to(gl.float32)
    at = x_ptr.to(gl.int64) + thread.to(gl.int64) * 16
    x = load_words(at, CHUNKS, 16 * LANES, "")
    normal, squares = times_norm(x, first_four, second_four, CHUNKS)
    has_come(own, thread * 0)
    if GATED:
        has_come(own + 8, thread * 0)
    sums = own + sums_at()
    to = sums + warp * bytes_of_sums()
    put(to, sum_of_warp(squares, lane))
    for r in gl.static_range(COPIED):
        y = sum_of_row(copies + thread * 16, normal, r * 2 * D, CHUNKS)
        put(to + 4 * (r + 1), sum_of_warp(y, lane))
    barrier()
    factor = gl.rsqrt(total_of(sums, 0) / D + EPS)
    at = sums + gl.minimum(thread, ROWS - 1) * 4
    y = total_of(at, 1) * factor
    if GATED:
        y = activated(y, ACTIVATION) * (total_of(at, 1 + ROWS) * factor)
    y += added
    gl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), here)
