"""Group normalisation of images with whole channels in a row (NCHW).

    y = (x - mean) * rstd * weight + bias, mean and variance over a group

A program takes a group of an image, in tiles of channels by pixels: once for mean and
variance, each lane about an element of its own, so that no digits are lost far from
zero, and again, mostly from the L2 cache, to write. Groups that are few or large are
cut into parts, whose moments a first kernel finds. Backward without parts; the sums
over the pixels of each channel serve dx, dweight and dbias.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import next_power_of_2, num_sms
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported
from jaxkern.triton.norm.row_tiles import read, read_and_keep, write

FEW = 2**21  # elements of which XLA's fusions take as long
LONGEST = 131072  # elements of a group: those in flight stay in the L2 cache
WAVES = 4  # programs of a multiprocessor, where groups are cut into parts
SMALL = 8192  # elements of a group that a program reads at once


def slower(x: Any, dy: Any = None, **_: Any) -> str | None:
    if dy is None:
        return None
    if x.size < FEW:
        return (
            f"{x.size} elements: launches are most of the time, and XLA's are shorter"
        )
    size = x.shape[-1] * x.shape[-2]
    groups = x.size // size
    if size > SMALL and groups < num_sms():
        return f"{groups} groups of {size} elements do not fill the GPU"
    if size > 65536:
        return f"a group has {size} elements: XLA spreads it over more programs"
    return None


def tile_sizes(kernel: str, x: jax.Array, elements: int) -> dict:
    """A tile of whole channels, or a part of one."""
    groups, channels, pixels = x.shape[-3:]
    wide = min(next_power_of_2(pixels), elements)
    high = min(next_power_of_2(channels), elements // wide)
    warps = max(1, min(8, high * wide // 256))
    # further tiles in flight cost the small groups more programs than they are worth
    stages = 1 if channels * pixels < LONGEST and kernel == "group_norm_fwd" else 3
    sizes = {"HIGH": high, "WIDE": wide, "STAGES": stages, "num_warps": warps}
    tiles = -(-channels // sizes["HIGH"]) * -(-pixels // sizes["WIDE"])
    return sizes | {"GROUPS": groups, "C": channels, "P": pixels, "TILES": tiles}


def num_parts(rows: int, size: int, tiles: int) -> int:
    """Parts that a group is cut into: 1 where groups fill the GPU and its L2 cache."""
    if size <= max(SMALL, min(LONGEST, 2048 * rows)):
        return 1
    parts = max(WAVES * num_sms() // max(rows, 1), -(-size // LONGEST))
    share = -(-tiles // min(tiles, parts))
    return -(-tiles // share)


@jit
def tile_at(tile, P: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Channels [HIGH, 1] and pixels [1, WIDE]; tiles of a channel are neighbours."""
    across: tl.constexpr = (P + WIDE - 1) // WIDE
    channel = tile // across * HIGH + tl.arange(0, HIGH)[:, None]
    pixel = tile % across * WIDE + tl.arange(0, WIDE)[None, :]
    return channel, pixel


@jit
def factors_of(ptr, group, channel, inside, C: tl.constexpr, ABSENT: tl.constexpr):
    """Weight or bias of a tile's channels, [HIGH, 1]."""
    if ptr is None:
        return ABSENT
    else:
        return tl.load(ptr + group * C + channel, inside, 0.0).to(tl.float32)


@jit
def combined(counts, means, squares, count):
    """Mean and sum of squares about it of all lanes of [HIGH, WIDE] (Chan 1979)."""
    mean = tl.sum(tl.sum(counts * means, 1), 0) / count
    # far from zero the first sum is off by a rounding of its own size
    mean += tl.sum(tl.sum(counts * (means - mean), 1), 0) / count
    means -= mean
    squares += counts * means * means
    return mean, tl.sum(tl.sum(squares, 1), 0)


@jit
def moments(
    x_ptr,
    start,
    first,
    last,
    C: tl.constexpr,
    P: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of some tiles of a group, each lane's count, mean and sum of squares about it.

    Sums are of what differs from a lane's first element, which costs no division, and
    no more digits than the sum of squares has that this element belongs to.
    """
    count = tl.zeros([HIGH, WIDE], tl.float32)
    origin = tl.zeros([HIGH, WIDE], tl.float32)
    sums = tl.zeros([HIGH, WIDE], tl.float32)
    squares = tl.zeros([HIGH, WIDE], tl.float32)
    for tile in tl.range(first, last, num_stages=STAGES):
        channel, pixel = tile_at(tile, P, HIGH, WIDE)
        mask = (channel < C) & (pixel < P)
        x = read_and_keep(x_ptr, start + channel * P + pixel, mask)
        origin = tl.where(count == 0.0, x, origin)
        count += tl.where(mask, 1.0, 0.0)
        change = tl.where(mask, x - origin, 0.0)
        sums += change
        squares += change * change
    shift = sums / tl.maximum(count, 1.0)
    return count, origin + shift, squares - sums * shift


@jit
def group_norm_moments_kernel(
    x_ptr,
    moments_ptr,
    C: tl.constexpr,
    P: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Count, mean and sum of squares of a part of a group."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    share: tl.constexpr = (TILES + PARTS - 1) // PARTS
    last = tl.minimum((part + 1) * share, TILES)
    counts, means, squares = moments(
        x_ptr, row * (C * P), part * share, last, C, P, HIGH, WIDE, STAGES
    )
    count = tl.sum(tl.sum(counts, 1), 0)
    mean, square = combined(counts, means, squares, count)
    to = moments_ptr + row * (3 * PARTS) + part
    tl.store(to, count)
    tl.store(to + PARTS, mean)
    tl.store(to + 2 * PARTS, square)


@jit
def group_norm_fwd_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    moments_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    GROUPS: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    EPS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A group, or a part of one where the moments of all parts are given."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    start = row.to(tl.int64) * (C * P)
    if moments_ptr is None:
        counts, means, squares = moments(
            x_ptr, start, 0, TILES, C, P, HIGH, WIDE, STAGES
        )
    else:
        lane = tl.arange(0, LANES)[None, :]
        given = moments_ptr + row.to(tl.int64) * (3 * PARTS) + lane
        counts = tl.load(given, lane < PARTS, 0.0)
        means = tl.load(given + PARTS, lane < PARTS, 0.0)
        squares = tl.load(given + 2 * PARTS, lane < PARTS, 0.0)
    mean, square = combined(counts, means, squares, C * P)
    rstd = tl.rsqrt(square / (C * P) + EPS)
    tl.store(mean_ptr + row, mean, part == 0)
    tl.store(rstd_ptr + row, rstd, part == 0)
    share: tl.constexpr = (TILES + PARTS - 1) // PARTS
    last = tl.minimum((part + 1) * share, TILES)
    for tile in tl.range(part * share, last, num_stages=STAGES):
        channel, pixel = tile_at(tile, P, HIGH, WIDE)
        mask = (channel < C) & (pixel < P)
        scale = factors_of(weight_ptr, row % GROUPS, channel, channel < C, C, 1.0)
        shift = factors_of(bias_ptr, row % GROUPS, channel, channel < C, C, 0.0)
        at = start + channel * P + pixel
        y = (read(x_ptr, at, mask) - mean) * rstd * scale + shift
        write(y_ptr, at, y, mask)


def group_norm_fwd(x, weight, bias, *, eps):
    *lead, channels, pixels = x.shape
    rows = x.size // (channels * pixels) if x.size else 0
    per_group = jax.ShapeDtypeStruct((*lead, 1, 1), jnp.float32)
    sizes = tile_sizes("group_norm_fwd", x, 4096)
    parts = num_parts(rows, channels * pixels, sizes["TILES"])
    found = None
    if parts > 1:
        [found] = sparse_call(
            group_norm_moments_kernel,
            (rows, parts),
            {"x_ptr": x},
            {"moments_ptr": jax.ShapeDtypeStruct((rows, 3, parts), jnp.float32)},
            {n: s for n, s in sizes.items() if n != "GROUPS"} | {"PARTS": parts},
        )
    return sparse_call(
        group_norm_fwd_kernel,
        (rows, parts),
        {"x_ptr": x, "weight_ptr": weight, "bias_ptr": bias, "moments_ptr": found},
        {"y_ptr": like(x), "mean_ptr": per_group, "rstd_ptr": per_group},
        sizes | {"EPS": eps, "PARTS": parts, "LANES": next_power_of_2(parts)},
    )


@jit
def group_norm_bwd_kernel(
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dy_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    GROUPS: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0)
    start = row.to(tl.int64) * (C * P)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    along_mean = tl.zeros([HIGH, WIDE], tl.float32)
    along_xhat = tl.zeros([HIGH, WIDE], tl.float32)
    sums = tl.zeros([HIGH, WIDE], tl.float32)
    products = tl.zeros([HIGH, WIDE], tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        channel, pixel = tile_at(tile, P, HIGH, WIDE)
        mask = (channel < C) & (pixel < P)
        at = start + channel * P + pixel
        dy = read_and_keep(dy_ptr, at, mask)
        xhat = (read_and_keep(x_ptr, at, mask) - mean) * rstd
        scale = factors_of(weight_ptr, row % GROUPS, channel, channel < C, C, 1.0)
        along_mean += dy * scale
        along_xhat += dy * xhat * scale
        if dweight_ptr is not None:
            # the sums of a channel start anew at its first pixels, end at its last
            products = tl.where(pixel < WIDE, 0.0, products) + dy * xhat
            total = tl.sum(products, 1, keep_dims=True)
            ends = (channel < C) & (tl.max(pixel, 1, keep_dims=True) >= P - 1)
            write(dweight_ptr, row * C + channel, total, ends)
        if dbias_ptr is not None:
            sums = tl.where(pixel < WIDE, 0.0, sums) + dy
            total = tl.sum(sums, 1, keep_dims=True)
            ends = (channel < C) & (tl.max(pixel, 1, keep_dims=True) >= P - 1)
            write(dbias_ptr, row * C + channel, total, ends)
    if dx_ptr is not None:
        by_mean = tl.sum(tl.sum(along_mean, 1), 0) / (C * P)
        by_xhat = tl.sum(tl.sum(along_xhat, 1), 0) / (C * P)
        for tile in tl.range(0, TILES, num_stages=STAGES):
            channel, pixel = tile_at(tile, P, HIGH, WIDE)
            mask = (channel < C) & (pixel < P)
            at = start + channel * P + pixel
            scale = factors_of(weight_ptr, row % GROUPS, channel, channel < C, C, 1.0)
            xhat = (read(x_ptr, at, mask) - mean) * rstd
            dxhat = read(dy_ptr, at, mask) * scale
            write(dx_ptr, at, (dxhat - by_mean - xhat * by_xhat) * rstd, mask)


def group_norm_bwd(x, weight, bias, mean, rstd, dy, *, eps, wanted):
    del eps  # already in rstd
    groups, channels, pixels = x.shape[-3:]
    rows = x.size // (channels * pixels) if x.size else 0
    # one sum for each image
    partial = jax.ShapeDtypeStruct((rows, channels), jnp.float32)
    vectors = {"dweight_ptr": weight, "dbias_ptr": bias}
    results = {"dx_ptr": like(x)}
    results |= {n: None if v is None else partial for n, v in vectors.items()}
    dx, *sums = sparse_call(
        group_norm_bwd_kernel,
        (rows,),
        {
            "x_ptr": x,
            "weight_ptr": weight,
            "mean_ptr": mean,
            "rstd_ptr": rstd,
            "dy_ptr": dy,
        },
        {
            n: r if w else None
            for (n, r), w in zip(results.items(), wanted, strict=True)
        },
        tile_sizes("group_norm_bwd", x, 2048),
    )
    dweight, dbias = (
        None
        if s is None or v is None
        else s.reshape(-1, groups, channels).sum(0).astype(v.dtype)
        for s, v in zip(sums, (weight, bias), strict=True)
    )
    return dx, dweight, dbias
