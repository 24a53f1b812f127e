"""Attention of a few queries over the keys that are selected for each of them.

One program takes up to 128 of the query heads that share a key head, for one query, and
a share of the query's list of keys. It reads the keys and values that the list names
where they lie in the cache: of a block of at least BLOCK keys in one piece, of tokens
row by row. Shares are merged as in merge_shares.py. Programs of further heads read the
same keys at the same time, from the L2 cache.

A key of 576 dims is two products, of 512 and of 64. Where a key is its value too, the
first tile is both, so a row of a latent cache is read once.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.attention.over_sequences import over_sequences
from jaxkern.gpu.device import WARP, next_power_of_2
from jaxkern.gpu.triton_call import jit, max_shared_bytes, tl
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.attention.selection import num_blocks, without_repeats
from jaxkern.triton.attention import latent_attention
from jaxkern.triton.attention.decode.attention import FAR, MAX_HEAD_DIM, MAX_QUERIES
from jaxkern.triton.attention.decode.decode_kernel import (
    added_weights,
    share_and_lse,
    shown_scores,
)
from jaxkern.triton.attention.decode.decode_sizes import num_splits, rows_of, sizes_of
from jaxkern.triton.attention.merge_shares import LOG2E, run_and_merge

MAX_REST = latent_attention.MAX_REST  # dims of a key behind a power of two
MAX_WIDE_DIM = 256  # in float32


def unsupported(
    query: Any, key: Any, value: Any, indices: Any, value_dim: int | None, **rest: Any
) -> str | None:
    """A reason in words, or None."""
    del rest
    arrays = {"query": query, "key": key, "value": value, "indices": indices}
    for name, x in arrays.items():
        if x is not None and x.size == 0:
            return f"`{name}` is empty"
    if query.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"`query` is {query.dtype}"
    for name in ("key", "value"):
        x = arrays[name]
        if x is not None and x.dtype != query.dtype:
            return f"`query` is {query.dtype}, `{name}` {x.dtype}"
    _, t, _, h = query.shape
    if t > MAX_QUERIES:
        return f"{t} queries, more than {MAX_QUERIES}"
    hv = dims_of_value(key, value, value_dim)
    dims, rest_dims = whole_and_rest(h)
    if max(dims, hv) > MAX_HEAD_DIM or rest_dims > MAX_REST:
        return f"head dims {h} and {hv}, more than {MAX_HEAD_DIM} and {MAX_REST} behind"
    if query.dtype == jnp.float32 and max(h, hv) > MAX_WIDE_DIM:
        return f"head dims {h} and {hv} in float32, more than {MAX_WIDE_DIM}"
    return unsupported_anywhere()


def dims_of_value(key: Any, value: Any, value_dim: int | None) -> int:
    if value is not None:
        return value.shape[-1]
    return key.shape[-1] if value_dim is None else value_dim


def whole_and_rest(h: int) -> tuple[int, int]:
    """h dims as a power of two from 16 on, and those behind it, likewise or 0."""
    whole = max(next_power_of_2(h + 1) // 2, 16)
    return whole, max(next_power_of_2(h - whole), 16) if h > whole else 0


@jit
def end_of_keys(
    b,
    t,
    kv_lengths_ptr,
    q_offset_ptr,
    S: tl.constexpr,
    T: tl.constexpr,
    CAUSAL: tl.constexpr,
    FAR: tl.constexpr,
):
    """Query t of a sequence sees keys before it."""
    end = tl.full([], S, tl.int64)
    if kv_lengths_ptr is not None:
        end = tl.minimum(end, tl.load(kv_lengths_ptr + b).to(tl.int64))
    if CAUSAL:
        position = tl.full([], S - T, tl.int64)
        if q_offset_ptr is not None:
            offset = tl.load(q_offset_ptr + b).to(tl.int64)
            position = tl.minimum(tl.maximum(offset, -FAR), FAR)
        end = tl.minimum(end, position + t + 1)
    return end


@jit
def named_keys(
    at,
    stop,
    end,
    list_ptr,
    S: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The keys that places at ... at + BLOCK - 1 of a list name, and which are seen."""
    place = at + tl.arange(0, BLOCK)
    inside = place < stop
    if BLOCK_SIZE % BLOCK == 0:
        number = tl.load(list_ptr + at // BLOCK_SIZE).to(tl.int64)
    else:
        number = tl.load(list_ptr + place // BLOCK_SIZE, inside, -1).to(tl.int64)
    exists = (number >= 0) & (number < (S + BLOCK_SIZE - 1) // BLOCK_SIZE)
    j = tl.where(exists, number, 0) * BLOCK_SIZE + place % BLOCK_SIZE
    return j, inside & exists & (j < end)


@jit
def sparse_attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    indices_ptr,
    kv_lengths_ptr,
    q_offset_ptr,
    out_ptr,
    lse_ptr,
    T: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    S: tl.constexpr,
    LISTS: tl.constexpr,
    SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    FAR: tl.constexpr,
    LOG2E: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    REST: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """ROWS heads of one query over SHARE places of its list, which has SELECTED blocks.

    Normalised sums and base-2 log-sum-exps; of one share the result, and the natural
    one. SHARED: the first DIMS of a key are its value.
    """
    program = tl.program_id(0)
    tile = program % TILES
    head = program // TILES % K
    split = program // (TILES * K) % SPLITS
    row_of_t = (program // (TILES * K * SPLITS)).to(tl.int64)
    b = row_of_t // T
    end = end_of_keys(b, row_of_t % T, kv_lengths_ptr, q_offset_ptr, S, T, CAUSAL, FAR)
    list_ptr = indices_ptr + (row_of_t * LISTS + head % LISTS) * SELECTED
    start = split * SHARE
    stop = tl.minimum(start + SHARE, SELECTED * BLOCK_SIZE)

    # row r is head r of those that share the key head
    r = tile * ROWS + tl.arange(0, ROWS)
    present = r < G
    row = (row_of_t * K + head) * G + r
    dims, value_dims = tl.arange(0, DIMS), tl.arange(0, VALUE_DIMS)
    at_q = query_ptr + row[:, None] * H
    q = tl.load(at_q + dims[None, :], present[:, None] & (dims < H)[None, :], 0.0)
    if REST:
        rest = DIMS + tl.arange(0, REST)
        q_mask = present[:, None] & (rest < H)[None, :]
        q_rest = tl.load(at_q + rest[None, :], q_mask, 0.0)

    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_DIMS], tl.float32)
    for at in tl.range(start, stop, BLOCK):
        j, inside = named_keys(at, stop, end, list_ptr, S, BLOCK_SIZE, BLOCK)
        where = ((b * S + j) * K + head)[:, None]
        at_k = key_ptr + where * H
        k_mask = inside[:, None] & (dims < H)[None, :]
        k = tl.load(at_k + dims[None, :], k_mask, 0.0)
        z = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        if REST:
            rest_mask = inside[:, None] & (rest < H)[None, :]
            k_rest = tl.load(at_k + rest[None, :], rest_mask, 0.0)
            z = tl.dot(q_rest, tl.trans(k_rest), z, input_precision="tf32x3")
        v_mask = inside[:, None] & (value_dims < HV)[None, :]
        if SHARED:
            v = k
        elif value_ptr is None:
            v = tl.load(at_k + value_dims[None, :], v_mask, 0.0)
        else:
            v = tl.load(value_ptr + where * HV + value_dims[None, :], v_mask, 0.0)
        z = shown_scores(z, inside, j, 0, 1, SCALE, False, None, None, LOG2E)
        p, shrink, total, top = added_weights(z, top, total)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="tf32x3")

    seen, total, lse = share_and_lse(top, total, SPLITS, LOG2E)
    to = row * SPLITS + split
    tl.store(lse_ptr + to, lse, present)
    # the merge reads no share without keys
    written = present if SPLITS == 1 else present & seen
    out_mask = written[:, None] & (value_dims < HV)[None, :]
    out = acc / total[:, None]
    tl.store(out_ptr + to[:, None] * HV + value_dims[None, :], out, out_mask)


def sizes_in_latent(group: int) -> dict[str, int]:
    """Keys of about 150 KB in flight beside the queries; more would spill."""
    rows = min(max(next_power_of_2(group), 16), latent_attention.MAX_ROWS)
    large = max_shared_bytes() > 200 * 1024
    block, stages = (32, 4) if large else (16, 2)
    rule = {"ROWS": rows, "BLOCK": block, "num_warps": 4 if rows == 16 else 8}
    return rule | {"num_stages": stages, "PER_SM": 1}


def sizes(
    query: jax.Array, group: int, hv: int, shared: bool, block_size: int
) -> dict[str, int]:
    """Rows, keys at once, warps and stages of a program, and how many run together."""
    h = query.shape[-1]
    if shared:
        found = sizes_in_latent(group)
    else:
        rows = rows_of(group, h, hv, query.dtype)
        found = sizes_of(h, hv, query.dtype, rows) | {"ROWS": rows}
    if block_size % found["BLOCK"] and found["BLOCK"] < WARP * found["num_warps"]:
        # Triton divides the stages between a load and the load of its addresses, but
        # where each thread loads one
        found["num_stages"] = 2 * found["num_stages"] - 1
    return found


def launch(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | None,
    indices: jax.Array,
    kv_lengths: jax.Array | None,
    q_offset: jax.Array | None,
    *,
    block_size: int,
    value_dim: int | None,
    scale: float,
    causal: bool,
    unique_indices: bool,
) -> tuple:
    b, t, n, h = query.shape
    s, k = key.shape[1:3]
    lists, selected = indices.shape[2:]
    hv = dims_of_value(key, value, value_dim)
    dims, rest = whole_and_rest(h)
    shared = value is None and hv == dims and query.dtype != jnp.float32
    found = sizes(query, n // k, hv, shared, block_size)
    per_sm, block = found.pop("PER_SM"), found["BLOCK"]
    tiles, keys = -(-n // k // found["ROWS"]), selected * block_size
    splits = num_splits(
        b * t * k * tiles,
        b * t * n,
        keys,
        block * (h + (0 if shared else hv)) * key.dtype.itemsize,
        False,
        {"BLOCK": block, "PER_SM": per_sm},
    )
    given = {
        "query_ptr": query,
        "key_ptr": key,
        "value_ptr": value,
        "indices_ptr": indices if unique_indices else without_repeats(indices),
        "kv_lengths_ptr": kv_lengths,
        "q_offset_ptr": q_offset if causal else None,
    }
    constants = {
        "T": t,
        "K": k,
        "G": n // k,
        "H": h,
        "HV": hv,
        "S": s,
        "LISTS": lists,
        "SELECTED": selected,
        "BLOCK_SIZE": block_size,
        "SCALE": scale,
        "CAUSAL": causal,
        "FAR": FAR,
        "LOG2E": LOG2E,
        "SPLITS": splits,
        "SHARE": -(-num_blocks(keys, block) // splits) * block,
        "TILES": tiles,
        "DIMS": dims,
        "REST": rest,
        "VALUE_DIMS": max(next_power_of_2(hv), 16),
        "SHARED": shared,
    }
    return run_and_merge(
        sparse_attention_kernel,
        b * t * k * tiles * splits,
        given,
        constants | found,
        jax.ShapeDtypeStruct((b, t, n, hv), query.dtype),
        None,
    )


def sparse_attention_fwd(*operands: Any, **options: Any) -> tuple:
    return over_sequences(launch, (1, 2), (), *operands, **options)
