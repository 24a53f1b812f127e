"""One token of a gated delta net: convolution, gates, state and norm in one launch.

A program has one value head of one sequence, its state [H, HV] in registers. It makes
the query and key of its head for itself: they are a few hundred numbers, the state is
sixteen thousand. The window of their channels is written by the first of the value
heads that share them, and to another array, for the others may still be reading.

State, window, taps and norm are on their way before the kernel ahead has ended; the
channels of the token are read behind it.
"""

from typing import Any

import jax

from jaxkern.gpu.dependent_launch import let_next_begin, wait_for_those_ahead
from jaxkern.gpu.device import WARP, next_power_of_2
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.delta_rule.gated_delta_net_step import KEY_EPS, key_heads

LARGEST = 2**15  # numbers of the state of a head: 64 a thread of 16 warps


def unsupported(state: Any, **rest: Any) -> str | None:
    """A reason in words, or None."""
    h, hv = state.shape[-2:]
    if next_power_of_2(h) * next_power_of_2(hv) > LARGEST:
        return f"a state of {h} x {hv} numbers, above {LARGEST}, fills no program"
    return unsupported_anywhere(state=state, **rest)


@jit
def convolved(
    taps_ptr, inputs_ptr, channel, inside, C: tl.constexpr, PAST: tl.constexpr
):
    """The sums over the tokens before, and the tap of this one."""
    total = tl.zeros(channel.shape, tl.float32)
    for p in tl.static_range(PAST):
        x = tl.load(inputs_ptr + p * C + channel, inside, 0.0).to(tl.float32)
        tap = tl.load(taps_ptr + channel * (PAST + 1) + p, inside, 0.0)
        total += x * tap.to(tl.float32)
    tap = tl.load(taps_ptr + channel * (PAST + 1) + PAST, inside, 0.0)
    return total, tap.to(tl.float32)


@jit
def silu(x):
    return x / (1 + tl.exp(-x))


@jit
def move_window(
    x_ptr,
    inputs_ptr,
    after_ptr,
    channel,
    mask,
    counts,
    C: tl.constexpr,
    PAST: tl.constexpr,
):
    """Drops the oldest token and appends this one, where it counts."""
    for p in tl.static_range(PAST):
        old = tl.load(inputs_ptr + p * C + channel, mask, 0.0)
        if p + 1 < PAST:
            new = tl.load(inputs_ptr + (p + 1) * C + channel, mask, 0.0)
        else:
            new = tl.load(x_ptr + channel, mask, 0.0).to(old.dtype)
        tl.store(after_ptr + p * C + channel, tl.where(counts, new, old), mask)


@jit
def gated_delta_net_step_kernel(
    qkv_ptr,
    gate_ptr,
    write_ptr,
    rate_ptr,
    taps_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    inputs_ptr,
    state_ptr,
    counts_ptr,
    out_ptr,
    after_ptr,
    new_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    PAST: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    KEY_EPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD:
        let_next_begin()
    if AHEAD == 1:
        wait_for_those_ahead()
    C: tl.constexpr = 2 * K * H + N * HV
    GROUP: tl.constexpr = N // K
    head = tl.program_id(0)
    row, own = head // N, head % N
    rows, columns = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_V)
    of_key, of_value = rows < H, columns < HV
    at = rows[:, None] * HV + columns[None, :] + head.to(tl.int64) * (H * HV)
    inside = of_key[:, None] & of_value[None, :]
    state = tl.load(state_ptr + at, inside, 0.0)
    window = row.to(tl.int64) * (PAST * C)
    old, after, x = inputs_ptr + window, after_ptr + window, qkv_ptr + row * C
    q_at = own // GROUP * H + rows
    k_at = K * H + q_at
    v_at = 2 * K * H + own * HV + columns
    query, q_tap = convolved(taps_ptr, old, q_at, of_key, C, PAST)
    key, k_tap = convolved(taps_ptr, old, k_at, of_key, C, PAST)
    value, v_tap = convolved(taps_ptr, old, v_at, of_value, C, PAST)
    norm = tl.load(norm_ptr + columns, of_value, 0.0).to(tl.float32)
    speed = tl.exp(tl.load(a_log_ptr + own).to(tl.float32))
    bias = tl.load(dt_bias_ptr + own).to(tl.float32)
    if AHEAD == 2:
        wait_for_those_ahead()
    counts = tl.full([], 1, tl.int1)
    if counts_ptr is not None:
        counts = tl.load(counts_ptr + row) > 0
    query += tl.load(x + q_at, of_key, 0.0).to(tl.float32) * q_tap
    key += tl.load(x + k_at, of_key, 0.0).to(tl.float32) * k_tap
    value += tl.load(x + v_at, of_value, 0.0).to(tl.float32) * v_tap
    query, key, value = silu(query), silu(key), silu(value)
    query *= SCALE * tl.rsqrt(tl.sum(query * query, 0) + KEY_EPS)
    key *= tl.rsqrt(tl.sum(key * key, 0) + KEY_EPS)
    rate = tl.load(rate_ptr + head).to(tl.float32) + bias
    # softplus without overflow, and without losing what is far below 1
    rate = tl.maximum(rate, 0.0) + log_of_one_and(tl.exp(-tl.abs(rate)))
    decayed = state.to(tl.float32) * tl.exp(-speed * rate)
    beta = 1 / (1 + tl.exp(-tl.load(write_ptr + head).to(tl.float32)))
    stored = tl.sum(decayed * key[:, None], 0)
    read = tl.sum(decayed * query[:, None], 0)
    written = beta * (value - stored)
    y = read + tl.sum(query * key, 0) * written
    y *= tl.rsqrt(tl.sum(y * y, 0) / HV + EPS) * norm
    gate = tl.load(gate_ptr + head * HV + columns, of_value, 0.0).to(tl.float32)
    tl.store(out_ptr + head * HV + columns, y * silu(gate), of_value)
    new = (decayed + key[:, None] * written[None, :]).to(state.dtype)
    tl.store(new_ptr + at, tl.where(counts, new, state), inside)
    first = rows < tl.where(own % GROUP == 0, H, 0)
    move_window(x, old, after, q_at, first, counts, C, PAST)
    move_window(x, old, after, k_at, first, counts, C, PAST)
    move_window(x, old, after, v_at, of_value, counts, C, PAST)


@jit
def log_of_one_and(x):
    """log(1 + x) for 0 <= x <= 1 with the digits of a small x."""
    u = 1 + x
    return tl.where(u == 1, x, tl.log(u) * (x / tl.where(u == 1, 1.0, u - 1)))


def gated_delta_net_step(
    qkv: jax.Array,
    gate: jax.Array,
    write: jax.Array,
    rate: jax.Array,
    weight: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    norm: jax.Array,
    inputs: jax.Array,
    state: jax.Array,
    counts: jax.Array | None,
    *,
    eps: float,
) -> tuple[jax.Array | None, ...]:
    b, n, h, hv = state.shape
    rows, columns = next_power_of_2(h), next_power_of_2(hv)
    given = {
        "qkv_ptr": qkv,
        "gate_ptr": gate,
        "write_ptr": write,
        "rate_ptr": rate,
        "taps_ptr": weight,
        "a_log_ptr": a_log,
        "dt_bias_ptr": dt_bias,
        "norm_ptr": norm,
        "inputs_ptr": inputs,
        "state_ptr": state,
        "counts_ptr": counts,
    }
    results = {"out_ptr": like(gate), "after_ptr": like(inputs), "new_ptr": like(state)}
    return sparse_call(
        gated_delta_net_step_kernel,
        (b * n,),
        given,
        results,
        {
            "N": n,
            "K": key_heads("gated_delta_net_step", qkv.shape[1], n, h, hv),
            "H": h,
            "HV": hv,
            "PAST": inputs.shape[1],
            "SCALE": h**-0.5,
            "EPS": eps,
            "KEY_EPS": KEY_EPS,
            "BLOCK_H": rows,
            "BLOCK_V": columns,
            "num_warps": max(1, min(rows * columns // (32 * WARP), 16)),
        },
        in_place={"state_ptr": "new_ptr"},
    )
