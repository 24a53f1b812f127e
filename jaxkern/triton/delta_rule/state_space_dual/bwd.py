"""Gradients of state-space duality. No atomics: always the same bits.

With S before and D after a chunk, in the names of fwd.py and with P_ij = between_ij:

    walks_kernel   D of the chunk before = from_start_C D + (from_start dy)^T c
    tokens_kernel  dqk = P (dy x^T) step
                   dc = from_start (dy S) + dqk b,   db = to_end step (x D) + dqk^T c
    values_kernel  dvalue = to_end (b D^T) + (P (c b^T))^T dy,   dx = step dvalue

The first leaves S and D of every chunk; its programs have a part of the state of a head
and walk forth with S or back with D. In the second a program has a chunk of some heads
of a group and some numbers of the state, for dc or for db, and sums over the heads in
registers; in the third the chunk of a head. What all three have to do in one program
fills no registers. (dqk)^T and (c b^T)^T are computed turned: compilers have turned
results of the matrix units wrongly. dg, the gradient of step a, is a sum of parts.
C is the problem's Constants.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import next_power_of_2, num_sms
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.triton.delta_rule.gated_delta_rule.chunk_matrices import (
    LEAST,
    decay_between,
)
from jaxkern.triton.delta_rule.state_space_dual import fwd
from jaxkern.triton.delta_rule.state_space_dual.fwd import load_decays

LONGEST = 65535 * fwd.CHUNK  # tokens: programs along the second axis of a grid
LARGEST = 128  # columns of a head, and numbers of a state for one of them


@jit
def load_rows(ptr, rows, column, T: tl.constexpr, STRIDE, D: tl.constexpr):
    """Tokens of D numbers, which stand STRIDE apart."""
    inside = (rows < T)[:, None] & (column < D)[None, :]
    return tl.load(ptr + rows[:, None] * STRIDE + column[None, :], inside, 0.0)


@jit
def walk(
    x_ptr,
    step_ptr,
    a,
    b_ptr,
    starts_ptr,
    first_ptr,
    states_ptr,
    last_ptr,
    head,
    column,
    n,
    C: tl.constexpr,
    BACK: tl.constexpr,
):
    """Forth x and b make S of them; BACK, with dy and c in their places, D."""
    dtype = b_ptr.dtype.element_ty
    token = tl.arange(0, C.CHUNK)
    at = column[:, None] * C.STATE + n[None, :]
    inside = (column < C.H)[:, None] & (n < C.STATE)[None, :]
    state = tl.zeros(at.shape, tl.float32)
    if first_ptr is not None:
        state += tl.load(first_ptr + head * (C.H * C.STATE) + at, inside, 0.0).to(
            tl.float32
        )
    for i in range(C.CHUNKS):
        chunk = C.CHUNKS - 1 - i if BACK else i
        here = (head * C.CHUNKS + chunk) * (C.H * C.STATE) + at
        tl.store(states_ptr + here, state.to(dtype), inside)
        rows = (chunk * C.CHUNK + token).to(tl.int64)
        step, total = load_decays(step_ptr, starts_ptr, rows, a, C.T, C.NUM_HEADS)
        end = tl.sum(tl.where(token == C.CHUNK - 1, total, 0.0), 0)
        weight = tl.exp(total) if BACK else step * tl.exp(end - total)
        b = load_rows(b_ptr, rows, n, C.T, C.NUM_GROUPS * C.STATE, C.STATE)
        x_at = rows[None, :] * (C.NUM_HEADS * C.H) + column[:, None]
        x_in = (rows < C.T)[None, :] & (column < C.H)[:, None]
        x = tl.load(x_ptr + x_at, x_in, 0.0).to(tl.float32) * weight[None, :]
        state = tl.dot(x.to(dtype), b, tl.exp(end) * state)
    if last_ptr is not None:
        last = state.to(last_ptr.dtype.element_ty)
        tl.store(last_ptr + head * (C.H * C.STATE) + at, last, inside)


@jit
def walks_kernel(
    x_ptr,
    step_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    starts_ptr,
    dy_ptr,
    initial_ptr,
    dfinal_ptr,
    states_ptr,
    dstates_ptr,
    dinitial_ptr,
    C: tl.constexpr,
):
    BLOCKS: tl.constexpr = (C.STATE + C.BLOCK_STATE - 1) // C.BLOCK_STATE
    place = tl.program_id(0).to(tl.int64)
    row, head = place // C.NUM_HEADS, place % C.NUM_HEADS
    column = tl.program_id(1) // BLOCKS * C.BLOCK_H + tl.arange(0, C.BLOCK_H)
    n = tl.program_id(1) % BLOCKS * C.BLOCK_STATE + tl.arange(0, C.BLOCK_STATE)
    a = tl.load(a_ptr + head).to(tl.float32)
    first = (row * C.T * C.NUM_HEADS + head) * C.H
    of_group = (row * C.T * C.NUM_GROUPS + head // C.GROUP) * C.STATE
    step_ptr += row * C.T * C.NUM_HEADS + head
    if starts_ptr is not None:
        starts_ptr += row * C.T
    if tl.program_id(2) == 0:
        walk(
            x_ptr + first,
            step_ptr,
            a,
            b_ptr + of_group,
            starts_ptr,
            initial_ptr,
            states_ptr,
            None,
            place,
            column,
            n,
            C,
            False,
        )
    else:
        walk(
            dy_ptr + first,
            step_ptr,
            a,
            c_ptr + of_group,
            starts_ptr,
            dfinal_ptr,
            dstates_ptr,
            dinitial_ptr,
            place,
            column,
            n,
            C,
            True,
        )


@jit
def gradient_of_tokens(
    tokens,
    by_tokens,
    decays,
    states_ptr,
    grad_ptr,
    dg_ptr,
    first,
    n,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    OF_B: tl.constexpr,
):
    """Of c, whose tokens read what the `other` b stored; OF_B of b, the other way."""
    own_ptr, other_ptr = tokens
    by_own_ptr, by_other_ptr = by_tokens
    step_ptr, a_ptr, starts_ptr = decays
    CHUNK: tl.constexpr = C.CHUNK
    H: tl.constexpr = C.H
    dtype = own_ptr.dtype.element_ty
    token, h = tl.arange(0, CHUNK), tl.arange(0, C.BLOCK_H)
    rows = (tl.program_id(1) * CHUNK + token).to(tl.int64)
    own = load_rows(own_ptr, rows, n, C.T, C.NUM_GROUPS * C.STATE, C.STATE)
    other = load_rows(other_ptr, rows, n, C.T, C.NUM_GROUPS * C.STATE, C.STATE)
    qk = tl.dot(own, tl.trans(other))
    grad = tl.zeros(own.shape, tl.float32)
    for v in range(HEADS):
        head = first + v
        a = tl.load(a_ptr + head % C.NUM_HEADS).to(tl.float32)
        at = head // C.NUM_HEADS * C.T * C.NUM_HEADS + head % C.NUM_HEADS
        starts = starts_ptr
        if starts_ptr is not None:
            starts = starts_ptr + head // C.NUM_HEADS * C.T
        step, total = load_decays(step_ptr + at, starts, rows, a, C.T, C.NUM_HEADS)
        end = tl.sum(tl.where(token == CHUNK - 1, total, 0.0), 0)
        by_own = load_rows(by_own_ptr + at * H, rows, h, C.T, C.NUM_HEADS * H, H)
        by_other = load_rows(by_other_ptr + at * H, rows, h, C.T, C.NUM_HEADS * H, H)
        here = (head * C.CHUNKS + tl.program_id(1)) * (H * C.STATE)
        state = load_rows(states_ptr + here, h, n, H, C.STATE, C.STATE)
        dqk = tl.dot(by_own, tl.trans(by_other))
        if OF_B:
            seen = token[None, :] >= token[:, None]
            between = decay_between(total[None, :], total[:, None], seen)
            dqk *= between * step[:, None]
            whole = tl.dot(by_own, state) * (step * tl.exp(end - total))[:, None]
            on_own = tl.sum(whole * own.to(tl.float32), 1)
            # what decays at l: all that was stored before l
            dg = tl.cumsum(on_own, 0) - on_own
        else:
            seen = token[:, None] >= token[None, :]
            between = decay_between(total[:, None], total[None, :], seen)
            dqk *= between * step[None, :]
            whole = tl.dot(by_own, state) * tl.exp(total)[:, None]
            pairs = dqk * qk
            dtotal = tl.sum(pairs, 1) - tl.sum(pairs, 0)
            dtotal += tl.sum(whole * own.to(tl.float32), 1)
            # what decays at l: the sum over tokens from l on
            dg = tl.cumsum(dtotal, 0, reverse=True)
        tl.store(dg_ptr + at + rows * C.NUM_HEADS, dg, rows < C.T)
        grad = tl.dot(dqk.to(dtype), other, grad + whole)
    inside = (rows < C.T)[:, None] & (n < C.STATE)[None, :]
    at = rows[:, None] * (C.NUM_GROUPS * C.STATE) + n[None, :]
    tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), inside)


@jit
def tokens_kernel(
    x_ptr,
    step_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    starts_ptr,
    dy_ptr,
    states_ptr,
    dstates_ptr,
    db_ptr,
    dc_ptr,
    dg_ptr,
    C: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Part p of dc and db sums over HEADS heads; of dg part 2 i is of block i for c."""
    PARTS: tl.constexpr = C.GROUP // HEADS
    part, place = tl.program_id(0) % PARTS, (tl.program_id(0) // PARTS).to(tl.int64)
    first = place * C.GROUP + part * HEADS  # place counts groups of all rows
    row = place // C.NUM_GROUPS
    of_group = (row * C.T * C.NUM_GROUPS + place % C.NUM_GROUPS) * C.STATE
    groups = (tl.num_programs(0) // PARTS).to(tl.int64)
    of_part = part * groups * C.T * C.STATE + of_group
    n = tl.program_id(2) // 2 * C.BLOCK_STATE + tl.arange(0, C.BLOCK_STATE)
    dg_ptr += tl.program_id(2) * groups * C.GROUP * C.T
    if tl.program_id(2) % 2 == 0:
        gradient_of_tokens(
            (c_ptr + of_group, b_ptr + of_group),
            (dy_ptr, x_ptr),
            (step_ptr, a_ptr, starts_ptr),
            states_ptr,
            dc_ptr + of_part,
            dg_ptr,
            first,
            n,
            C,
            HEADS,
            False,
        )
    else:
        gradient_of_tokens(
            (b_ptr + of_group, c_ptr + of_group),
            (x_ptr, dy_ptr),
            (step_ptr, a_ptr, starts_ptr),
            dstates_ptr,
            db_ptr + of_part,
            dg_ptr,
            first,
            n,
            C,
            HEADS,
            True,
        )


@jit
def values_kernel(
    x_ptr,
    step_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    starts_ptr,
    dy_ptr,
    states_ptr,
    dstates_ptr,
    dx_ptr,
    dstep_ptr,
    dg_ptr,
    C: tl.constexpr,
):
    """dx, dstep without that of the decay, and in dg what S and D give."""
    CHUNK: tl.constexpr = C.CHUNK
    BLOCK_H: tl.constexpr = C.BLOCK_H
    STATE: tl.constexpr = C.STATE
    BLOCK_STATE: tl.constexpr = C.BLOCK_STATE
    dtype = b_ptr.dtype.element_ty
    place = tl.program_id(0).to(tl.int64)
    row, head = place // C.NUM_HEADS, place % C.NUM_HEADS
    token, h = tl.arange(0, CHUNK), tl.arange(0, BLOCK_H)
    rows = (tl.program_id(1) * CHUNK + token).to(tl.int64)
    if starts_ptr is not None:
        starts_ptr += row * C.T
    own = row * C.T * C.NUM_HEADS + head
    of_group = (row * C.T * C.NUM_GROUPS + head // C.GROUP) * STATE
    here = (place * C.CHUNKS + tl.program_id(1)) * (C.H * STATE)
    kq = tl.zeros((CHUNK, CHUNK), tl.float32)
    dvalue = tl.zeros((CHUNK, BLOCK_H), tl.float32)
    across = 0.0
    for block in tl.static_range(0, STATE, BLOCK_STATE):
        n = block + tl.arange(0, BLOCK_STATE)
        b = load_rows(b_ptr + of_group, rows, n, C.T, C.NUM_GROUPS * STATE, STATE)
        c = load_rows(c_ptr + of_group, rows, n, C.T, C.NUM_GROUPS * STATE, STATE)
        dstate = load_rows(dstates_ptr + here, h, n, C.H, STATE, STATE)
        state = load_rows(states_ptr + here, h, n, C.H, STATE, STATE)
        across += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
        kq = tl.dot(b, tl.trans(c), kq)
        dvalue = tl.dot(b, tl.trans(dstate), dvalue)
    a = tl.load(a_ptr + head).to(tl.float32)
    step, total = load_decays(step_ptr + own, starts_ptr, rows, a, C.T, C.NUM_HEADS)
    end = tl.sum(tl.where(token == CHUNK - 1, total, 0.0), 0)
    seen = token[None, :] >= token[:, None]
    kq *= decay_between(total[None, :], total[:, None], seen)
    dy = load_rows(dy_ptr + own * C.H, rows, h, C.T, C.NUM_HEADS * C.H, C.H)
    dvalue = tl.dot(kq.to(dtype), dy, dvalue * tl.exp(end - total)[:, None])
    x = load_rows(x_ptr + own * C.H, rows, h, C.T, C.NUM_HEADS * C.H, C.H)
    at = own + rows * C.NUM_HEADS
    across = tl.zeros((CHUNK,), tl.float32) + tl.exp(end) * across
    tl.store(dg_ptr + at, across, rows < C.T)
    tl.store(dstep_ptr + at, tl.sum(x.to(tl.float32) * dvalue, 1), rows < C.T)
    inside = (rows < C.T)[:, None] & (h < C.H)[None, :]
    dx = (step[:, None] * dvalue).to(dtype)
    tl.store(dx_ptr + at[:, None] * C.H + h[None, :], dx, inside)


def unsupported(dy: Any, dfinal_state: Any, **named: Any) -> str | None:
    """A reason in words, or None."""
    if reason := fwd.unsupported(**named):
        return reason
    x, b = named["x"], named["b"]
    if dy.dtype != x.dtype:
        return f"`dy` is {dy.dtype.name}, not {x.dtype.name}"
    if x.shape[1] > LONGEST:
        return f"{x.shape[1]} tokens are more than {LONGEST}"
    if (h := x.shape[-1]) > LARGEST:
        return f"heads have {h} columns, more than {LARGEST}"
    if (size := b.shape[-1]) > LARGEST:
        return f"a state has {size} numbers a column, more than {LARGEST}"
    return bridge.unsupported(dfinal_state=dfinal_state)


def heads_of_program(group: int, programs: int) -> int:
    """The most that a program sums over and the GPU has two a multiprocessor."""
    counts = [n for n in range(group, 0, -1) if group % n == 0]
    enough = (n for n in counts if programs * (group // n) >= 2 * num_sms())
    return next(enough, 1)


def state_space_dual_bwd(
    x, step, a, b, c, initial_state, starts, dy, dfinal_state, *, chunk_size
) -> tuple[jax.Array | None, ...]:
    del chunk_size  # the same function up to rounding
    rows, t, num_heads, h = x.shape
    k, size = b.shape[2:]
    group = num_heads // k
    chunk = fwd.tokens_of_chunk(t)
    chunks = -(-t // chunk)
    given = {
        "x_ptr": x,
        "step_ptr": step,
        "a_ptr": a,
        "b_ptr": b,
        "c_ptr": c,
        "starts_ptr": None if starts is None else starts.astype(jnp.int8),
        "dy_ptr": dy,
    }
    block_h, block_state = (max(16, next_power_of_2(d)) for d in (h, size))
    tile = fwd.Constants(
        T=t,
        NUM_HEADS=num_heads,
        GROUP=group,
        H=h,
        STATE=size,
        CHUNK=chunk,
        BLOCK_H=min(64, block_h),
        BLOCK_STATE=min(64, block_state),
    )
    blocks = -(-size // tile.BLOCK_STATE)
    tiles = -(-h // tile.BLOCK_H) * blocks
    states = jax.ShapeDtypeStruct((rows, num_heads, chunks, h, size), x.dtype)
    states, dstates, dinitial = sparse_call(
        walks_kernel,
        (rows * num_heads, tiles, 2),
        given | {"initial_ptr": initial_state, "dfinal_ptr": dfinal_state},
        {
            "states_ptr": states,
            "dstates_ptr": states,
            "dinitial_ptr": like(initial_state),
        },
        {"C": tile, "num_warps": 4, "num_stages": 2},
    )
    heads = heads_of_program(group, 2 * blocks * rows * k * chunks)
    parts = group // heads
    summed = jax.ShapeDtypeStruct(
        (parts, *b.shape), jnp.float32 if parts > 1 else b.dtype
    )
    wide = jax.ShapeDtypeStruct((2 * blocks, *step.shape), jnp.float32)
    sizes = {"C": dataclasses.replace(tile, BLOCK_H=block_h), "num_warps": 4}
    # what fills registers without spilling, or spills least
    registers = (
        dict(num_warps=4, num_stages=2) if h <= 64 else dict(num_warps=8, num_stages=1)
    )
    gradients: tuple[Any, ...] = sparse_call(
        tokens_kernel,
        (rows * k * parts, chunks, 2 * blocks),
        given | {"states_ptr": states, "dstates_ptr": dstates},
        {"db_ptr": summed, "dc_ptr": summed, "dg_ptr": wide},
        sizes | {"HEADS": heads, **registers},
    )
    db, dc, dg = gradients
    wide = jax.ShapeDtypeStruct(step.shape, jnp.float32)
    gradients = sparse_call(
        values_kernel,
        (rows * num_heads, chunks),
        given | {"states_ptr": states, "dstates_ptr": dstates},
        {"dx_ptr": like(x), "dstep_ptr": wide, "dg_ptr": wide},
        sizes | {"num_stages": 1},
    )
    dx, dstep, dg_across = gradients
    # a factor 0 stays 0, whatever is rounded in sums over the tokens around it
    steps, rate = step.astype(jnp.float32), a.astype(jnp.float32)
    forgets = steps * rate < LEAST
    if starts is not None:
        forgets |= starts[..., None]
    dg = jnp.where(forgets, 0.0, dg.sum(0) + dg_across)
    return (
        dx,
        (dstep + rate * dg).astype(step.dtype),
        (steps * dg).sum((0, 1)).astype(a.dtype),
        db.sum(0).astype(b.dtype),
        dc.sum(0).astype(c.dtype),
        dinitial,
    )
