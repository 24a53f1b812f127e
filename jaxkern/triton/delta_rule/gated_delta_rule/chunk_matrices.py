"""What each chunk of the gated delta rule needs whatever the state is, all at once.

For a chunk of 64 tokens and a value head, in the names of
docs/design/gated_delta_rule.md:

    inverse   T = (I + A)^-1 with A_ij = beta_i (k_i . k_j) between_ij below the diagonal
    scores    P T with P = scale (q k^T) between: what beta r adds to out
    vectors   from_start, to_end, beta; float32

A program has the chunk of a value head.
"""

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import jit, tl

CHUNK = 64
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
def quarters(x, N: tl.constexpr, SIZE: tl.constexpr):
    """Of each `[2*SIZE, 2*SIZE]`: both diagonal blocks as `[2*N, ...]`, and the lower."""
    x = tl.reshape(x, (N, 2, SIZE, 2, SIZE))
    left, right = tl.split(tl.permute(x, (0, 2, 4, 1, 3)))
    upper, lower = tl.split(left)
    _, last = tl.split(right)
    both = tl.permute(tl.join(upper, last), (0, 3, 1, 2))
    return tl.reshape(both, (2 * N, SIZE, SIZE)), lower


@jit
def inverse_of_pairs(x, lower, N: tl.constexpr, SIZE: tl.constexpr, PREC: tl.constexpr):
    """`[N, 2*SIZE, 2*SIZE]` from inverted diagonal blocks and the lower between them.

    The lower block of the inverse is -x_2 lower x_1.
    """
    x = tl.permute(tl.reshape(x, (N, 2, SIZE, SIZE)), (0, 2, 3, 1))
    first, last = tl.split(x)
    product = tl.dot(lower, first, input_precision=PREC)
    product = -tl.dot(last, product, input_precision=PREC)
    right = tl.join(tl.zeros_like(last), last)
    x = tl.join(tl.join(first, product), right)  # [N, i, j, row, column]
    return tl.reshape(tl.permute(x, (0, 3, 1, 4, 2)), (N, 2 * SIZE, 2 * SIZE))


@jit
def doubled(x, a, row, column, SIZE: tl.constexpr, PREC: tl.constexpr):
    """Inverses of blocks of 2*SIZE within 16 from those of SIZE: x - x lower x."""
    same = row // (2 * SIZE) == column // (2 * SIZE)
    lower = tl.where(same & (row // SIZE > column // SIZE), a, 0.0)
    product = tl.dot(x, lower, input_precision=PREC)
    return x - tl.dot(product, x, input_precision=PREC)


@jit
def unit_lower_inverse(a, PRECISION: tl.constexpr):
    """(I + a)^-1 for a strictly lower `[64, 64]`, by doubling inverted blocks.

    Blocks of 16 as a batch of four, then pairs of them, then pairs of those.
    """
    halves, lower = quarters(tl.reshape(a, (1, 64, 64)), 1, 32)
    blocks, lowers = quarters(halves, 2, 16)
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    pair = (row // 2 == column // 2) & (row > column)
    x = tl.where(row == column, 1.0, 0.0) - tl.where(pair, blocks, 0.0)
    for k in tl.static_range(3):
        x = doubled(x, blocks, row, column, 2 << k, PRECISION)
    x = inverse_of_pairs(x, lowers, 2, 16, PRECISION)
    return tl.reshape(inverse_of_pairs(x, lower, 1, 32, PRECISION), (64, 64))


@jit
def chunk_matrices_kernel(
    query_ptr,
    key_ptr,
    g_ptr,
    beta_ptr,
    matrices_ptr,
    vectors_ptr,
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
    vectors = vectors_ptr + place * 3 * CHUNK + token
    end = tl.sum(tl.where(token == CHUNK - 1, total, 0.0), 0)
    tl.store(vectors, tl.exp(total))
    tl.store(vectors + CHUNK, tl.exp(end - total))
    tl.store(vectors + 2 * CHUNK, beta)

    h = tl.arange(0, BLOCK_H)
    at = (tokens * NUM_KEY_HEADS + head // GROUP)[:, None] * H + h[None, :]
    present = inside[:, None] & (h < H)[None, :]
    key = tl.load(key_ptr + at, present, 0.0)
    row, column = token[:, None], token[None, :]
    between = decay_between(total[:, None], total[None, :], row > column)
    a = beta[:, None] * tl.dot(key, tl.trans(key)) * between
    inverse = unit_lower_inverse(a, PRECISION)
    tile = place * 2 * CHUNK * CHUNK + row * CHUNK + column
    tl.store(matrices_ptr + tile, inverse.to(matrices_ptr.dtype.element_ty))

    query = tl.load(query_ptr + at, present, 0.0)
    scores = SCALE * tl.dot(query, tl.trans(key))
    scores *= decay_between(total[:, None], total[None, :], row >= column)
    dtype = matrices_ptr.dtype.element_ty
    scores = tl.dot(scores.to(dtype), inverse.to(dtype))
    tile += CHUNK * CHUNK
    tl.store(matrices_ptr + tile, scores.to(matrices_ptr.dtype.element_ty))


def chunk_matrices(query, key, g, beta, *, scale, **sizes):
    """(inverse and scores `[b n c 2 64 64]`, vectors `[b n c 3 64]`)."""
    b, t, k, h = key.shape
    n, chunks = g.shape[2], -(-t // CHUNK)
    matrices = jax.ShapeDtypeStruct((b, n, chunks, 2, CHUNK, CHUNK), key.dtype)
    vectors = jax.ShapeDtypeStruct((b, n, chunks, 3, CHUNK), jnp.float32)
    return bridge.triton_call(
        chunk_matrices_kernel,
        query,
        key,
        g,
        beta,
        out=[matrices, vectors],
        grid=(b * n, chunks),
        T=t,
        NUM_HEADS=n,
        GROUP=n // k,
        H=h,
        BLOCK_H=max(16, next_power_of_2(h)),
        SCALE=scale,
        **({"PRECISION": "tf32", "num_warps": 4, "num_stages": 1} | sizes),
    )
