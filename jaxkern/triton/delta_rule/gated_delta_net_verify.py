"""Drafted tokens of a gated delta net: the state read once and written once.

A program has one value head of one sequence and its whole state S `[H, HV]` in
registers. It adds what the accepted tokens of the last call left,

    S = exp(sum g) S + sum_j exp(sum of g behind j) keys_j corrections_j^T,

and writes S. Then it goes through the new tokens one by one, and what it makes of S
stays in registers:

    d = beta (v - exp(g) S^T k),   y = exp(g) S^T q + (q.k) d,   S = exp(g) S + k d^T

Queries, keys and values of all tokens, TOKENS x H or HV numbers, are convolved and
normalised before that, each once; a row of them is taken out by a sum over all rows,
the others as zeros. Corrections, keys and g replace the last call's, which this program
alone has read. The window is written to another array, for value heads that share a key
read it too; the first of them writes the key's channels.

State and what the last call left are on their way before the kernel ahead has ended;
the tokens are read behind it.
"""

from typing import Any

import jax

from jaxkern.gpu.dependent_launch import let_next_begin, wait_for_those_ahead
from jaxkern.gpu.device import WARP, next_power_of_2
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.delta_rule.gated_delta_net_step import KEY_EPS, key_heads
from jaxkern.triton.delta_rule.gated_delta_net_step_kernel import (
    silu,
    softplus,
    two_sums,
)

MOST_TOKENS = 8  # of a call
MOST_NUMBERS = 2**14  # of a state, in the registers of a program: 64 a thread


def unsupported(qkv: Any, state: Any, **rest: Any) -> str | None:
    """A reason in words, or None."""
    if (t := qkv.shape[1]) > MOST_TOKENS:
        return f"{t} tokens a call, above {MOST_TOKENS}"
    h, hv = state.shape[2:]
    if next_power_of_2(h) * next_power_of_2(hv) > MOST_NUMBERS:
        return f"a state of {h} x {hv} numbers, above {MOST_NUMBERS}, fits no program"
    return unsupported_anywhere(qkv=qkv, state=state, **rest)


def tile_sizes(h: int, hv: int) -> dict:
    rows, columns = next_power_of_2(h), next_power_of_2(hv)
    warps = max(1, rows * columns // (64 * WARP))
    return {"BLOCK_H": rows, "BLOCK_V": columns, "num_warps": warps}


@jit
def convolved(
    taps_ptr,
    window_ptr,
    qkv_ptr,
    after_ptr,
    channel,
    inside,
    moves,
    C: tl.constexpr,
    PAST: tl.constexpr,
    T: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """silu of the convolution at each token of these channels; 0 behind the last.

    What it has read goes into the window of the next call where it `moves` them.
    """
    token = tl.arange(0, TOKENS)[:, None]
    there = inside[None, :] & (token < T)
    total = tl.zeros([TOKENS, channel.shape[0]], tl.float32)
    for p in tl.static_range(PAST + 1):
        own = token + p - PAST
        at = own * C + channel[None, :]
        x = tl.load(qkv_ptr + at, there & (own >= 0), 0.0).to(tl.float32)
        if p < PAST:
            x += tl.load(window_ptr + PAST * C + at, there & (own < 0), 0.0).to(
                tl.float32
            )
        else:
            to = after_ptr + PAST * C + at
            tl.store(to, x.to(after_ptr.dtype.element_ty), there & moves[None, :])
        tap = tl.load(taps_ptr + channel * (PAST + 1) + p, inside, 0.0)
        total += x * tap.to(tl.float32)[None, :]
    for p in tl.static_range(PAST):
        past = tl.load(window_ptr + p * C + channel, moves, 0.0)
        tl.store(after_ptr + p * C + channel, past, moves)
    return silu(total)


@jit
def unit(x, EPS: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]


@jit
def row_of(tile, here):
    """The row of a tile where `here` is true."""
    return tl.sum(tl.where(here[:, None], tile, 0.0), 0)


@jit
def rows_of(tile, other, here):
    here = here[:, None]
    return tl.reduce(
        (tl.where(here, tile, 0.0), tl.where(here, other, 0.0)), 0, two_sums
    )


@jit
def number_of(x, here):
    return tl.sum(tl.where(here, x, 0.0), 0)


@jit
def with_accepted(state, keys, corrections, g, accepted, TOKENS: tl.constexpr):
    """The state behind the accepted tokens; what the others left is 0."""
    token = tl.arange(0, TOKENS)
    behind = token[None, :] > token[:, None]
    left = tl.exp(tl.sum(tl.where(behind, g[None, :], 0.0), 1))
    keys *= left[:, None]
    state *= tl.exp(tl.sum(g, 0))
    for j in range(accepted):
        here = token == j
        state += row_of(keys, here)[:, None] * row_of(corrections, here)[None, :]
    return state


@jit
def gated_delta_net_verify_kernel(
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
    old_keys_ptr,
    old_corrections_ptr,
    old_g_ptr,
    accepted_ptr,
    out_ptr,
    after_ptr,
    new_ptr,
    keys_ptr,
    corrections_ptr,
    g_ptr,
    T: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    PAST: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    KEY_EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD:
        let_next_begin()
    if AHEAD == 1:
        wait_for_those_ahead()
    C: tl.constexpr = 2 * K * H + N * HV
    KEYS: tl.constexpr = K * H  # channels of queries, then of keys
    head = tl.program_id(0)
    row, own = head // N, head % N
    key_head = own // (N // K)
    rows, columns, token = (
        tl.arange(0, BLOCK_H),
        tl.arange(0, BLOCK_V),
        tl.arange(0, TOKENS),
    )
    of_key, of_value = rows < H, columns < HV
    inside = of_key[:, None] & of_value[None, :]
    at = rows[:, None] * HV + columns[None, :] + head.to(tl.int64) * (H * HV)
    state = tl.load(state_ptr + at, inside, 0.0).to(tl.float32)
    accepted = tl.load(accepted_ptr + row).to(tl.int32)
    accepted = tl.minimum(tl.maximum(accepted, 0), T)
    heads = (row * T + token) * N + own  # of each token
    keys_at = heads.to(tl.int64)[:, None] * H + rows[None, :]
    values_at = heads.to(tl.int64)[:, None] * HV + columns[None, :]
    stays = token < accepted
    keys = tl.load(old_keys_ptr + keys_at, stays[:, None] & of_key[None, :], 0.0)
    corrections = tl.load(
        old_corrections_ptr + values_at, stays[:, None] & of_value[None, :], 0.0
    )
    g = tl.load(old_g_ptr + heads, stays, 0.0).to(tl.float32)
    window = row.to(tl.int64) * ((PAST + T) * C)
    old, after = inputs_ptr + window + accepted * C, after_ptr + window
    x = qkv_ptr + row.to(tl.int64) * (T * C)
    q_at = key_head * H + rows
    k_at, v_at = KEYS + q_at, 2 * KEYS + own * HV + columns
    keys, corrections = keys.to(tl.float32), corrections.to(tl.float32)
    state = with_accepted(state, keys, corrections, g, accepted, TOKENS)
    if AHEAD == 2:
        wait_for_those_ahead()
    tl.store(new_ptr + at, state.to(new_ptr.dtype.element_ty), inside)
    moves = rows < tl.where(own % (N // K) == 0, H, 0)
    query = convolved(taps_ptr, old, x, after, q_at, of_key, moves, C, PAST, T, TOKENS)
    key = convolved(taps_ptr, old, x, after, k_at, of_key, moves, C, PAST, T, TOKENS)
    value = convolved(
        taps_ptr, old, x, after, v_at, of_value, of_value, C, PAST, T, TOKENS
    )
    query, key = SCALE * unit(query, KEY_EPS), unit(key, KEY_EPS)
    both = tl.sum(query * key, 1)
    norm = tl.load(norm_ptr + columns, of_value, 0.0).to(tl.float32)
    speed = tl.exp(tl.load(a_log_ptr + own).to(tl.float32))
    bias = tl.load(dt_bias_ptr + own).to(tl.float32)
    there = token < T
    rate = tl.load(rate_ptr + heads, there, 0.0).to(tl.float32) + bias
    g = -speed * softplus(rate)
    decays = tl.exp(g)
    write = tl.load(write_ptr + heads, there, 0.0).to(tl.float32)
    betas = 1 / (1 + tl.exp(-write))
    tl.debug_barrier()  # all threads have read what lies where these go
    kind = keys_ptr.dtype.element_ty
    tl.store(keys_ptr + keys_at, key.to(kind), there[:, None] & of_key[None, :])
    tl.store(g_ptr + heads, g.to(g_ptr.dtype.element_ty), there)
    for t in range(T):
        here = token == t
        place = ((row * T + t) * N + own).to(tl.int64) * HV + columns
        gate = tl.load(gate_ptr + place, of_value, 0.0).to(tl.float32)
        q, k = rows_of(query, key, here)
        decay, beta, qk = (
            number_of(decays, here),
            number_of(betas, here),
            number_of(both, here),
        )
        read, stored = tl.reduce((state * q[:, None], state * k[:, None]), 0, two_sums)
        correction = beta * (row_of(value, here) - decay * stored)
        state = decay * state + k[:, None] * correction[None, :]
        y = decay * read + qk * correction
        y *= tl.rsqrt(tl.sum(y * y, 0) / HV + EPS) * norm
        tl.store(
            out_ptr + place, (y * silu(gate)).to(out_ptr.dtype.element_ty), of_value
        )
        kind_too = corrections_ptr.dtype.element_ty
        tl.store(corrections_ptr + place, correction.to(kind_too), of_value)


def gated_delta_net_verify(
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
    keys: jax.Array,
    corrections: jax.Array,
    g: jax.Array,
    accepted: jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array | None, ...]:
    (b, n, h, hv), t = state.shape, qkv.shape[1]
    past = inputs.shape[1] - t
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
        "old_keys_ptr": keys,
        "old_corrections_ptr": corrections,
        "old_g_ptr": g,
        "accepted_ptr": accepted,
    }
    results = {
        "out_ptr": like(gate),
        "after_ptr": like(inputs),
        "new_ptr": like(state),
        "keys_ptr": like(keys),
        "corrections_ptr": like(corrections),
        "g_ptr": like(g),
    }
    return sparse_call(
        gated_delta_net_verify_kernel,
        (b * n,),
        given,
        results,
        {
            "T": t,
            "N": n,
            "K": key_heads("gated_delta_net_verify", qkv.shape[2], n, h, hv),
            "H": h,
            "HV": hv,
            "PAST": past,
            "SCALE": h**-0.5,
            "EPS": eps,
            "KEY_EPS": KEY_EPS,
            "TOKENS": next_power_of_2(t),
            **tile_sizes(h, hv),
        },
        in_place={
            "state_ptr": "new_ptr",
            "old_keys_ptr": "keys_ptr",
            "old_corrections_ptr": "corrections_ptr",
            "old_g_ptr": "g_ptr",
        },
    )
