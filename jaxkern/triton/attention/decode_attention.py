"""Attention of a few queries over a long cache, linear or paged.

Every key and value is read once, in place. One program takes the g query heads of a key
head and all t queries together as rows of one matrix, and a share of the keys that they
see; a second kernel merges the shares. How many shares there are follows from the
shapes. How long they are follows from the lengths, so that a short sequence in a large
cache, or a window, is spread as well as a full cache.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxkern.triton.block_sizes import WARP, next_power_of_2, num_sms, tuned
from jaxkern.triton.triton_call import (
    jit,
    libdevice,
    max_shared_bytes,
    sparse_call,
    tl,
)
from jaxkern.triton.triton_call import unsupported as unsupported_anywhere

MAX_QUERIES = 8
MAX_ROWS = 64  # queries times heads of one key head
MAX_WIDE_ROWS = 32  # in float32, and at most WIDE_ELEMENTS: more would spill
WIDE_ELEMENTS = 4096  # of the padded queries
MAX_HEAD_DIM = 256
MAX_SPLITS = 256
STAGE_BYTES = 32768  # keys and values that are loaded together
AT_ONCE = 4  # programs of one block that a multiprocessor runs at once
FEW = 8  # programs for each key head, or more, make sequences few
LOG2E = math.log2(math.e)
FAR = 2**30  # positions are clipped to it
# What the plan assumes, in microseconds: H200, measured by `benchmarks`.
BYTES_PER_US = 4.3e6
BLOCK_US = 0.25  # of a block of keys in a program that has its memory to itself
KEY_US = 0.01  # and of each of its keys
START_US = 1.5
MERGE_US = 4.0
SPLIT_US = 0.05


def unsupported(query: Any, value: Any, **rest: Any) -> str | None:
    """A reason in words, or None; of `attention` and of `paged_attention`."""
    key: Any = rest.get("key", rest.get("key_pages"))
    for name in ("bias", "mask", "q_segment_ids"):
        if rest.get(name) is not None:
            return f"`{name}` is not in the decode kernel"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"`{name}` is {x.dtype}"
        if x.size == 0:
            return f"`{name}` is empty"
    _, t, n, h = query.shape
    group, hv = n // key.shape[2], value.shape[-1]
    if t > MAX_QUERIES:
        return f"{t} queries, more than {MAX_QUERIES}"
    if max(h, hv) > MAX_HEAD_DIM:
        return f"head dims {h} and {hv}, more than {MAX_HEAD_DIM}"
    rows, most = max(next_power_of_2(t * group), 16), MAX_ROWS
    if not query.dtype == key.dtype == value.dtype or query.dtype == jnp.float32:
        dims = max(next_power_of_2(h), next_power_of_2(hv))
        most = min(MAX_WIDE_ROWS, WIDE_ELEMENTS // dims)
    if rows > most:
        return f"{t} queries of {group} heads a key head, more than {most} rows"
    tables = rest.get("block_tables")
    if tables is not None and tables.size == 0:
        return "`block_tables` is empty"
    return unsupported_anywhere(sinks=rest.get("sinks"))


def unsupported_paged(
    query: Any, key_pages: Any, value_pages: Any, **rest: Any
) -> str | None:
    return unsupported(query, value_pages, key_pages=key_pages, **rest)


def sizes_of(h: int, hv: int, dtype: Any, few: bool = False) -> dict[str, int]:
    """Blocks of about STAGE_BYTES, and as many programs as fit a multiprocessor.

    With `few` sequences one program has a multiprocessor: fewer shares to merge.
    """
    row = (next_power_of_2(h) + next_power_of_2(hv)) * jnp.dtype(dtype).itemsize
    large = max_shared_bytes() > 128 * 1024
    most = (STAGE_BYTES if large else STAGE_BYTES // 2) // row
    stages, warps = (4, 4) if large else (3, 4)
    if few and large:
        most, stages, warps = 2 * STAGE_BYTES // row, 3, 8
    block = min(max(next_power_of_2(most + 1) // 2, 16), 128)
    held = (stages - 1) * block * row + 8192
    per_sm = 1 if few else max_shared_bytes() // held
    rule = {"BLOCK": block, "num_warps": warps, "num_stages": stages, "PER_SM": per_sm}
    return tuned("decode_attention", h, dtype, rule)


def num_splits(pairs: int, keys: int, stage_bytes: int, uneven: bool, sizes) -> int:
    """The number of shares of each sequence's keys, for the least expected time.

    Args:
      pairs: sequences times key heads.
      keys: the most that a query sees.
      stage_bytes: of one block of keys and values.
      uneven: sequences can differ in length: so many programs that those of short
        sequences make room for others.
      sizes: of `sizes_of`.
    """
    slots = num_sms() * max(sizes["PER_SM"], 1)
    blocks = -(-keys // sizes["BLOCK"])

    def microseconds(splits: int) -> float:
        programs = pairs * splits
        together = min(programs, slots) * stage_bytes / BYTES_PER_US
        alone = BLOCK_US + KEY_US * sizes["BLOCK"]
        share = -(-blocks // splits) * math.hypot(alone, together)
        merge = MERGE_US + SPLIT_US * splits if splits > 1 else 0
        return -(-programs // slots) * (share + START_US) + merge

    least = min(-(-2 * slots // pairs), blocks // 8) if uneven else 1
    least = min(max(least, 1), MAX_SPLITS)
    return min(range(least, max(least, min(blocks, MAX_SPLITS)) + 1), key=microseconds)


@jit
def share_of_keys(
    b,
    split,
    kv_lengths_ptr,
    q_offset_ptr,
    S: tl.constexpr,
    T: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    FAR: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The keys first ... of all shares, start ... stop - 1 of this; the first position.

    Together the shares have the keys that some row sees.
    """
    first = tl.full([], 0, tl.int32)
    end = tl.full([], S, tl.int32)
    position = tl.full([], S - T, tl.int32)
    if kv_lengths_ptr is not None:
        length = tl.load(kv_lengths_ptr + b).to(tl.int64)
        end = tl.minimum(tl.maximum(length, 0), S).to(tl.int32)
    if q_offset_ptr is not None:
        offset = tl.load(q_offset_ptr + b).to(tl.int64)
        position = tl.minimum(tl.maximum(offset, -FAR), FAR).to(tl.int32)
    if CAUSAL:
        end = tl.minimum(end, position + T)
    if WINDOW is not None:
        first = tl.minimum(tl.maximum(position - WINDOW + 1, 0), S)
    aligned = first // BLOCK * BLOCK
    share = tl.cdiv(tl.cdiv(tl.maximum(end - aligned, 0), BLOCK), SPLITS) * BLOCK
    start = aligned + split * share
    stop = tl.minimum(start + share, end)
    return first, start, stop, position


@jit
def decode_attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    block_tables_ptr,
    kv_lengths_ptr,
    q_offset_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    T: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    S: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAR: tl.constexpr,
    LOG2E: tl.constexpr,
    NATIVE_SCORES: tl.constexpr,
    NATIVE_SUMS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
):
    """One share of the keys: its normalised sum and base-2 log-sum-exp.

    With one share: the result, and the natural log-sum-exp with the sinks.
    """
    program = tl.program_id(0)
    head = program % K
    split = program // K % SPLITS
    b = (program // (K * SPLITS)).to(tl.int64)

    first, start, stop, position = share_of_keys(
        b, split, kv_lengths_ptr, q_offset_ptr, S, T, CAUSAL, WINDOW, FAR, SPLITS, BLOCK
    )

    # row r is query r // G of head r % G
    r = tl.arange(0, ROWS)
    present = r < T * G
    row = (b * T + r // G) * (K * G) + head * G + r % G
    p_at = position + r // G
    dims = tl.arange(0, DIMS)
    value_dims = tl.arange(0, VALUE_DIMS)
    q_mask = present[:, None] & (dims < H)[None, :]
    q = tl.load(query_ptr + row[:, None] * H + dims[None, :], q_mask, 0.0)
    if not NATIVE_SCORES:
        q = q.to(tl.float32)

    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_DIMS], tl.float32)
    for at in tl.range(start, stop, BLOCK):
        j = at + tl.arange(0, BLOCK)
        inside = (j >= first) & (j < stop)
        if block_tables_ptr is None:
            where = b * S + j
        else:
            table = block_tables_ptr + b * (S // PAGE)
            if PAGE % BLOCK == 0:
                page = tl.zeros([BLOCK], tl.int64) + tl.load(table + at // PAGE)
            else:
                page = tl.load(table + j // PAGE, inside, -1).to(tl.int64)
            exists = (page >= 0) & (page < NUM_PAGES)
            inside = inside & exists
            where = tl.where(exists, page, 0) * PAGE + j % PAGE
        where = where[:, None] * K + head
        k_mask = inside[:, None] & (dims < H)[None, :]
        v_mask = inside[:, None] & (value_dims < HV)[None, :]
        k = tl.load(key_ptr + where * H + dims[None, :], k_mask, 0.0)
        v = tl.load(value_ptr + where * HV + value_dims[None, :], v_mask, 0.0)
        if not NATIVE_SCORES:
            k = k.to(tl.float32)
        z = tl.dot(q, tl.trans(k), input_precision="tf32x3") * SCALE
        if SOFTCAP is not None:
            z = SOFTCAP * libdevice.tanh(z / SOFTCAP)
        visible = inside[None, :]
        if CAUSAL and T > 1:
            visible = visible & (j[None, :] <= p_at[:, None])
        if WINDOW is not None and T > 1:
            visible = visible & (j[None, :] > p_at[:, None] - WINDOW)
        z = tl.where(visible, z * LOG2E, -float("inf"))
        higher = tl.maximum(top, tl.max(z, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        p = tl.exp2(z - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        if NATIVE_SUMS:
            acc = tl.dot(p.to(v.dtype), v, acc)
        else:
            acc = tl.dot(p, v.to(tl.float32), acc, input_precision="tf32x3")
        top = higher

    if SPLITS == 1 and sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head * G + r % G).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.exp2(sink - base)
        acc = acc * shrink[:, None]
        top = base
    seen = total != 0.0
    total = tl.where(seen, total, 1.0)
    lse = tl.where(seen, top + tl.log2(total), -float("inf"))
    if SPLITS == 1:
        lse = lse / LOG2E
    to = row * SPLITS + split
    tl.store(lse_ptr + to, lse, present)
    # the merge reads no share without keys
    out_mask = present[:, None] & (value_dims < HV)[None, :]
    if SPLITS > 1:
        out_mask = out_mask & seen[:, None]
    out = acc / total[:, None]
    tl.store(out_ptr + to[:, None] * HV + value_dims[None, :], out, out_mask)


@jit
def merge_kernel(
    parts_ptr,
    part_lse_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    N: tl.constexpr,
    HV: tl.constexpr,
    LOG2E: tl.constexpr,
    SPLITS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
):
    """The shares of one query of one head, weighted by exp2 of their log-sum-exp.

    VALUE_DIMS of its dims; each program finds the weights for itself.
    """
    PARTS: tl.constexpr = (HV + VALUE_DIMS - 1) // VALUE_DIMS
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    every = tl.arange(0, ALL_SPLITS)
    lses = part_lse_ptr + row * SPLITS
    z = tl.load(lses + every, every < SPLITS, -float("inf"))
    top = tl.max(z, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row % N).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp2(z - base), 0)
    if sinks_ptr is not None:
        total += tl.exp2(sink - base)
    seen = total != 0.0
    total = tl.where(seen, total, 1.0)
    dims = part * VALUE_DIMS + tl.arange(0, VALUE_DIMS)
    # loaded beside the log-sum-exps, not after them: what nobody wrote is dropped here
    mask = (every < SPLITS)[:, None] & (dims < HV)[None, :]
    at = (row * SPLITS + every)[:, None] * HV + dims[None, :]
    sums = tl.load(parts_ptr + at, mask, 0.0)
    sums = tl.where((z != -float("inf"))[:, None], sums, 0.0)
    out = tl.sum(tl.exp2(z - base)[:, None] * sums, 0)
    tl.store(out_ptr + row * HV + dims, out / total, dims < HV)
    lse = tl.where(seen, base + tl.log2(total), top) / LOG2E
    tl.store(lse_ptr + row, lse, part == 0)


def launch(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    block_tables: jax.Array | None,
    kv_lengths: jax.Array | None,
    q_offset: jax.Array | None,
    sinks: jax.Array | None,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> tuple:
    """The kernels over keys `[b, s, k, h]`, or over pages if there are tables."""
    b, t, n, h = query.shape
    s, k = key.shape[1:3]
    page, hv, num_pages = s, value.shape[-1], key.shape[0]
    if block_tables is not None:
        s = page * block_tables.shape[1]
    # narrower operands than their partner are widened by the kernel
    native = query.dtype == key.dtype and query.dtype != jnp.float32
    native_sums = query.dtype == value.dtype and query.dtype != jnp.float32
    wide = key.dtype if native and native_sums else jnp.float32
    sizes = dict(sizes_of(h, hv, wide))
    block = min(sizes["BLOCK"], max(next_power_of_2(s), 16))
    keys = s if window is None else min(s, window + t - 1 + block)
    splits = -(-keys // block)
    narrow = wide != jnp.float32  # wide blocks would spill
    if narrow and splits <= MAX_SPLITS and b * k * splits <= AT_ONCE * num_sms():
        sizes["num_stages"] = 1  # each program has one block
    else:
        if narrow and b * k <= num_sms() // FEW:
            sizes = dict(sizes_of(h, hv, wide, few=True))
            block = min(sizes["BLOCK"], max(next_power_of_2(s), 16))
        stage_bytes = block * (h * key.dtype.itemsize + hv * value.dtype.itemsize)
        uneven = b > 1 and kv_lengths is not None
        splits = num_splits(b * k, keys, stage_bytes, uneven, sizes)
    sizes["BLOCK"] = block
    del sizes["PER_SM"]
    if block_tables is not None and page % block:
        # Triton divides the stages between a load and the load of its addresses
        sizes["num_stages"] = 2 * sizes["num_stages"] - 1
    given = {
        "query_ptr": query,
        "key_ptr": key,
        "value_ptr": value,
        "block_tables_ptr": block_tables,
        "kv_lengths_ptr": kv_lengths,
        "q_offset_ptr": q_offset if causal or window is not None else None,
        "sinks_ptr": sinks if splits == 1 else None,
    }
    constants = {
        "T": t,
        "K": k,
        "G": n // k,
        "H": h,
        "HV": hv,
        "S": s,
        "PAGE": page,
        "NUM_PAGES": num_pages,
        "SCALE": scale,
        "CAUSAL": causal,
        "WINDOW": None if window is None else min(window, FAR),
        "SOFTCAP": softcap,
        "FAR": FAR,
        "LOG2E": LOG2E,
        "NATIVE_SCORES": native,
        "NATIVE_SUMS": native_sums,
        "SPLITS": splits,
        "ROWS": max(next_power_of_2(t * n // k), 16),
        "DIMS": max(next_power_of_2(h), 16),
        "VALUE_DIMS": max(next_power_of_2(hv), 16),
    }
    return run_and_merge(
        decode_attention_kernel,
        b * k * splits,
        given,
        constants | sizes,
        jax.ShapeDtypeStruct((b, t, n, hv), query.dtype),
        sinks,
    )


def run_and_merge(
    kernel: Any,
    programs: int,
    given: dict,
    constants: dict,
    out: jax.ShapeDtypeStruct,
    sinks: jax.Array | None,
) -> tuple:
    """(out, lse) of a kernel that leaves SPLITS parts of each row, or of one part all.

    Args:
      kernel: writes `out_ptr` and `lse_ptr`.
      programs: of it.
      given: its operands.
      constants: its constants and options.
      out: `[b, t, n, hv]`.
      sinks: for the merge; with one split the kernel has them.
    """
    *rows, hv = out.shape
    splits = constants["SPLITS"]
    results = {
        "out_ptr": out,
        "lse_ptr": jax.ShapeDtypeStruct((*rows,), jnp.float32),
    }
    if splits == 1:
        return sparse_call(kernel, (programs,), given, results, constants)
    parts = {
        "out_ptr": jax.ShapeDtypeStruct((*rows, splits, hv), jnp.float32),
        "lse_ptr": jax.ShapeDtypeStruct((*rows, splits), jnp.float32),
    }
    sums, lses = sparse_call(kernel, (programs,), given, parts, constants)
    every = next_power_of_2(splits)
    # all shares are loaded at once, so that their latency is paid once, by programs
    # that are small if there are few
    dims = max(next_power_of_2(hv), 16)
    while dims > 16 and (
        every * dims > 4096 or math.prod(rows) * hv <= num_sms() * dims
    ):
        dims //= 2
    merge = {
        "N": rows[-1],
        "HV": hv,
        "LOG2E": LOG2E,
        "SPLITS": splits,
        "ALL_SPLITS": every,
        "VALUE_DIMS": dims,
        "num_warps": min(max(every * dims // (32 * WARP), 1), 8),
    }
    given = {"parts_ptr": sums, "part_lse_ptr": lses, "sinks_ptr": sinks}
    programs = math.prod(rows) * -(-hv // dims)
    return sparse_call(merge_kernel, (programs,), given, results, merge)


def over_sequences(
    launch: Callable,
    caches: Sequence[int],
    shared: Sequence[int],
    *operands: jax.Array | None,
    **options: Any,
) -> tuple:
    """`launch`, where a vmap over sequences makes more sequences, not more launches.

    Args:
      launch: takes operands, the query first, and options; returns arrays.
      caches: operands that are too large to be copied for each sequence.
      shared: operands without a dim of sequences.
    """
    run = custom_vmap(functools.partial(launch, **options))
    again = functools.partial(over_sequences, launch, caches, shared, **options)

    @run.def_vmap
    def batch(size, mapped, *operands):
        own = all(mapped[i] or operands[i] is None for i in caches)
        if mapped[0] and own and not any(mapped[i] for i in shared):

            def fold(i, x):
                if x is None or i in shared:
                    return x
                x = x if mapped[i] else jnp.broadcast_to(x, (size, *x.shape))
                return x.reshape(-1, *x.shape[2:])

            out = again(*(fold(i, x) for i, x in enumerate(operands)))
            return tuple(y.reshape(size, -1, *y.shape[1:]) for y in out), (True, True)

        def one(moving):
            both = zip(moving, operands, strict=True)
            return again(*(x if m is None else m for m, x in both))

        moving = [x if m else None for x, m in zip(operands, mapped, strict=True)]
        return jax.lax.map(one, moving), (True, True)

    return run(*operands)


def attention_fwd(
    query,
    key,
    value,
    bias,
    mask,
    q_segment_ids,
    kv_segment_ids,
    kv_lengths,
    q_offset,
    sinks,
    **options,
):
    del bias, mask, q_segment_ids, kv_segment_ids  # the row refuses them
    operands = query, key, value, None, kv_lengths, q_offset, sinks
    return over_sequences(launch, (1, 2), (6,), *operands, **options)


def paged_attention_fwd(
    query, key_pages, value_pages, block_tables, kv_lengths, q_offset, sinks, **options
):
    pages = key_pages, value_pages, block_tables
    operands = query, *pages, kv_lengths, q_offset, sinks
    return over_sequences(launch, (), (1, 2, 6), *operands, **options)
