"""Attention of a few queries over a long cache, linear or paged.

Every key and value is read once, in place. One program takes the g query heads of a key
head and all t queries together as rows of one matrix, and a share of the keys that they
see; a second kernel merges the shares. More rows than a program holds are cut over
programs beside each other, which read the same keys. How many shares there are follows
from the shapes. How long they are follows from the lengths, so that a short sequence in
a large cache, or a window, is spread as well as a full cache.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.triton.attention.decode_kernel import decode_attention_kernel
from jaxkern.triton.attention.merge_shares import LOG2E, run_and_merge
from jaxkern.triton.attention.over_sequences import over_sequences
from jaxkern.triton.block_sizes import next_power_of_2, num_sms, tuned
from jaxkern.triton.triton_call import max_shared_bytes
from jaxkern.triton.triton_call import unsupported as unsupported_anywhere

MAX_QUERIES = 8
MAX_ROWS = 128  # of a program: queries times heads of one key head
FEW_ROWS = 64  # of 4 warps
MAX_ELEMENTS = 16384  # of its padded queries: more would spill
MAX_WIDE_ROWS = 32  # in float32
MAX_WIDE_ELEMENTS = 4096
WIDE_PIECE = 64  # dims of a product of scores in float32 above head dims of 256
MAX_HEAD_DIM = 512
MAX_SPLITS = 256
STAGE_BYTES = 32768  # keys and values that are loaded together
AT_ONCE = 4  # programs of one block that a multiprocessor runs at once
FEW = 8  # programs for each key head, or more, make sequences few
FAR = 2**30  # positions are clipped to it
# What the plan assumes, in microseconds: H200, measured by `benchmarks`.
BYTES_PER_US = 4.3e6
BLOCK_US = 0.25  # of a block of keys in a program that has its memory to itself
KEY_US = 0.01  # and of each of its keys
START_US = 1.5
MERGE_US = 4.0
SPLIT_US = 0.05
MAX_COMPARED = 1024  # lengths that every program reads
MAX_SHARE = 4096  # keys, where lengths are alike


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
    t, h = query.shape[1], query.shape[3]
    hv = value.shape[-1]
    if t > MAX_QUERIES:
        return f"{t} queries, more than {MAX_QUERIES}"
    if max(h, hv) > MAX_HEAD_DIM:
        return f"head dims {h} and {hv}, more than {MAX_HEAD_DIM}"
    tables = rest.get("block_tables")
    if tables is not None and tables.size == 0:
        return "`block_tables` is empty"
    return unsupported_anywhere(sinks=rest.get("sinks"))


def unsupported_paged(
    query: Any, key_pages: Any, value_pages: Any, **rest: Any
) -> str | None:
    return unsupported(query, value_pages, key_pages=key_pages, **rest)


def rows_of(rows: int, h: int, hv: int, dtype: Any) -> int:
    """Rows of a program; what has more is cut over programs that read the same keys."""
    dims = max(next_power_of_2(h), next_power_of_2(hv))
    most = min(MAX_ROWS, MAX_ELEMENTS // dims)
    if dtype == jnp.float32:
        most = min(MAX_WIDE_ROWS, MAX_WIDE_ELEMENTS // dims)
    return max(min(next_power_of_2(rows), most), 16)


def sizes_of(
    h: int, hv: int, dtype: Any, rows: int, few: bool = False
) -> dict[str, int]:
    """Blocks of about STAGE_BYTES, and as many programs as fit a multiprocessor.

    With `few` sequences one program has a multiprocessor: fewer shares to merge.
    """
    alone = few
    dims = next_power_of_2(h), next_power_of_2(hv)
    row = sum(dims) * jnp.dtype(dtype).itemsize
    large = max_shared_bytes() > 128 * 1024
    most = (STAGE_BYTES if large else STAGE_BYTES // 2) // row
    stages, warps = (4, 4) if large else (3, 4)
    if few and large:
        most, stages, warps = 2 * STAGE_BYTES // row, 3, 8
    elif max(dims) > 256 and dtype == jnp.float32:
        most, stages, warps, alone = 4 * most, 1, 8, True
    elif max(dims) > 256:
        stages = 3
    if rows > FEW_ROWS:
        warps, alone = 8, True
    block = min(max(next_power_of_2(most + 1) // 2, 16), 128)
    queries = rows * (dims[0] + block) * jnp.dtype(dtype).itemsize
    if (stages - 1) * block * row + queries > max_shared_bytes():
        stages -= 1
    held = (stages - 1) * block * row + 8192
    per_sm = 1 if alone else max_shared_bytes() // held
    rule = {"BLOCK": block, "num_warps": warps, "num_stages": stages, "PER_SM": per_sm}
    return tuned("decode_attention", h, dtype, rule)


def num_splits(pairs: int, keys: int, stage_bytes: int, uneven: bool, sizes) -> int:
    """The number of shares of each sequence's keys, for the least expected time.

    Args:
      pairs: sequences times key heads times tiles of rows.
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
    rows = rows_of(t * n // k, h, hv, wide)
    sizes = dict(sizes_of(h, hv, wide, rows))
    tiles = -(-t * n // k // rows)
    dims = max(next_power_of_2(h), 16)
    pairs = b * k * tiles
    block = min(sizes["BLOCK"], max(next_power_of_2(s), 16))
    keys = s if window is None else min(s, window + t - 1 + block)
    splits = alike = -(-keys // block)
    narrow = wide != jnp.float32  # wide blocks would spill
    if narrow and splits <= MAX_SPLITS and pairs * splits <= AT_ONCE * num_sms():
        sizes["num_stages"] = 1  # each program has one block
    else:
        few = narrow and pairs <= num_sms() // FEW
        if few:
            sizes = dict(sizes_of(h, hv, wide, rows, few=True))
            block = min(sizes["BLOCK"], max(next_power_of_2(s), 16))
        stage_bytes = block * (h * key.dtype.itemsize + hv * value.dtype.itemsize)
        splits = alike = num_splits(pairs, keys, stage_bytes, False, sizes)
        if b > 1 and kv_lengths is not None:
            splits = num_splits(pairs, keys, stage_bytes, True, sizes)
            if few:  # so many that one sequence alone has the whole device
                splits = max(min(splits, num_sms() // (k * tiles)), alike)
            if few or b > MAX_COMPARED or keys > alike * MAX_SHARE:
                alike = splits
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
        "B": b,
        "ALL_B": next_power_of_2(b),
        "SPLITS": splits,
        "ALIKE": alike,
        "ROWS": rows,
        "TILES": tiles,
        "PIECE": WIDE_PIECE if wide == jnp.float32 and max(h, hv) > 256 else dims,
        "DIMS": dims,
        "VALUE_DIMS": max(next_power_of_2(hv), 16),
    }
    return run_and_merge(
        decode_attention_kernel,
        pairs * splits,
        given,
        constants | sizes,
        jax.ShapeDtypeStruct((b, t, n, hv), query.dtype),
        sinks,
    )


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
