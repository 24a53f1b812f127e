"""What each chunk of the gated delta rule needs whatever the state is, all at once.

For a chunk of 64 tokens and a value head, in the names of
docs/design/gated_delta_rule.md:

    inverse   T = (I + A)^-1, A_ij = beta_i (k_i . k_j) between_ij below the diagonal
    scores    P T with P = scale (q k^T) between: what beta r adds to out
    vectors   from_start, to_end, beta, the running sum of g; float32
    ends      k^T to_end T, turned: the backward pass alone wants it

T may hold sums of terms that cancel in `ends`, so that is a product of T in two parts,
not yet rounded. A program has the chunk of a value head.
"""

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import jit, sparse_call, tl
from jaxkern.triton.delta_rule.gated_delta_rule import (
    warp_chunk_matrices,
    warp_chunks,
)
from jaxkern.triton.delta_rule.gated_delta_rule.lower_rows import LINES

CHUNK = 64
REGISTERS = 168  # of a thread: three programs beside each other
WARPS = 2  # of a program by warps
LEAST = -120.0  # g below counts as this: its exponential is 0 in float32


@jit
def running_decay(g_ptr, rows, inside):
    """g summed from the chunk's start on.

    A g below -120 counts as -120: the exponential of a sum that holds one is 0 in
    float32 either way, so -inf is a factor 0, and the difference of two sums is a
    number. The sums stay so small that such differences keep their digits.
    """
    g = tl.load(g_ptr + rows, inside, 0.0).to(tl.float32)
    return tl.cumsum(tl.where(g < -120.0, -120.0, g), 0)


@jit
def decay_between(later, earlier, seen):
    """exp(later - earlier) where `seen`, else 0."""
    return tl.where(seen, tl.exp(tl.where(seen, later - earlier, 0.0)), 0.0)


@jit
def diagonal_blocks(a, N: tl.constexpr, SIZE: tl.constexpr):
    """`[N*SIZE, N*SIZE]` -> `[N, SIZE, SIZE]`."""
    block = tl.arange(0, N)
    same = block[:, None, None, None] == block[None, None, :, None]
    a = tl.reshape(a, (N, SIZE, N, SIZE))
    return tl.sum(tl.where(same, a, 0.0), 2)


@jit
def in_pairs(x, N: tl.constexpr, SIZE: tl.constexpr):
    """`[N, SIZE, SIZE]` -> `[N/2, 2*SIZE, 2*SIZE]`: two blocks on each diagonal."""
    half = tl.arange(0, 2)
    same = half[None, :, None, None, None] == half[None, None, None, :, None]
    x = tl.reshape(x, (N // 2, 2, SIZE, 1, SIZE))
    x = tl.where(same, x, tl.zeros((N // 2, 2, SIZE, 2, SIZE), tl.float32))
    return tl.reshape(x, (N // 2, 2 * SIZE, 2 * SIZE))


@jit
def corrected(x, a, row, column, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of blocks of 2*SIZE from those of SIZE: x - x lower x."""
    same = row // (2 * SIZE) == column // (2 * SIZE)
    lower = tl.where(same & (row // SIZE > column // SIZE), a, 0.0)
    product = tl.dot(x, lower, input_precision=PRECISION)
    return x - tl.dot(product, x, input_precision=PRECISION)


@jit
def unit_lower_inverse(a, PRECISION: tl.constexpr):
    """(I + a)^-1 for a strictly lower `[64, 64]`, by doubling inverted blocks.

    Blocks of 16 as a batch of four, then of 32 as two, then the whole.
    """
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    blocks = diagonal_blocks(a, 4, 16)
    pair = (row // 2 == column // 2) & (row > column)
    x = tl.where(row == column, 1.0, 0.0) - tl.where(pair, blocks, 0.0)
    for k in tl.static_range(3):
        x = corrected(x, blocks, row, column, 2 << k, PRECISION)
    row, column = tl.arange(0, 32)[None, :, None], tl.arange(0, 32)[None, None, :]
    x = in_pairs(x, 4, 16)
    x = corrected(x, diagonal_blocks(a, 2, 32), row, column, 16, PRECISION)
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    x = tl.reshape(in_pairs(x, 2, 32), (64, 64))
    return corrected(x, a, row, column, 32, PRECISION)


@jit
def chunk_matrices_kernel(
    query_ptr,
    key_ptr,
    g_ptr,
    beta_ptr,
    matrices_ptr,
    vectors_ptr,
    ends_ptr,
    T: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    CHUNK: tl.constexpr = 64
    NUM_KEY_HEADS: tl.constexpr = NUM_HEADS // GROUP
    chunk = tl.program_id(1)
    b = (tl.program_id(0) // NUM_HEADS).to(tl.int64)
    head = tl.program_id(0) % NUM_HEADS
    token = tl.arange(0, CHUNK)
    tokens = b * T + chunk * CHUNK + token
    inside = chunk * CHUNK + token < T
    total = running_decay(g_ptr, tokens * NUM_HEADS + head, inside)
    beta = tl.load(beta_ptr + tokens * NUM_HEADS + head, inside, 0.0).to(tl.float32)
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + chunk
    vectors = vectors_ptr + place * 4 * CHUNK + token
    end = tl.sum(tl.where(token == CHUNK - 1, total, 0.0), 0)
    tl.store(vectors, tl.exp(total))
    tl.store(vectors + CHUNK, tl.exp(end - total))
    tl.store(vectors + 2 * CHUNK, beta)
    tl.store(vectors + 3 * CHUNK, total)

    h = tl.arange(0, BLOCK_H)
    at = (tokens * NUM_KEY_HEADS + head // GROUP)[:, None] * H + h[None, :]
    present = inside[:, None] & (h < H)[None, :]
    key = tl.load(key_ptr + at, present, 0.0)
    row, column = token[:, None], token[None, :]
    between = decay_between(total[:, None], total[None, :], row > column)
    a = beta[:, None] * tl.dot(key, tl.trans(key)) * between
    inverse = unit_lower_inverse(a, PRECISION)
    if ends_ptr is not None:
        late = tl.exp(end - total)[:, None] * inverse
        high = late.to(key.dtype)
        ends = tl.dot(tl.trans(key), high)
        ends = tl.dot(tl.trans(key), (late - high.to(tl.float32)).to(key.dtype), ends)
        at_ends = (place * H + h[:, None]) * CHUNK + column
        tl.store(ends_ptr + at_ends, ends.to(key.dtype), (h < H)[:, None])
    tile = place * 2 * CHUNK * CHUNK + row * CHUNK + column
    tl.store(matrices_ptr + tile, inverse.to(matrices_ptr.dtype.element_ty))

    query = tl.load(query_ptr + at, present, 0.0)
    scores = SCALE * tl.dot(query, tl.trans(key))
    scores *= decay_between(total[:, None], total[None, :], row >= column)
    scores = tl.dot(scores, inverse, input_precision=PRECISION)
    tile += CHUNK * CHUNK
    tl.store(matrices_ptr + tile, scores.to(matrices_ptr.dtype.element_ty))


def warps_of(heads: int, group: int, h: int, backward: bool) -> int:
    """Of a program of warp_chunk_matrices.py: neighbours share a key head, if they can.

    Where they cannot, a program of one warp leaves room for others: rows of a key head
    of 256 dims take 64 kB. Four that share one are a program forward.
    """
    if not backward and h <= 128 and group % 4 == 0:
        return 4
    most = WARPS if h <= 128 or group % WARPS == 0 else 1
    return next(w for w in (most, 1) if heads % w == 0)


def kernel_by_warps(key, g, scale, backward, packed):
    """(kernel, programs of all heads, constants) for compute capability 9.0."""
    b, t, k, h = key.shape
    n = g.shape[2]
    warps = warps_of(n, n // k, h, backward)
    known = warp_chunks.Chunks(
        tokens=t,
        heads=n,
        group=n // k,
        h=h,
        scale=scale,
        warps=warps,
        packed=packed,
    )
    options = dict(num_warps=warps, num_stages=1)
    if warps == 4:  # three programs side by side, though some registers spill
        options["max_registers"] = REGISTERS
    kernel = warp_chunk_matrices.warp_chunk_matrices_kernel
    return kernel, b * n // warps, {"P": known, **options}


def kernel_by_programs(key, g, scale):
    b, t, k, h = key.shape
    n = g.shape[2]
    constants = dict(
        num_warps=4,
        num_stages=1,
        max_registers=REGISTERS if h <= 128 else None,
        T=t,
        NUM_HEADS=n,
        GROUP=n // k,
        H=h,
        BLOCK_H=max(16, next_power_of_2(h)),
        SCALE=scale,
        PRECISION="tf32",
    )
    return chunk_matrices_kernel, b * n, constants


def results_of_chunks(key, heads: int, packed: bool = False):
    """What every pass needs of chunks: inverse and scores; vectors."""
    b, t, _, _ = key.shape
    shape = b, heads, -(-t // CHUNK)
    lines = (LINES,) if packed else (2, CHUNK)
    matrices = jax.ShapeDtypeStruct((*shape, *lines, CHUNK), key.dtype)
    return matrices, jax.ShapeDtypeStruct((*shape, 4, CHUNK), jnp.float32)


def chunk_matrices(
    query, key, g, beta, *, scale, backward=False, by_warps=False, packed=False
):
    """(inverse and scores `[b n c 2 64 64]`, vectors `[b n c 4 64]`, ends or None).

    Ends are `[b n c h 64]`. `by_warps` takes the kernel of warp_chunk_matrices.py,
    which may leave inverse and scores `packed`, `[b n c 80 64]` (lower_rows.py).
    """
    b, t, _, h = key.shape
    n, chunks = g.shape[2], -(-t // CHUNK)
    if by_warps:
        kernel, programs, constants = kernel_by_warps(key, g, scale, backward, packed)
    else:
        kernel, programs, constants = kernel_by_programs(key, g, scale)
    matrices, vectors = results_of_chunks(key, n, packed)
    ends = jax.ShapeDtypeStruct((b, n, chunks, h, CHUNK), key.dtype)
    return sparse_call(
        kernel,
        (programs, chunks),
        {"query_ptr": query, "key_ptr": key, "g_ptr": g, "beta_ptr": beta},
        {
            "matrices_ptr": matrices,
            "vectors_ptr": vectors,
            "ends_ptr": ends if backward else None,
        },
        constants,
    )
