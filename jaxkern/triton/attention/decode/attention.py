"""Attention of a few queries over a long cache, linear or paged.

Every key and value is read once, in place. One program takes the g query heads of a key
head and all t queries together as rows of one matrix, and a share of the keys that they
see; the shares are merged by a second kernel, or where they are so few that they fit a
cluster by the programs themselves. More rows than a program holds are cut over
programs beside each other, which read the same keys. How many shares there are follows
from the shapes. How long they are follows from the lengths, so that a short sequence in
a large cache, or a window, is spread as well as a full cache.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.attention.over_sequences import over_sequences
from jaxkern.gpu.device import WARP, next_power_of_2, num_sms
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.attention.attend import saves_no_tail
from jaxkern.primitives.attention.operands import AttentionOperands
from jaxkern.triton.attention.decode.decode_kernel import decode_attention_kernel
from jaxkern.triton.attention.decode.decode_sizes import (
    FEW_ROWS,
    MAX_SPLITS,
    WIDE_PIECE,
    num_splits,
    rows_of,
    sizes_in_a_cluster,
    sizes_of,
)
from jaxkern.triton.attention.merge_shares import LOG2E, run_and_merge

MAX_QUERIES = 8
MAX_HEAD_DIM = 512
MAX_WIDE_TILES = 256  # of rows, in float32, times head dims
AT_ONCE = 4  # programs of one block that a multiprocessor runs at once
FEW = 8  # sequences are few where the GPU has so many programs for each key head
FAR = 2**30  # positions are clipped to it
MAX_COMPARED = 1024  # the most lengths that every program compares
MAX_SHARE = 4096  # keys of a share, where sequences are alike in length
MAX_MERGED = 4096  # rows: merging more costs more than balanced lengths save


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


def wide_dtype(query: Any, key: Any, value: Any) -> Any:
    """Of both products; narrower operands than their partner are widened."""
    alike = query.dtype == key.dtype == value.dtype
    return query.dtype if alike else jnp.float32


def slower(query: Any, key: Any, value: Any, **rest: Any) -> str | None:
    """Why XLA is faster, or None: arithmetic in float32, where all keys are seen."""
    _, t, n, h = query.shape
    group, hv = n // key.shape[2], value.shape[3]
    if wide_dtype(query, key, value) != jnp.float32:
        return None
    if rest.get("kv_lengths") is not None or rest.get("window") is not None:
        return None
    tiles = -(-t * group // rows_of(t * group, h, hv, jnp.float32))
    if tiles > 1 and tiles * next_power_of_2(max(h, hv)) > MAX_WIDE_TILES:
        return f"{t} queries of {group} heads a key head of {h} dims in float32"
    return None


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
    native = query.dtype == key.dtype and query.dtype != jnp.float32
    native_sums = query.dtype == value.dtype and query.dtype != jnp.float32
    wide = wide_dtype(query, key, value)
    rows = rows_of(t * n // k, h, hv, wide)
    sizes = dict(sizes_of(h, hv, wide, rows))
    tiles = -(-t * n // k // rows)
    dims = max(next_power_of_2(h), 16)
    pairs = b * k * tiles
    block = min(sizes["BLOCK"], max(next_power_of_2(s), 16))
    keys = s if window is None else min(s, window + t - 1 + block)
    splits = alike = -(-keys // block)
    narrow = wide != jnp.float32  # wide blocks would spill
    at_once = AT_ONCE if rows < FEW_ROWS else 1
    cluster = None
    if narrow and splits <= MAX_SPLITS and pairs * splits <= at_once * num_sms():
        sizes["num_stages"] = 1  # each program has one block
        row_bytes = h * key.dtype.itemsize + hv * value.dtype.itemsize
        cluster = sizes_in_a_cluster(
            keys, row_bytes, rows, hv, sizes | {"BLOCK": block}
        )
        if cluster is not None:
            sizes |= cluster
            block = sizes["BLOCK"]
            splits = alike = cluster["cluster"]
            sizes["num_stages"] = 2  # keys and values on their way together
    else:
        few = narrow and pairs <= num_sms() // FEW
        if few:
            sizes = dict(sizes_of(h, hv, wide, rows, few=True))
            block = min(sizes["BLOCK"], max(next_power_of_2(s), 16))
        stage_bytes = block * (h * key.dtype.itemsize + hv * value.dtype.itemsize)
        work = pairs, b * t * n, keys, stage_bytes
        splits = alike = num_splits(*work, False, sizes)
        if b > 1 and kv_lengths is not None and b * t * n <= MAX_MERGED:
            splits = num_splits(*work, True, sizes)
            if few:  # so many that one sequence alone has the whole device
                splits = max(min(splits, num_sms() // (k * tiles)), alike)
            if few or b > MAX_COMPARED or keys > alike * MAX_SHARE:
                alike = splits
    sizes["BLOCK"] = block
    del sizes["PER_SM"]
    if block_tables is not None and page % block and block < WARP * sizes["num_warps"]:
        # Triton divides the stages between a load and the load of its addresses, but
        # where each thread loads one
        sizes["num_stages"] = 2 * sizes["num_stages"] - 1
    given = {
        "query_ptr": query,
        "key_ptr": key,
        "value_ptr": value,
        "block_tables_ptr": block_tables,
        "kv_lengths_ptr": kv_lengths,
        "q_offset_ptr": q_offset if causal or window is not None else None,
        "sinks_ptr": sinks if splits == 1 or cluster else None,
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
        "PIECE": min(dims, WIDE_PIECE) if wide == jnp.float32 else dims,
        "DIMS": dims,
        "VALUE_DIMS": max(next_power_of_2(hv), 16),
        "EXCHANGE": 0,
    }
    return run_and_merge(
        decode_attention_kernel,
        pairs * splits,
        given,
        constants | sizes,
        jax.ShapeDtypeStruct((b, t, n, hv), query.dtype),
        sinks,
    )


def attention(*operands: Any, **options: Any) -> tuple:
    o = AttentionOperands(*operands)  # the row refuses a bias, a mask and segments
    taken = o.query, o.key, o.value, None, o.kv_lengths, o.q_offset, o.sinks
    return over_sequences(launch, (1, 2), (6,), *taken, **options)


attention_fwd = saves_no_tail(attention)
