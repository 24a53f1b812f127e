"""Scores of keys by index heads: sum_n weight_n relu(q_n . k), blocks of keys by pools.

One program takes BLOCK keys for one query: it multiplies them by HEADS heads at a time
and adds up over the heads, so that no product of a single head is ever stored. Programs
of further queries read the same keys from the L2 cache.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.attention.over_sequences import over_sequences
from jaxkern.gpu.device import next_power_of_2, num_sms
from jaxkern.gpu.triton_call import jit, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.attention.selection import num_blocks
from jaxkern.triton.attention.decode.attention import FAR
from jaxkern.triton.attention.sparse_attention import end_of_keys

MAX_HEAD_DIM, MAX_WIDE_DIM = 256, 128  # the second in float32
MAX_ELEMENTS = 8192  # of the heads at a time, half as many in float32
MAX_KEYS = 128  # of a program


def unsupported(
    query: Any, key: Any, weights: Any, *lengths: Any, block_size: int, **rest: Any
) -> str | None:
    """A reason in words, or None."""
    del lengths, rest
    if query.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"`query` is {query.dtype}"
    if key.dtype != query.dtype:
        return f"`query` is {query.dtype}, `key` {key.dtype}"
    for name, x in (("query", query), ("key", key)):
        if x.size == 0:
            return f"`{name}` is empty"
    most = MAX_WIDE_DIM if query.dtype == jnp.float32 else MAX_HEAD_DIM
    if query.shape[-1] > most:
        return f"{query.shape[-1]} dims of {query.dtype}, more than {most}"
    if block_size > MAX_KEYS or block_size & (block_size - 1):
        return f"blocks of {block_size} keys, no power of two up to {MAX_KEYS}"
    return unsupported_anywhere(weights=weights)


@jit
def of_blocks(
    scores, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, MEAN: tl.constexpr
):
    """The largest or the mean of what is visible of each block, -inf of nothing."""
    if BLOCK_SIZE == 1:
        return scores
    else:
        each = tl.reshape(scores, [BLOCK // BLOCK_SIZE, BLOCK_SIZE])
        if MEAN:
            seen = each != -float("inf")
            count = tl.sum(seen.to(tl.float32), 1)
            mean = tl.sum(tl.where(seen, each, 0.0), 1) / tl.maximum(count, 1.0)
            return tl.where(count > 0, mean, -float("inf"))
        else:
            return tl.max(each, 1)


@jit
def indexer_scores_kernel(
    query_ptr,
    key_ptr,
    weights_ptr,
    kv_lengths_ptr,
    q_offset_ptr,
    scores_ptr,
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    CAUSAL: tl.constexpr,
    FAR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MEAN: tl.constexpr,
    TILES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Neighbours have the queries of a sequence and the same keys."""
    program = tl.program_id(0)
    t = program % T
    tile = program // T % TILES
    b = (program // (T * TILES)).to(tl.int64)
    end = end_of_keys(b, t, kv_lengths_ptr, q_offset_ptr, S, T, CAUSAL, FAR)
    j = tile * BLOCK + tl.arange(0, BLOCK)
    inside = j < end
    dims = tl.arange(0, DIMS)
    k_mask = inside[:, None] & (dims < H)[None, :]
    k = tl.load(key_ptr + (b * S + j)[:, None] * H + dims[None, :], k_mask, 0.0)

    row = (b * T + t) * N
    scores = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, N, HEADS):
        n = first + tl.arange(0, HEADS)
        q_mask = (n < N)[:, None] & (dims < H)[None, :]
        q = tl.load(query_ptr + (row + n)[:, None] * H + dims[None, :], q_mask, 0.0)
        z = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        weight = tl.load(weights_ptr + row + n, n < N, 0.0).to(tl.float32)
        scores += tl.sum(weight[:, None] * tl.maximum(z, 0.0), 0)

    scores = tl.where(inside, scores, -float("inf"))
    PER_TILE: tl.constexpr = BLOCK // BLOCK_SIZE
    BLOCKS: tl.constexpr = (S + BLOCK_SIZE - 1) // BLOCK_SIZE
    block = tile * PER_TILE + tl.arange(0, PER_TILE)
    to = scores_ptr + (b * T + t) * BLOCKS + block
    tl.store(to, of_blocks(scores, BLOCK, BLOCK_SIZE, MEAN), block < BLOCKS)


def launch(
    query: jax.Array,
    key: jax.Array,
    weights: jax.Array,
    kv_lengths: jax.Array | None,
    q_offset: jax.Array | None,
    *,
    causal: bool,
    block_size: int,
    pool: str,
) -> tuple:
    b, t, n, h = query.shape
    s = key.shape[1]
    dims, wide = max(next_power_of_2(h), 16), query.dtype == jnp.float32
    most = MAX_ELEMENTS // dims // (2 if wide else 1)
    block = MAX_KEYS // (2 if wide else 1)
    if b * t * num_blocks(s, block) < num_sms():
        block //= 2  # so that more multiprocessors read
    block = max(block, block_size)
    tiles, heads = num_blocks(s, block), max(min(next_power_of_2(n), most), 16)
    given = {
        "query_ptr": query,
        "key_ptr": key,
        "weights_ptr": weights,
        "kv_lengths_ptr": kv_lengths,
        "q_offset_ptr": q_offset if causal else None,
    }
    shape = b, t, num_blocks(s, block_size)
    constants = {
        "T": t,
        "N": n,
        "H": h,
        "S": s,
        "CAUSAL": causal,
        "FAR": FAR,
        "BLOCK_SIZE": block_size,
        "MEAN": pool == "mean",
        "TILES": tiles,
        "HEADS": heads,
        "BLOCK": block,
        "DIMS": dims,
        "num_warps": 4 if heads * block <= 4096 else 8,
    }
    results = {"scores_ptr": jax.ShapeDtypeStruct(shape, jnp.float32)}
    return sparse_call(
        indexer_scores_kernel, (b * t * tiles,), given, results, constants
    )


def indexer_scores(*operands: Any, **options: Any) -> jax.Array:
    [scores] = over_sequences(launch, (1,), (), *operands, **options)
    return scores
