"""A kernel that leaves shares of every row, and one that merges them."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.dependent_launch import begin_behind_those_ahead
from jaxkern.gpu.device import WARP, next_power_of_2, num_sms
from jaxkern.gpu.triton_call import jit, sparse_call, tl

LOG2E = math.log2(math.e)


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
    AHEAD: tl.constexpr,
):
    """The shares of one query of one head, weighted by exp2 of their log-sum-exp.

    VALUE_DIMS of its dims; each program finds the weights for itself.
    """
    if AHEAD:
        begin_behind_those_ahead()
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
      constants: its constants and options; those of a `cluster` merge for themselves.
      out: `[b, t, n, hv]`.
      sinks: for the merge; with one split, or a cluster, the kernel has them.
    """
    *rows, hv = out.shape
    splits = constants["SPLITS"]
    results = {
        "out_ptr": out,
        "lse_ptr": jax.ShapeDtypeStruct((*rows,), jnp.float32),
    }
    if splits == 1 or constants.get("cluster", 1) > 1:
        return sparse_call(kernel, (programs,), given, results, constants)
    parts = {
        "out_ptr": jax.ShapeDtypeStruct((*rows, splits, hv), jnp.float32),
        "lse_ptr": jax.ShapeDtypeStruct((*rows, splits), jnp.float32),
    }
    sums, lses = sparse_call(kernel, (programs,), given, parts, constants)
    return merged(sums, lses, out, sinks)


def merged(
    sums: Any, lses: Any, out: jax.ShapeDtypeStruct, sinks: jax.Array | None
) -> tuple:
    """(out, lse) of shares `[..., splits, hv]` and their base-2 log-sum-exps."""
    *rows, hv = out.shape
    splits = lses.shape[-1]
    results = {
        "out_ptr": out,
        "lse_ptr": jax.ShapeDtypeStruct((*rows,), jnp.float32),
    }
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
