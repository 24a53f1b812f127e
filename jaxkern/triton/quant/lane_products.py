"""The kernel of products of one activation and rows of bfloat16 that warps share.

    y = x w^T, added to another or not, by tensor cores

A lane has 8 columns of each row side by side, and of x. In m16n8k16 the four lanes of
g are row g of the left operand, row g + 8 too, and column g of the right one. Here
these are two rows of the weights, and x, of the columns that those lanes have: so the
diagonals of the result are sums over four lanes, and nothing else of it is looked at.
An instruction multiplies 256 weights, where a lane at a time takes 16: of what stands
between the end of the kernel ahead and the sums a third is left.
"""

from jaxkern.gpu.bulk_ring import shared_word
from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.fixed_point_experts import of_lane
from jaxkern.triton.quant.fixed_point_kernel import places_of_lanes
from jaxkern.triton.quant.fragments import barrier, mma
from jaxkern.triton.quant.one_activation import shared_base, store_word
from jaxkern.triton.quant.product_kernel import (
    begin_early,
    use_shared,
    wait_for_those_ahead,
)


@constexpr_function
def words_of(CHUNKS):
    return 4 * CHUNKS


@constexpr_function
def load_text(CHUNKS, STRIDE, HOW):
    text = ""
    for i in range(CHUNKS):
        four = ", ".join(f"${4 * i + j}" for j in range(4))
        text += f"ld.global{HOW}.v4.b32 {{{four}}}, [${4 * CHUNKS}+{i * STRIDE}];\n"
    return text


@constexpr_function
def load_constraints(CHUNKS):
    return "=r," * (4 * CHUNKS) + "l"


@constexpr_function
def word_types(CHUNKS):
    return (gl.int32,) * (4 * CHUNKS)


@gluon_jit
def load_words(at, CHUNKS: gl.constexpr, STRIDE: gl.constexpr, HOW: gl.constexpr):
    """The words of CHUNKS vectors of 16 bytes, STRIDE bytes from each other."""
    return gl.inline_asm_elementwise(
        load_text(CHUNKS, STRIDE, HOW),
        load_constraints(CHUNKS),
        [at],
        word_types(CHUNKS),
        False,
        1,
    )


@gluon_jit
def sums_of_pair(first, second, x, g, CHUNKS: gl.constexpr):
    """Of two rows the sums over four lanes, in the lane whose c is g // 2."""
    zero = (g * 0).to(gl.float32)
    sums = (zero, zero, zero, zero)
    others = (zero, zero, zero, zero)  # two chains, each of half the length
    for k in gl.static_range(0, words_of(CHUNKS), 4):
        rows = (first[k], second[k], first[k + 1], second[k + 1])
        sums = mma(rows, (x[k], x[k + 1]), sums)
        rows = (first[k + 2], second[k + 2], first[k + 3], second[k + 3])
        others = mma(rows, (x[k + 2], x[k + 3]), others)
    odd = g % 2 == 1
    a = gl.where(odd, sums[1] + others[1], sums[0] + others[0])
    b = gl.where(odd, sums[3] + others[3], sums[2] + others[2])
    return a, b


@gluon_jit
def put(at, x):
    store_word(at, x.to(gl.int32, bitcast=True))


@gluon_jit
def float_of_lane(x, lane):
    return of_lane(x.to(gl.int32, bitcast=True), lane).to(gl.float32, bitcast=True)


@gluon_jit
def total_of(at, lane, COUNT: gl.constexpr):
    """COUNT numbers of each of four lanes, 16 bytes apart, summed in their order."""
    total = shared_word(at, 0).to(gl.float32, bitcast=True)
    for i in gl.static_range(1, COUNT):
        total += shared_word(at, 16 * i).to(gl.float32, bitcast=True)
    total += float_of_lane(total, lane ^ 1)
    return total + float_of_lane(total, lane ^ 2)


@gluon_jit
def lane_products_kernel(
    x_ptr,
    w_ptr,
    residual_ptr,
    y_ptr,
    F: gl.constexpr,
    D: gl.constexpr,
    ROWS: gl.constexpr,
    PLACES: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """ROWS rows of w `[F, D]`, an even number of them; D as all lanes read it.

    Weights are read before the kernel ahead has ended; a residual with x, not behind
    the sums. PLACES: words for the sums of eight groups of lanes of each warp, of each
    row, and one of each lane.
    """
    if AHEAD:
        begin_early(AHEAD == 2)
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = 32 * WARPS
    CHUNKS: gl.constexpr = D // (8 * LANES)
    EACH: gl.constexpr = 32 * WARPS  # bytes of the parts of a sum
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    use_shared(gl.allocate_shared_memory(gl.int32, [1, PLACES], LINE))
    warp, g, c = places_of_lanes(WARPS)
    lane = 4 * g + c
    thread = 32 * warp + lane
    first = gl.program_id(0) * ROWS
    start = w_ptr.to(gl.int64) + thread.to(gl.int64) * 16
    weights = ()
    for r in gl.static_range(ROWS):
        row = gl.minimum(first + r, F - 1).to(gl.int64) * (2 * D)
        weights += (load_words(start + row, CHUNKS, 16 * LANES, ".L1::evict_first"),)
    if AHEAD == 2:
        wait_for_those_ahead()
    row = first + thread
    here = (thread < ROWS) & (row < F)
    added = thread.to(gl.float32) * 0.0
    if residual_ptr is not None:
        added = gl.load(residual_ptr + row, here, 0.0).to(gl.float32)
    at = x_ptr.to(gl.int64) + thread.to(gl.int64) * 16
    x = load_words(at, CHUNKS, 16 * LANES, "")

    memory = shared_base(thread)
    counts = g // 2 == c
    parts = gl.where(counts, warp * 32 + g * 4, ROWS * EACH + 4 * thread) + memory
    step = gl.where(counts, EACH, 0)  # the others' go to one place of each lane
    for r in gl.static_range(0, ROWS, 2):
        a, b = sums_of_pair(weights[r], weights[r + 1], x, g, CHUNKS)
        put(parts + r * step, a)
        put(parts + (r + 1) * step, b)
    barrier()
    which = gl.minimum(lane // 4, ROWS - 1)
    total = total_of(memory + which * EACH + lane % 4 * 4, lane, 2 * WARPS)
    y = float_of_lane(total, lane * 4 % 32) + added
    gl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), here)
