"""How programs that share the columns of rows add up their sums: products of packed rows.

    y = the sums of the programs 0, 1, ... of a cluster, in this order

Each program of a cluster has the sums `[16 WARPS weights, ACTIVATIONS]` of its columns.
It sends those of some activations to each other program, through the memory that held
activations before, and adds up what it got for its own. So nothing goes through global
memory but the result, in neighbouring lanes, and no second launch is needed. See
gpu/cluster.py for the barriers.
"""

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.quant.product_kernel import put

PAD = 8  # floats behind the weights of an activation: lanes meet different banks


@constexpr_function
def of_each(ACTIVATIONS, SHARES):
    """Activations that a program adds up."""
    return -(-ACTIVATIONS // SHARES)


@constexpr_function
def floats_of_activation(WARPS):
    return 16 * WARPS + PAD


@constexpr_function
def bytes_of_shares(WARPS, ACTIVATIONS, SHARES):
    """Of what a program is sent."""
    each = of_each(ACTIVATIONS, SHARES)
    return 4 * SHARES * each * floats_of_activation(WARPS)


@gluon_jit
def meet_cluster(any):
    """Returns when all programs of the cluster are here and what they sent is too."""
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned;"
        " barrier.cluster.wait.acquire.aligned; mov.b32 $0, $1;",
        "=r,r",
        [any],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def send(at, rank, x):
    """Writes float32 x to the address `at` of the shared memory of that rank."""
    gl.inline_asm_elementwise(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, $1, $2;"
        " st.shared::cluster.f32 [there], $3; mov.b32 $0, 0; }",
        "=r,r,r,f",
        [at, rank, x],
        gl.int32,
        False,
        1,
    )


@gluon_jit
def received(at):
    return gl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];", "=f,r", [at], gl.float32, False, 1
    )


@gluon_jit
def send_sums(
    memory,
    rank,
    activation,
    weight,
    sums,
    WARPS: gl.constexpr,
    ACTIVATIONS: gl.constexpr,
    SHARES: gl.constexpr,
):
    """Sums of an activation and a weight, numbered in the program, to their adder.

    `memory` is an address, `rank` that of this program; both in every lane of `sums`.
    """
    EACH: gl.constexpr = of_each(ACTIVATIONS, SHARES)
    FLOATS: gl.constexpr = floats_of_activation(WARPS)
    place = (rank * EACH + activation % EACH) * FLOATS + weight
    send(memory + 4 * place, activation // EACH + 0 * place, sums)


@gluon_jit
def put_sums(
    memory,
    rank,
    y_ptr,
    residual_ptr,
    first_activation,
    first_weight,
    ROWS: gl.constexpr,
    WEIGHTS: gl.constexpr,
    ACTIVATIONS: gl.constexpr,
    SHARES: gl.constexpr,
):
    """The sums of all programs for the activations of this one to y `[ROWS, WEIGHTS]`.

    `memory` is one number.
    """
    WARPS: gl.constexpr = gl.num_warps()
    EACH: gl.constexpr = of_each(ACTIVATIONS, SHARES)
    FLOATS: gl.constexpr = floats_of_activation(WARPS)
    PADDED: gl.constexpr = padded(EACH)
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    a = gl.arange(0, PADDED, gl.SliceLayout(1, L))[:, None]
    k = gl.arange(0, 16 * WARPS, gl.SliceLayout(0, L))[None, :]
    there = gl.minimum(a, EACH - 1) * FLOATS + k
    total = gl.zeros([PADDED, 16 * WARPS], gl.float32, L)
    for i in gl.static_range(SHARES):
        total += received(memory + 4 * (i * EACH * FLOATS + there))
    row = first_activation + rank * EACH + a
    column = first_weight + k
    mask = (a < EACH) & (rank * EACH + a < ACTIVATIONS) & (row < ROWS)
    mask = mask & (column < WEIGHTS)
    put(y_ptr, residual_ptr, total, row * WEIGHTS + column, mask)


@constexpr_function
def padded(EACH):
    """The power of two that is not less."""
    return 1 << (EACH - 1).bit_length()
