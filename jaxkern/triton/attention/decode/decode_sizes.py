"""Rows, blocks and shares of the decode kernel, from the shapes alone."""

import math
from typing import Any

import jax.numpy as jnp

from jaxkern.gpu.cluster import (
    MAX_EXCHANGE,
    MAX_PROGRAMS,
    OLDEST_WITH_CLUSTERS,
    exchange_bytes,
)
from jaxkern.gpu.device import compute_capability, next_power_of_2, num_sms
from jaxkern.gpu.triton_call import max_shared_bytes

MAX_ROWS = 128  # of a program: queries times heads of one key head
MAX_ELEMENTS = 32768  # of its padded queries: more would spill
FEW_ROWS, FEW_ELEMENTS = 64, 16384  # what 4 warps hold
MAX_WIDE_ROWS, MAX_WIDE_ELEMENTS = 32, 4096  # in float32
WIDE_PIECE = 64  # dims of one product of scores in float32
MAX_SPLITS = 256
STAGE_BYTES = 32768  # keys and values that are loaded together
# What the plan assumes, in microseconds: H200, measured by `benchmarks`.
BYTES_PER_US = 4.3e6
BLOCK_US = 0.25  # of a block of keys in a program that has its memory to itself
KEY_US = 0.01  # of each key of such a block, besides
START_US = 1.5
MERGE_US = 4.0
ROW_US = 0.0012  # of each row that is merged
SPLIT_US = 0.05


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
    dims = next_power_of_2(h), next_power_of_2(hv)
    itemsize = jnp.dtype(dtype).itemsize
    row, elements = sum(dims) * itemsize, rows * max(dims)
    large = max_shared_bytes() > 128 * 1024
    most = (STAGE_BYTES if large else STAGE_BYTES // 2) // row
    stages, warps = (4, 4) if large else (3, 4)
    heavy = rows > FEW_ROWS or elements > FEW_ELEMENTS
    alone = few or heavy
    if max(dims) > 256 and dtype == jnp.float32:
        most, stages, warps, alone = 4 * most, 1, 8, True
    elif heavy or (few and large):
        stages, warps = 3, 8
    elif max(dims) > 256:
        stages = 3
    if few and large and elements <= FEW_ELEMENTS:
        most = 2 * STAGE_BYTES // row
    block = min(max(next_power_of_2(most + 1) // 2, 16), 128)
    # WGMMA holds a block more, but no weights
    hopper = max_shared_bytes() > 200 * 1024
    buffers, beside = (stages, dims[0]) if hopper else (stages - 1, dims[0] + block)
    if buffers * block * row + rows * beside * itemsize > max_shared_bytes():
        stages -= 1
    held = (stages - 1) * block * row + 8192
    per_sm = 1 if alone else max_shared_bytes() // held
    return {"BLOCK": block, "num_warps": warps, "num_stages": stages, "PER_SM": per_sm}


def sizes_in_a_cluster(
    keys: int, row_bytes: int, rows: int, hv: int, sizes: dict[str, int]
) -> dict[str, int] | None:
    """Sizes by which a cluster of programs of one block each has all keys, or None.

    Its programs merge their shares in the same launch. A block of twice the size has
    twice the warps.
    """
    if compute_capability() < OLDEST_WITH_CLUSTERS:
        return None
    for more in (1, 2):
        block = more * sizes["BLOCK"]
        shares = -(-keys // block)
        if 1 < shares <= MAX_PROGRAMS and block * row_bytes <= 2 * STAGE_BYTES:
            dims = max(next_power_of_2(hv), 16)
            part = next_power_of_2(-(-dims // shares))
            exchange = exchange_bytes(shares * rows * (part + 1))
            if exchange > MAX_EXCHANGE:
                return None
            warps = min(more * sizes["num_warps"], 8)
            return {
                "BLOCK": block,
                "num_warps": warps,
                "cluster": shares,
                "EXCHANGE": exchange,
            }
    return None


def num_splits(
    pairs: int, rows: int, keys: int, stage_bytes: int, uneven: bool, sizes
) -> int:
    """The number of shares of each sequence's keys, for the least expected time.

    Args:
      pairs: sequences times key heads times tiles of rows.
      rows: queries times heads of all sequences, to be merged.
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
        merge = MERGE_US + ROW_US * rows + SPLIT_US * splits if splits > 1 else 0
        return -(-programs // slots) * (share + START_US) + merge

    least = min(-(-2 * slots // pairs), blocks // 8) if uneven else 1
    least = min(max(least, 1), MAX_SPLITS)
    return min(range(least, max(least, min(blocks, MAX_SPLITS)) + 1), key=microseconds)
