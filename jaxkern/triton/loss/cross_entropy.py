"""Cross entropy over rows of logits, in one read forward, one read and write backward.

    z = softcap(logits),    lse = ln(sum_j exp(z_j)),    picked = z[label]

The loss follows from these sums per token, so it is left to XLA, as are the factors per
token of the gradient: one small fusion each. In the forward kernel each thread keeps
the maximum and the sum of its own columns and raises the maximum once for DEPTH
elements: 1 + 1 / DEPTH exponentials an element, and no barrier inside the loop. Bytes:
one tensor forward and two backward.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import WARP, next_power_of_2, num_sms
from jaxkern.gpu.triton_call import jit, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.loss.cross_entropy import (
    as_class,
    loss_of_sums,
    sums_gradient,
)
from jaxkern.triton.activation.softcap import softcap_slope, softcapped

VECTOR = 8  # elements of a thread that stand side by side: 16 bytes in bfloat16


def forward_chunks(rows: int, v: int) -> dict:
    """Four programs of 8 warps a multiprocessor; larger ones where rows are few."""
    warps = 8 if rows > num_sms() else 32
    if v <= 4096:  # a few chunks in each thread hide more than a sum over warps costs
        warps = max(next_power_of_2(v) // (4 * WARP * VECTOR), 1)
    sums = {"DEPTH": 4, "num_warps": warps}
    return sums | {"LANES": sums["num_warps"] * WARP * VECTOR}


def backward_chunks(v: int) -> dict:
    block = min(next_power_of_2(v), 4096)
    return {"BLOCK": block, "num_warps": max(block // 1024, 1)}


def unsupported(logits: Any, **rest: Any) -> str | None:
    """A reason in words, or None."""
    if logits.shape[-1] == 0:
        return "there are no classes"
    return unsupported_anywhere(logits=logits, **rest)


def slower(logits: Any, **_: Any) -> str | None:
    v = logits.shape[-1]
    rows = logits.size // v
    if v >= 65536 and 2 * rows < num_sms():
        return f"{rows} rows of {v} logits fill half of the GPU or less"
    return None


@jit
def add_chunk(
    peak,
    weight,
    total,
    logits_ptr,
    inside,
    CAP: tl.constexpr,
    SUM_ALL: tl.constexpr,
):
    """The running maximum, sum of exponentials and sum of each column's elements."""
    if inside is None:
        x = tl.load(logits_ptr, eviction_policy="evict_first").to(tl.float32)
    else:
        x = tl.load(logits_ptr, inside, -float("inf"), eviction_policy="evict_first")
        x = x.to(tl.float32)
    z = x
    if CAP is not None:
        z = softcapped(x, CAP)
        if inside is not None:
            z = tl.where(inside, z, -float("inf"))
    if SUM_ALL:
        kept = z
        if inside is not None:
            kept = tl.where(inside, z, 0.0)
        total += tl.sum(kept, 0)
    higher = tl.maximum(peak, tl.max(z, 0))
    base = tl.where(tl.abs(higher) == float("inf"), 0.0, higher)
    weight = weight * tl.exp(peak - base) + tl.sum(tl.exp(z - base[None, :]), 0)
    return higher, weight, total


@jit
def cross_entropy_fwd_kernel(
    logits_ptr,
    labels_ptr,
    lse_ptr,
    picked_ptr,
    total_ptr,
    V: tl.constexpr,
    CAP: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0)
    start = logits_ptr + row.to(tl.int64) * V
    columns = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    peak = tl.full([LANES], -float("inf"), tl.float32)
    weight = tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES], tl.float32)
    SUM_ALL: tl.constexpr = total_ptr is not None
    WHOLE: tl.constexpr = V // (DEPTH * LANES) * (DEPTH * LANES)
    for first in range(0, WHOLE, DEPTH * LANES):
        peak, weight, total = add_chunk(
            peak, weight, total, start + first + columns, None, CAP, SUM_ALL
        )
    if WHOLE < V:
        columns += WHOLE
        peak, weight, total = add_chunk(
            peak, weight, total, start + columns, columns < V, CAP, SUM_ALL
        )
    top = tl.max(peak, 0)
    top = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    weight = tl.sum(weight * tl.exp(peak - top), 0)
    tl.store(lse_ptr + row, top + tl.log(weight))
    if SUM_ALL:
        tl.store(total_ptr + row, tl.sum(total, 0))
    label = tl.load(labels_ptr + row).to(tl.int64)
    known = (label >= 0) & (label < V)
    picked = tl.load(start + label, known, 0.0).to(tl.float32)
    if CAP is not None:
        picked = softcapped(picked, CAP)
    tl.store(picked_ptr + row, picked)


def row_sums(
    logits: jax.Array,
    label: jax.Array,
    softcap: float | None,
    label_smoothing: float,
) -> tuple[Any, ...]:
    """(lse, z[label] or 0 without such a class, sum of z or None), each `[...]`."""
    *lead, v = logits.shape
    rows = label.size
    per_row = jax.ShapeDtypeStruct(tuple(lead), jnp.float32)
    sizes = forward_chunks(rows, v)
    return sparse_call(
        cross_entropy_fwd_kernel,
        (rows,),
        {"logits_ptr": logits, "labels_ptr": label},
        {
            "lse_ptr": per_row,
            "picked_ptr": per_row,
            "total_ptr": per_row if label_smoothing else None,
        },
        {"V": v, "CAP": softcap, **sizes},
    )


def cross_entropy_fwd(
    logits, labels, *, label_smoothing, z_loss, softcap, ignore_index
):
    v = logits.shape[-1]
    label = as_class(labels)
    lse, picked, total = row_sums(logits, label, softcap, label_smoothing)
    options = (label_smoothing, z_loss, ignore_index)
    return loss_of_sums(lse, picked, total, label, v, *options), lse


@jit
def cross_entropy_bwd_kernel(
    logits_ptr,
    labels_ptr,
    lse_ptr,
    slope_ptr,
    on_label_ptr,
    on_every_ptr,
    dlogits_ptr,
    V: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """slope * exp(z - lse) - on_every - on_label * one_hot(label), for one chunk."""
    CHUNKS: tl.constexpr = (V + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // CHUNKS
    column = tl.program_id(0) % CHUNKS * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * V + column
    inside = column < V
    x = tl.load(logits_ptr + at, inside, 0.0, eviction_policy="evict_first")
    x = x.to(tl.float32)
    z = x
    if CAP is not None:
        z = softcapped(x, CAP)
    dz = tl.load(slope_ptr + row) * tl.exp(z - tl.load(lse_ptr + row))
    if on_every_ptr is not None:
        dz -= tl.load(on_every_ptr + row)
    is_label = column == tl.load(labels_ptr + row)
    dz -= tl.where(is_label, tl.load(on_label_ptr + row), 0.0)
    if CAP is not None:
        dz *= softcap_slope(x, CAP)
    tl.store(dlogits_ptr + at, dz, inside, eviction_policy="evict_first")


def row_gradients(
    logits: jax.Array,
    label: jax.Array,
    factors: tuple[jax.Array, ...],
    softcap: float | None,
    label_smoothing: float,
    dtype: Any,
    in_place: bool = False,
) -> Any:
    """dlogits in `dtype`; `factors` per token as `sums_gradient` gives them.

    `in_place` where nothing reads the logits again: XLA would copy them first.
    """
    v = logits.shape[-1]
    lse, slope, on_label, on_every = factors
    sizes = backward_chunks(v)
    (dlogits,) = sparse_call(
        cross_entropy_bwd_kernel,
        (label.size * -(-v // sizes["BLOCK"]),),
        {
            "logits_ptr": logits,
            "labels_ptr": label,
            "lse_ptr": lse,
            "slope_ptr": slope,
            "on_label_ptr": on_label,
            "on_every_ptr": on_every if label_smoothing else None,
        },
        {"dlogits_ptr": jax.ShapeDtypeStruct(logits.shape, dtype)},
        {"V": v, "CAP": softcap, **sizes},
        {"logits_ptr": "dlogits_ptr"} if in_place else None,
    )
    return dlogits


def cross_entropy_bwd(
    logits,
    labels,
    loss,
    lse,
    dloss,
    dlse,
    *,
    label_smoothing,
    z_loss,
    softcap,
    ignore_index,
):
    del loss
    v = logits.shape[-1]
    label = as_class(labels)
    options = (label_smoothing, z_loss, ignore_index)
    factors = sums_gradient(lse, dloss, dlse, label, v, *options)
    return row_gradients(logits, label, factors, softcap, label_smoothing, logits.dtype)


def weighted_cross_entropy(logits, labels, weight, **options):
    loss, _ = cross_entropy_fwd(logits, labels, **options)
    return loss * weight.astype(loss.dtype)


def weighted_cross_entropy_fwd(logits, labels, weight, **options):
    """The two kernels one after the other: the logits are read twice."""
    loss, lse = cross_entropy_fwd(logits, labels, **options)
    weight = weight.astype(loss.dtype)
    gradient = cross_entropy_bwd(
        logits, labels, loss, lse, weight, jnp.zeros_like(lse), **options
    )
    return loss * weight, gradient, loss
