"""Causal convolution over time, each input read once.

A program walks along time with a few channels in each thread and the last inputs in
registers. It works on STEP tokens at a time, whose loads do not wait for each other.
The backward pass walks the same way with the last gradients in registers too: dx of a
token is complete w - 1 tokens later. Sums for the weight stay in registers, one partial
sum a program.
"""
# ruff: noqa: RUF005 - Triton compiles `a + (b,)` but not `(*a, b)`

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import WARP, next_power_of_2, num_sms
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere

WIDEST, FEWEST = 8, 16


def unsupported(
    x: Any, weight: Any, initial_state: Any = None, **rest: Any
) -> str | None:
    """A reason in words, or None."""
    if weight.shape[1] > WIDEST:
        return f"{weight.shape[1]} taps, above {WIDEST}, take too many registers"
    if x.shape[1] < FEWEST:
        return f"XLA is as fast for {x.shape[1]} tokens, below {FEWEST}"
    return unsupported_anywhere(x=x, weight=weight, initial_state=initial_state)


def walk(b: int, t: int, d: int, halo: int, step: int) -> tuple[dict, tuple]:
    """Sizes and grid: long walks as far as they leave enough programs."""
    channels = 2 if halo > 4 else 4  # of a thread
    warps = min(max(next_power_of_2(d) // (channels * WARP), 1), 4)
    block = warps * WARP * channels
    length = 256
    while length > 64 and b * -(-t // length) * -(-d // block) < 4 * num_sms():
        length //= 2
    rule = {"BLOCK": block, "LENGTH": length, "STEP": step}
    sizes = rule | {"num_warps": warps}
    chunks = -(-t // (sizes["LENGTH"] - halo))
    return sizes, (-(-d // sizes["BLOCK"]), chunks, b)


@jit
def tokens(x_ptr, first, channels, N: tl.constexpr, T: tl.constexpr, D: tl.constexpr):
    """N tokens from `first` on, zeros from T on."""
    rows = ()
    for i in tl.static_range(N):
        inside = (channels < D) & (first + i < T)
        x = tl.load(x_ptr + (first + i).to(tl.int64) * D + channels, inside, 0.0)
        rows = rows + (x.to(tl.float32),)
    return rows


@jit
def tokens_before(
    x_ptr, state_ptr, first, channels, PAST: tl.constexpr, D: tl.constexpr
):
    """The PAST tokens before `first`; those before 0 are in the state, or zeros."""
    rows = ()
    for i in tl.static_range(PAST):
        at = first - PAST + i
        inside = (channels < D) & (at >= 0)
        x = tl.load(x_ptr + at.to(tl.int64) * D + channels, inside, 0.0).to(tl.float32)
        if state_ptr is not None:
            inside = (channels < D) & (at < 0)
            row = tl.load(state_ptr + (at + PAST) * D + channels, inside, 0.0)
            x += row.to(tl.float32)
        rows = rows + (x,)
    return rows


@jit
def segments(ids_ptr, first, N: tl.constexpr, T: tl.constexpr):
    """Ids of N tokens: before 0 that of token 0, from T on that of the last."""
    ids = ()
    if ids_ptr is not None:
        for i in tl.static_range(N):
            at = tl.minimum(tl.maximum(first + i, 0), T - 1)
            ids = ids + (tl.load(ids_ptr + at),)
    return ids


@jit
def weights(weight_ptr, channels, W: tl.constexpr, D: tl.constexpr):
    rows = ()
    for j in tl.static_range(W):
        row = tl.load(weight_ptr + channels * W + j, channels < D, 0.0)
        rows = rows + (row.to(tl.float32),)
    return rows


@jit
def same_segment(x, ids, a: tl.constexpr, b: tl.constexpr, PACKED: tl.constexpr):
    """x where tokens a and b are of one segment, else zeros."""
    if PACKED:
        x = tl.where(ids[a] == ids[b], x, 0.0)
    return x


@jit
def convolved(
    bias, taps, seen, ids, at: tl.constexpr, W: tl.constexpr, PACKED: tl.constexpr
):
    """The sum for the token seen[at + W - 1]."""
    z = bias
    for j in tl.static_range(W):
        z += taps[j] * same_segment(seen[at + j], ids, at + j, at + W - 1, PACKED)
    return z


@jit
def sigmoid(z):
    """1 / (1 + exp(-z)) in four instructions.

    Written without ftz it takes ten: the compiler scales what is near the denormals.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; "
        "add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
        "=f,f",
        [z],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@jit
def causal_conv1d_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    ids_ptr,
    y_ptr,
    T: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    STEP: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    packed: tl.constexpr = ids_ptr is not None
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = tl.program_id(1) * LENGTH
    b = tl.program_id(2).to(tl.int64)
    x_ptr += b * T * D
    y_ptr += b * T * D
    if state_ptr is not None:
        state_ptr += b * (W - 1) * D
    if packed:
        ids_ptr += b * T
    taps = weights(weight_ptr, channels, W, D)
    bias = tl.zeros([BLOCK], tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + channels, channels < D, 0.0).to(tl.float32)
    past = tokens_before(x_ptr, state_ptr, start, channels, W - 1, D)
    for first in range(start, start + LENGTH, STEP):
        seen = past + tokens(x_ptr, first, channels, STEP, T, D)
        ids = segments(ids_ptr, first - (W - 1), STEP + W - 1, T)
        for i in tl.static_range(STEP):
            y = convolved(bias, taps, seen, ids, i, W, packed)
            if SILU:
                y = y / (1.0 + tl.exp(-y))
            at = (first + i).to(tl.int64) * D + channels
            tl.store(y_ptr + at, y, (channels < D) & (first + i < T))
        past = seen[STEP:]


def causal_conv1d_fwd(x, weight, bias, initial_state, segment_ids, *, activation):
    b, t, d = x.shape
    sizes, grid = walk(b, t, d, 0, 8)
    given = {
        "x_ptr": x,
        "weight_ptr": weight,
        "bias_ptr": bias,
        "state_ptr": initial_state if weight.shape[1] > 1 else None,
        "ids_ptr": segment_ids,
    }
    constants = {"T": t, "D": d, "W": weight.shape[1], "SILU": activation == "silu"}
    return sparse_call(
        causal_conv1d_kernel, grid, given, {"y_ptr": like(x)}, constants | sizes
    )[0]


@jit
def causal_conv1d_bwd_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    ids_ptr,
    dy_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    dstate_ptr,
    T: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    STEP: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Walks LENGTH tokens; the last W - 1 only complete dx of those before."""
    packed: tl.constexpr = ids_ptr is not None
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = tl.program_id(1) * (LENGTH - (W - 1))
    end = tl.minimum(start + LENGTH - (W - 1), T)
    b = tl.program_id(2).to(tl.int64)
    x_ptr += b * T * D
    dy_ptr += b * T * D
    dx_ptr += b * T * D
    if state_ptr is not None:
        state_ptr += b * (W - 1) * D
        dstate_ptr += b * (W - 1) * D
    if packed:
        ids_ptr += b * T
    taps = weights(weight_ptr, channels, W, D)
    bias = tl.zeros([BLOCK], tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + channels, channels < D, 0.0).to(tl.float32)
    past = tokens_before(x_ptr, state_ptr, start, channels, W - 1, D)
    dbias = tl.zeros([BLOCK], tl.float32)
    dtaps = ()
    dpast = ()
    for _ in tl.static_range(W):
        dtaps = dtaps + (tl.zeros([BLOCK], tl.float32),)
    for _ in tl.static_range(W - 1):
        dpast = dpast + (tl.zeros([BLOCK], tl.float32),)
    for first in range(start, start + LENGTH, STEP):
        seen = past + tokens(x_ptr, first, channels, STEP, T, D)
        dys = tokens(dy_ptr, first, channels, STEP, T, D)
        ids = segments(ids_ptr, first - (W - 1), STEP + W - 1, T)
        dseen = dpast
        for i in tl.static_range(STEP):
            dz = dys[i]
            if SILU:
                z = convolved(bias, taps, seen, ids, i, W, packed)
                s = sigmoid(z)
                dz = dz * s * (1.0 + z * (1.0 - s))
            dseen = dseen + (dz,)
            mine = tl.where(first + i < end, dz, 0.0)
            dbias += mine
            sums = ()
            dx = tl.zeros([BLOCK], tl.float32)
            for j in tl.static_range(W):
                tap = same_segment(seen[i + j], ids, i + j, i + W - 1, packed)
                sums = sums + (dtaps[j] + mine * tap,)
                later = same_segment(dseen[i + j], ids, i, i + j, packed)
                dx += taps[W - 1 - j] * later
            dtaps = sums
            to = first + i - (W - 1)
            at = to.to(tl.int64) * D + channels
            tl.store(dx_ptr + at, dx, (channels < D) & (to >= start) & (to < end))
            if dstate_ptr is not None:
                state_at = at + (W - 1) * D
                tl.store(dstate_ptr + state_at, dx, (channels < D) & (to < 0))
        past = seen[STEP:]
        dpast = dseen[STEP:]
    part = b * tl.num_programs(1) + tl.program_id(1)
    for j in tl.static_range(W):
        at = (part * W + j) * D + channels
        tl.store(dweight_ptr + at, dtaps[j], channels < D)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + part * D + channels, dbias, channels < D)


def causal_conv1d_bwd(
    x, weight, bias, initial_state, segment_ids, dy, *, activation
) -> tuple[jax.Array | None, ...]:
    (b, t, d), w = x.shape, weight.shape[1]
    # as registers allow
    step = 8 if w <= 4 and segment_ids is None and x.dtype.itemsize == 2 else 4
    sizes, grid = walk(b, t, d, w - 1, step)
    state = initial_state if w > 1 else None
    given = {
        "x_ptr": x,
        "weight_ptr": weight,
        "bias_ptr": bias,
        "state_ptr": state,
        "ids_ptr": segment_ids,
        "dy_ptr": dy,
    }
    parts = grid[1] * grid[2]
    results = {
        "dx_ptr": like(x),
        "dweight_ptr": jax.ShapeDtypeStruct((parts, w, d), jnp.float32),
        "dbias_ptr": None
        if bias is None
        else jax.ShapeDtypeStruct((parts, d), jnp.float32),
        "dstate_ptr": like(state),
    }
    constants = {"T": t, "D": d, "W": w, "SILU": activation == "silu"}
    out: Any = sparse_call(
        causal_conv1d_bwd_kernel, grid, given, results, constants | sizes
    )
    dx, dweight, dbias, dstate = out
    if initial_state is not None and state is None:
        dstate = jnp.zeros_like(initial_state)
    return (
        dx,
        dweight.sum(0).T.astype(weight.dtype),
        None if bias is None else dbias.sum(0).astype(bias.dtype),
        dstate,
    )
