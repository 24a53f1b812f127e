"""The kernel of products of packed rows with 33 to 64 activations, for Hopper.

    y = x w^T

As many_activations.py, but that weights come through `bulk_ring.py`, many steps ahead,
that the activations are put into the order of the lanes as they come to shared memory,
and that the programs which share the columns of a row are one cluster: each adds up some
activations' sums of all of them, from their shared memory. So it is one launch.
"""

from jaxkern.gpu.bulk_ring import (
    all_have_read,
    ask,
    begin_ring,
    has_come,
    own_memory,
)
from jaxkern.gpu.triton_call import (
    constexpr_function,
    fence_async_shared,
    gl,
    gluon_jit,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from jaxkern.triton.quant.fixed_point_codes import bytes_of_step
from jaxkern.triton.quant.fixed_point_kernel import places_of_lanes
from jaxkern.triton.quant.block_codes import (
    codes_of,
    fragments_of_scale,
    is_power_of_two,
    is_signed,
    middle_of,
)
from jaxkern.triton.quant.fragments import (
    barrier,
    fma_of_pairs,
    signed_codes,
    twice,
    unsigned_codes,
)
from jaxkern.triton.quant.many_activations import (
    factors_of,
    left_operand,
    results_layout,
    sums_layout,
)
from jaxkern.triton.quant.one_activation import shared_base, store_word
from jaxkern.triton.quant.product_kernel import (
    begin_early,
    put,
    wait_for_those_ahead,
)
from jaxkern.triton.quant.several_activations import store_two_floats
from jaxkern.triton.quant.shared_codes import read_shared


@constexpr_function
def loads_layout(WARPS):
    """Of rows of 64 columns, 16 a thread."""
    return gl.BlockedLayout([1, 16], [8, 4], [WARPS, 1], [1, 0])


@gluon_jit
def load_x(rows, left, step, last, Q: gl.constexpr, K: gl.constexpr, COLUMNS: gl.constexpr):
    """64 columns of a step of the activations, in the order of the lanes."""
    L: gl.constexpr = loads_layout(gl.num_warps())
    row = gl.arange(0, COLUMNS, gl.SliceLayout(1, L))[:, None]
    column = step * 256 + Q * 64 + gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    there = (row < left) & (column < K) & (step < last)
    x = gl.load(rows + row * K + column, there, 0.0)
    x = gl.permute(gl.reshape(x, [COLUMNS, 4, 4, 2, 2]), [0, 1, 3, 2, 4])
    return gl.reshape(x, [COLUMNS, 64])


@gluon_jit
def load_step(rows, left, step, last, K: gl.constexpr, COLUMNS: gl.constexpr):
    found = ()
    for q in gl.static_range(4):
        found += (load_x(rows, left, step, last, q, K, COLUMNS),)
    return found


@gluon_jit
def store_step(x, slabs, stage):
    for q in gl.static_range(4):
        slabs.index(stage * 4 + q).store(x[q])


@gluon_jit
def all_of_the_cluster(any):
    """Returns when all its programs are here, and what they stored is seen."""
    gl.inline_asm_elementwise(
        """barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned; mov.b32 $0, $1;""",
        "=r,r",
        [any],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def word_of_rank(at, rank):
    """The float32 at an address of the shared memory of a program of the cluster."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 there; mapa.shared::cluster.u32 there, $1, $2;
        ld.shared::cluster.f32 $0, [there]; }""",
        "=f,r,r",
        [at, rank],
        gl.float32,
        False,
        1,
    )


@gluon_jit
def many_in_clusters_kernel(
    x_ptr,
    tiles_ptr,
    residual_ptr,
    y_ptr,
    ROWS: gl.constexpr,
    K: gl.constexpr,
    TILES: gl.constexpr,
    FORMAT: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STEPS: gl.constexpr,
    SHARES: gl.constexpr,
    DEPTH: gl.constexpr,
    RING: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """x `[ROWS, K]` bfloat16, tiles_ptr `[TILES, 16 row_bytes]`, y `[ROWS, 16 TILES]`.

    A program has a tile of each warp, one of BLOCKS of COLUMNS activations, and STEPS
    steps of the columns; the SHARES of a tile are a cluster. A warp has DEPTH steps of
    its tile on their way.
    """
    if AHEAD:
        begin_early(AHEAD == 2)
    WARPS: gl.constexpr = gl.num_warps()
    BYTES: gl.constexpr = bytes_of_step(FORMAT)
    warp, g, c = places_of_lanes(WARPS)
    leads = (g + c == 0).to(gl.int32)
    share = gl.program_id(0) % SHARES
    block = gl.program_id(0) // SHARES % BLOCKS
    first_tile = gl.program_id(0) // SHARES // BLOCKS * WARPS
    tile = gl.minimum(first_tile + warp, TILES - 1)
    first = share * STEPS
    last = gl.minimum(first + STEPS, K // 256)
    own = own_memory(leads, RING)
    bars = own + warp * (8 * DEPTH)
    places = own + WARPS * (8 * DEPTH) + warp * (DEPTH * BYTES)
    source = tiles_ptr.to(gl.int64) + tile.to(gl.int64) * (K // 256 * BYTES)
    begin_ring(bars, leads, DEPTH)
    for i in gl.static_range(DEPTH):
        asks = leads * (first + i < last).to(gl.int32)
        ask(
            bars + 8 * i,
            places + BYTES * i,
            source + (first + i) * BYTES,
            BYTES,
            asks,
        )
    if AHEAD == 2:
        wait_for_those_ahead()
    slabs = gl.allocate_shared_memory(
        gl.bfloat16, [12, COLUMNS, 64], gl.NVMMASharedLayout(128, 16, 2)
    )
    rows = x_ptr + block * (COLUMNS * K)
    left = ROWS - block * COLUMNS
    x = load_step(rows, left, first, last, K, COLUMNS)
    store_step(x, slabs, 0)
    nothing = (source >> 60).to(gl.int32) + c * 0  # of an address
    SUMS: gl.constexpr = sums_layout(WARPS, COLUMNS)
    totals = gl.zeros([16 * WARPS, COLUMNS], gl.float32, SUMS)
    L: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    before = gl.zeros([16 * WARPS, 64], gl.bfloat16, L)
    for step in range(first, last):
        turn = step - first
        fence_async_shared()
        barrier()  # all have put the step's activations
        stage = turn % 3
        ahead = load_step(rows, left, step + 1, last, K, COLUMNS)
        place = turn % DEPTH
        bar = bars + 8 * place
        at = places + BYTES * place
        has_come(bar, turn // DEPTH % 2 + 0 * c)
        words = read_shared(at, g, c, 1, FORMAT)
        all_have_read(at)
        asks = leads * (step + DEPTH < last).to(gl.int32)
        ask(bar, at, source + (step + DEPTH) * BYTES, BYTES, asks)
        for q in gl.static_range(4):
            w = left_operand(words, c, nothing, q, COLUMNS, FORMAT)
            b = slabs.index(stage * 4 + q).permute([1, 0])
            totals = warpgroup_mma(w, b, totals, is_async=True)
            # an operand in registers is in use until its product is done
            totals, before = warpgroup_mma_wait(1, deps=[totals, before])
            before = w
        # read last two steps ago: all warps have done with those
        store_step(ahead, slabs, (turn + 1) % 3)
    totals, before = warpgroup_mma_wait(0, deps=[totals, before])
    PITCH: gl.constexpr = 64 * WARPS + 32  # bytes: lanes meet different banks
    memory = shared_base(block)  # where the activations lie, all that Triton places
    place_of = gl.arange(0, 16 * WARPS, gl.SliceLayout(1, SUMS))
    weight = (place_of // 16 * 16 + place_of % 8 * 2 + place_of % 16 // 8)[:, None]
    row = gl.arange(0, COLUMNS, gl.SliceLayout(0, SUMS))[None, :]
    barrier()  # all have done with the activations
    store_word(memory + row * PITCH + 4 * weight, totals.to(gl.int32, bitcast=True))
    all_of_the_cluster(share)
    OUT: gl.constexpr = results_layout(WARPS)
    MINE: gl.constexpr = COLUMNS // SHARES
    row2 = share * MINE + gl.arange(0, MINE, gl.SliceLayout(1, OUT))[:, None]
    column = gl.arange(0, 16 * WARPS, gl.SliceLayout(0, OUT))[None, :]
    from_ = memory + row2 * PITCH + 4 * column
    y = word_of_rank(from_, 0 * from_)
    for r in gl.static_range(1, SHARES):
        y += word_of_rank(from_, 0 * from_ + r)
    all_of_the_cluster(share)  # none ends while another reads its memory
    column += first_tile * 16
    there = (column < 16 * TILES) & (row2 < left)
    put(y_ptr, residual_ptr, y, (row2 + block * COLUMNS) * (16 * TILES) + column, there)


@constexpr_function
def product_text(N):
    """Of 64 columns: four matrix instructions, each 16 rows a warp by N activations."""
    R = N // 2
    sums = ", ".join(f"${i}" for i in range(R))
    lines = []
    for k in range(4):
        a = ", ".join(f"${R + 4 * k + i}" for i in range(4))
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{N}k16.f32.bf16.bf16 "
            f"{{{sums}}}, {{{a}}}, x, 1, 1, 1, 0; add.s64 x, x, 2;"
        )
    return f"""{{ .reg .b64 x; mov.b64 x, ${R + 16};
        wgmma.fence.sync.aligned; {" ".join(lines)}
        wgmma.commit_group.sync.aligned; }}"""


@constexpr_function
def product_constraints(N):
    R = N // 2
    same = ",".join(str(i) for i in range(R))
    return ",".join(["=f"] * R + ["r"] * 16) + ",l," + same


@constexpr_function
def wait_text(LATER):
    return f"wgmma.wait_group.sync.aligned {LATER};"


@constexpr_function
def wait_constraints(N):
    same = ",".join(str(i) for i in range(N // 2 + 16))
    return ",".join(["=f"] * (N // 2) + ["=r"] * 16) + "," + same


@constexpr_function
def types_of_sums(N):
    return (gl.float32,) * (N // 2)


@constexpr_function
def types_of_wait(N):
    return (gl.float32,) * (N // 2) + (gl.int32,) * 16


@gluon_jit
def multiplied(w, x, totals, N: gl.constexpr):
    """totals + the products of 64 columns, begun; x is a descriptor."""
    return gl.inline_asm_elementwise(
        product_text(N),
        product_constraints(N),
        w + (x,) + totals,
        types_of_sums(N),
        False,
        1,
    )


@gluon_jit
def awaited(totals, before, LATER: gl.constexpr, N: gl.constexpr):
    """Both, when all products but the LATER last are done."""
    found = gl.inline_asm_elementwise(
        wait_text(LATER),
        wait_constraints(N),
        totals + before,
        types_of_wait(N),
        False,
        1,
    )
    return found


@constexpr_function
def is_one_part(FORMAT):
    """Whether bfloat16 has the scales."""
    return FORMAT.endswith("_BF16")


@gluon_jit
def word_of_pair(pair, row, nothing, FORMAT: gl.constexpr):
    """Two codes as bfloat16 to two weights."""
    if not is_signed(FORMAT):
        less = nothing + twice(-128 - middle_of(FORMAT))
        pair = fma_of_pairs(pair, nothing + 0x3F803F80, less)
    high, low, offset = row
    if not is_power_of_two(FORMAT):
        if not is_one_part(FORMAT):
            offset = fma_of_pairs(pair, low, offset)
    return fma_of_pairs(pair, high, offset)


@gluon_jit
def words_of_columns(words, c, nothing, Q: gl.constexpr, FORMAT: gl.constexpr):
    """Weights of 64 columns, the words of four fragments."""
    GROUP: gl.constexpr = fragments_of_scale(FORMAT)
    magic = nothing + 0x43434343
    found = ()
    for f in gl.static_range(4):
        rows = factors_of(words, (4 * Q + f) // GROUP, FORMAT)
        first, second = codes_of(words, c, nothing, 4 * Q + f, FORMAT)
        if is_signed(FORMAT):
            a = signed_codes(first, second, magic, nothing + -0x407F4080)
        else:
            a = unsigned_codes(first, second, magic)
        for i in gl.static_range(4):
            found += (word_of_pair(a[i], rows[i % 2], nothing, FORMAT),)
    return found


@gluon_jit
def free_in_clusters_kernel(
    x_ptr,
    tiles_ptr,
    residual_ptr,
    y_ptr,
    ROWS: gl.constexpr,
    K: gl.constexpr,
    TILES: gl.constexpr,
    FORMAT: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STEPS: gl.constexpr,
    SHARES: gl.constexpr,
    DEPTH: gl.constexpr,
    RING: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """`many_in_clusters_kernel`, its warps free of barriers within a step."""
    if AHEAD:
        begin_early(AHEAD == 2)
    WARPS: gl.constexpr = gl.num_warps()
    BYTES: gl.constexpr = bytes_of_step(FORMAT)
    warp, g, c = places_of_lanes(WARPS)
    leads = (g + c == 0).to(gl.int32)
    share = gl.program_id(0) % SHARES
    block = gl.program_id(0) // SHARES % BLOCKS
    first_tile = gl.program_id(0) // SHARES // BLOCKS * WARPS
    tile = gl.minimum(first_tile + warp, TILES - 1)
    first = share * STEPS
    last = gl.minimum(first + STEPS, K // 256)
    own = own_memory(leads, RING)
    bars = own + warp * (8 * DEPTH)
    places = own + WARPS * (8 * DEPTH) + warp * (DEPTH * BYTES)
    source = tiles_ptr.to(gl.int64) + tile.to(gl.int64) * (K // 256 * BYTES)
    begin_ring(bars, leads, DEPTH)
    for i in gl.static_range(DEPTH):
        asks = leads * (first + i < last).to(gl.int32)
        ask(
            bars + 8 * i,
            places + BYTES * i,
            source + (first + i) * BYTES,
            BYTES,
            asks,
        )
    if AHEAD == 2:
        wait_for_those_ahead()
    slabs = gl.allocate_shared_memory(
        gl.bfloat16, [12, COLUMNS, 64], gl.NVMMASharedLayout(128, 16, 2)
    )
    rows = x_ptr + block * (COLUMNS * K)
    left = ROWS - block * COLUMNS
    x = load_step(rows, left, first, last, K, COLUMNS)
    store_step(x, slabs, 0)
    nothing = (source >> 60).to(gl.int32) + c * 0  # of an address
    memory = shared_base(c)  # where the activations lie, all that Triton places
    # of rows of 64 columns: 1 kB from eight to eight, swizzled by 128 bytes
    described = (memory >> 4).to(gl.int64) + ((1 << 62) + (64 << 32) + (1 << 16))
    zero = (nothing * 0).to(gl.float32)
    totals = ()
    for _ in gl.static_range(COLUMNS // 2):
        totals += (zero,)
    before = ()
    for _ in gl.static_range(16):
        before += (nothing,)
    for step in range(first, last):
        turn = step - first
        fence_async_shared()
        barrier()  # all have put the step's activations
        stage = turn % 3
        ahead = load_step(rows, left, step + 1, last, K, COLUMNS)
        place = turn % DEPTH
        bar = bars + 8 * place
        at = places + BYTES * place
        has_come(bar, turn // DEPTH % 2 + 0 * c)
        words = read_shared(at, g, c, 1, FORMAT)
        all_have_read(at)
        asks = leads * (step + DEPTH < last).to(gl.int32)
        ask(bar, at, source + (step + DEPTH) * BYTES, BYTES, asks)
        for q in gl.static_range(4):
            w = words_of_columns(words, c, nothing, q, FORMAT)
            slab = described + (stage * 4 + q) * (COLUMNS * 8)
            totals = multiplied(w, slab, totals, COLUMNS)
            # an operand in registers is in use until its product is done
            found = awaited(totals, before, 1, COLUMNS)
            totals = found[: COLUMNS // 2]
            before = w
        # read last two steps ago: all warps have done with those
        store_step(ahead, slabs, (turn + 1) % 3)
    found = awaited(totals, before, 0, COLUMNS)
    totals = found[: COLUMNS // 2]
    PITCH: gl.constexpr = 64 * WARPS + 16  # bytes: lanes meet different banks
    barrier()  # all have done with the activations
    to = memory + warp * 64 + g * 8 + c * (2 * PITCH)
    for e in gl.static_range(COLUMNS // 8):
        put_at = to + e * (8 * PITCH)
        store_two_floats(put_at, totals[4 * e], totals[4 * e + 2], 1 + 0 * c)
        put_at = put_at + PITCH
        store_two_floats(put_at, totals[4 * e + 1], totals[4 * e + 3], 1 + 0 * c)
    all_of_the_cluster(share)
    OUT: gl.constexpr = results_layout(WARPS)
    MINE: gl.constexpr = COLUMNS // SHARES
    row2 = share * MINE + gl.arange(0, MINE, gl.SliceLayout(1, OUT))[:, None]
    column = gl.arange(0, 16 * WARPS, gl.SliceLayout(0, OUT))[None, :]
    from_ = row2 * PITCH + 4 * column
    from_ += shared_base(from_)
    y = word_of_rank(from_, 0 * from_)
    for r in gl.static_range(1, SHARES):
        y += word_of_rank(from_, 0 * from_ + r)
    all_of_the_cluster(share)  # none ends while another reads its memory
    column += first_tile * 16
    there = (column < 16 * TILES) & (row2 < left)
    put(y_ptr, residual_ptr, y, (row2 + block * COLUMNS) * (16 * TILES) + column, there)
