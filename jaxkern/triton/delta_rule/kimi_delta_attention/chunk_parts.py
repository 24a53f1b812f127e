"""What each chunk of Kimi delta attention needs whatever the state is, all at once.

For a chunk of 64 tokens and a value head, in the names of
docs/design/kimi_delta_attention.md:

    total     G, the sums of g from the chunk's start on, [64, h] in float32
    decayed   read, erase, store: queries and keys with their decays
    across    the decay of the chunk, [h]
    matrices  Y = (I + tril(kk, -1) beta)^-1, for which d = beta Y (v - erase S)
              forward scale qk beta Y; backward scale qk T with
              T = (I + beta tril(kk, -1))^-1
    ends      store^T T: the backward pass alone wants it

qk and kk are made by levels. On level l blocks of 2^l tokens are cut in the middle: a
row of the second half decays from there, a column of the first half to there, both by
e^-|G - G_middle| <= 1, and what they have to do with each other is a product of
matrices. Two tokens meet on one level: that of the highest bit in which their places
differ. So no decay is divided by another, and none overflows.

A program has the chunk of a value head and takes some channels at a time. It stores G
and reads it again, each thread other rows.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import compute_capability, next_power_of_2
from jaxkern.gpu.triton_call import jit, sparse_call, tl
from jaxkern.triton.delta_rule.gated_delta_rule.chunk_matrices import (
    CHUNK,
    running_decay,
    unit_lower_inverse,
)


@jit
def chunk_of_program(T: tl.constexpr, NUM_HEADS: tl.constexpr):
    """(which of all chunks, value head, its tokens, which of them there are)."""
    rows = tl.program_id(1) * 64 + tl.arange(0, 64)
    b, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    return place, head, b.to(tl.int64) * T + rows, rows < T


@jit
def load_channels(ptr, rows, inside, h, H: tl.constexpr):
    """Rows of H numbers, of which some channels."""
    present = inside[:, None] & (h < H)[None, :]
    return tl.load(ptr + rows[:, None] * H + h[None, :], present, 0.0)


@jit
def decay_to_middle(total, total_ptr, token, h, level, H: tl.constexpr):
    """e^-|G - G_middle| of every token, in blocks of 2^level tokens."""
    middle = (token >> level << level) + (1 << (level - 1)) - 1
    there = (h < H)[None, :] & (token >= 0)[:, None]
    to_middle = tl.load(total_ptr + middle[:, None] * H + h[None, :], there, 0.0)
    return tl.exp(-tl.abs(total - to_middle))


@jit
def is_second(token, level):
    """Whether a token is in the second half of its block of 2^level."""
    return (token >> (level - 1)) & 1 == 1


@jit
def meets(token, level):
    """Which rows of second halves have which columns of first ones, `[64, 64]`.

    Of vectors: a matrix that no level changes would stay in registers.
    """
    block, second = token >> level, is_second(token, level)
    row, column = tl.where(second, block, -1), tl.where(second, -2, block)
    return row[:, None] == column[None, :]


@jit
def met(token, level):
    """`meets`, turned."""
    block, second = token >> level, is_second(token, level)
    row, column = tl.where(second, block, -1), tl.where(second, -2, block)
    return column[:, None] == row[None, :]


@jit
def kimi_chunk_kernel(
    query_ptr,
    key_ptr,
    g_ptr,
    beta_ptr,
    total_ptr,
    decayed_ptr,
    across_ptr,
    strength_ptr,
    matrices_ptr,
    pairs_ptr,
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
    dtype = key_ptr.dtype.element_ty
    token = tl.arange(0, CHUNK)
    place, head, tokens, inside = chunk_of_program(T, NUM_HEADS)
    key_rows = tokens * NUM_KEY_HEADS + head // GROUP
    total_ptr += place * CHUNK * H
    row, column = token[:, None], token[None, :]
    qk = tl.zeros((CHUNK, CHUNK), tl.float32)
    kk = tl.zeros((CHUNK, CHUNK), tl.float32)
    itself = tl.zeros((CHUNK,), tl.float32)
    for first in range(0, H, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        there = (h < H)[None, :]
        at = row * H + h[None, :]
        g_at = (tokens * NUM_HEADS + head)[:, None] * H + h[None, :]
        total = running_decay(g_ptr, g_at, inside[:, None] & there)
        tl.store(total_ptr + at, total, there)
        tl.debug_barrier()  # all of this program is stored before it is read
        end = tl.load(total_ptr + (CHUNK - 1) * H + h, h < H, 0.0)
        tl.store(across_ptr + place * H + h, tl.exp(end), h < H)
        key = load_channels(key_ptr, key_rows, inside, h, H).to(tl.float32)
        query = load_channels(query_ptr, key_rows, inside, h, H).to(tl.float32)
        itself += tl.sum(query * key, 1)
        from_start = tl.exp(total)
        decayed = decayed_ptr + place * 3 * CHUNK * H + at
        tl.store(decayed, (query * from_start).to(dtype), there)
        decayed += CHUNK * H
        tl.store(decayed, (key * from_start).to(dtype), there)
        decayed += CHUNK * H
        tl.store(decayed, (key * tl.exp(end[None, :] - total)).to(dtype), there)
        for level in range(1, 7):
            decay = decay_to_middle(total, total_ptr, token, h, level, H)
            near = meets(token, level)
            keys = tl.trans((key * decay).to(dtype))
            kk += tl.where(near, tl.dot(tl.trans(keys), keys), 0.0)
            qk += tl.where(near, tl.dot((query * decay).to(dtype), keys), 0.0)
    qk += tl.where(row == column, itself[:, None], 0.0)
    scores = SCALE * qk
    pair_at = place * CHUNK * CHUNK + row * CHUNK + column
    if pairs_ptr is not None:  # registers are for two inverses
        tl.store(pairs_ptr + pair_at, scores)
    beta = tl.load(beta_ptr + tokens * NUM_HEADS + head, inside, 0.0).to(tl.float32)
    tl.store(strength_ptr + place * CHUNK + token, beta)
    inverse = unit_lower_inverse(kk * beta[None, :], PRECISION)
    tile = matrices_ptr + place * 2 * CHUNK * CHUNK + row * CHUNK + column
    tl.store(tile, inverse.to(dtype))
    if ends_ptr is None:
        scores *= beta[None, :]
    else:
        inverse = unit_lower_inverse(kk * beta[:, None], PRECISION)
        tl.debug_barrier()
        scores = tl.load(pairs_ptr + pair_at)
    scores = tl.dot(scores, inverse, input_precision=PRECISION)
    tl.store(tile + CHUNK * CHUNK, scores.to(dtype))
    if ends_ptr is not None:
        high = inverse.to(dtype)
        low = (inverse - high.to(tl.float32)).to(dtype)
        for first in tl.static_range(0, H, BLOCK_H):
            h = first + tl.arange(0, BLOCK_H)
            there = (h < H)[None, :]
            total = tl.load(total_ptr + row * H + h[None, :], there, 0.0)
            end = tl.load(total_ptr + (CHUNK - 1) * H + h, h < H, 0.0)
            store = load_channels(key_ptr, key_rows, inside, h, H).to(tl.float32)
            store *= tl.exp(end[None, :] - total)
            # T may hold sums of terms that cancel here: nothing is rounded before
            store_high = store.to(dtype)
            store_low = (store - store_high.to(tl.float32)).to(dtype)
            ends = tl.dot(tl.trans(store_high), high)
            ends = tl.dot(tl.trans(store_high), low, ends)
            ends = tl.dot(tl.trans(store_low), high, ends)
            at = (place * H + h[:, None]) * CHUNK + column
            tl.store(ends_ptr + at, ends.to(dtype), (h < H)[:, None])


def channels(h: int, backward: bool) -> int:
    """At a time: as many as leave registers without spilling."""
    most = 16 if backward or compute_capability() < 90 else 32
    return max(16, min(most, next_power_of_2(h)))


def chunk_parts(query, key, g, beta, *, scale, backward=False) -> dict[str, Any]:
    """By name: total `[b n c 64 h]`, decayed `[b n c 3 64 h]`, across `[b n c h]`,
    strength, which is beta, `[b n c 64]`, matrices `[b n c 2 64 64]`, ends
    `[b n c h 64]` or None."""
    b, t, k, h = key.shape
    n, chunks = g.shape[2], -(-t // CHUNK)

    def of_chunks(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((b, n, chunks, *shape), dtype)

    outputs = {
        "total_ptr": of_chunks(CHUNK, h),
        "decayed_ptr": of_chunks(3, CHUNK, h, dtype=key.dtype),
        "across_ptr": of_chunks(h),
        "strength_ptr": of_chunks(CHUNK),
        "matrices_ptr": of_chunks(2, CHUNK, CHUNK, dtype=key.dtype),
        "pairs_ptr": of_chunks(CHUNK, CHUNK) if backward else None,
        "ends_ptr": of_chunks(h, CHUNK, dtype=key.dtype) if backward else None,
    }
    found = sparse_call(
        kimi_chunk_kernel,
        (b * n, chunks),
        {"query_ptr": query, "key_ptr": key, "g_ptr": g, "beta_ptr": beta},
        outputs,
        dict(
            num_warps=4,
            num_stages=1,
            T=t,
            NUM_HEADS=n,
            GROUP=n // k,
            H=h,
            BLOCK_H=channels(h, backward),
            SCALE=scale,
            PRECISION="tf32",
        ),
    )
    parts = dict(zip(outputs, found, strict=True))
    del parts["pairs_ptr"]  # was room for scores
    return parts
