"""State-space duality, Mamba-2's layer, along the chunks of a sequence in one launch.

A program has some columns of one head. It keeps their state S [columns, state] in
float32 registers, where it is the left operand of the products that need it:

    y^T = from_start (S C^T) + x^T P^T     P^T = step (B C^T) between, by rows and pairs
    S <- from_start_C S + (to_end step x^T) B

from_start, between and to_end are decays as in docs/design/gated_delta_rule.md.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import jit, sparse_call, tl
from jaxkern.triton.delta_rule.gated_delta_rule.chunk_matrices import decay_between

LARGEST = 256  # numbers of a state for one column
COLUMNS = 64  # of a program, at most
CHUNK = 64  # tokens, at most
MUCH_SHARED = 160_000  # bytes of a multiprocessor that takes states beyond 128


@dataclasses.dataclass(frozen=True)
class Constants:
    """What a problem fixes for all of its kernels; `C` in them.

    Attributes:
      T, CHUNK: tokens, and how many of them a chunk has.
      NUM_HEADS, GROUP: heads, and how many of them share b and c.
      H, STATE: columns of a head, and numbers of a state for one of them.
      BLOCK_H, BLOCK_STATE: how many of these a program has at a time.
    """

    T: int
    NUM_HEADS: int
    GROUP: int
    H: int
    STATE: int
    CHUNK: int
    BLOCK_H: int
    BLOCK_STATE: int

    @property
    def CHUNKS(self) -> int:
        return -(-self.T // self.CHUNK)

    @property
    def NUM_GROUPS(self) -> int:
        return self.NUM_HEADS // self.GROUP


@jit
def load_decays(
    step_ptr, starts_ptr, rows, a, T: tl.constexpr, NUM_HEADS: tl.constexpr
):
    """(steps, sums of step * a from the chunk's start on), 0 beyond the sequence.

    A decay below -120 counts as that: its exponential is 0 in float32 either way, so
    the difference of two sums is a number where a segment begins too.
    """
    inside = rows < T
    step = tl.load(step_ptr + rows * NUM_HEADS, inside, 0.0).to(tl.float32)
    g = tl.where(inside, step * a, 0.0)
    if starts_ptr is not None:
        g = tl.where(tl.load(starts_ptr + rows, inside, 0) != 0, -120.0, g)
    return step, tl.cumsum(tl.where(g < -120.0, -120.0, g), 0)


@jit
def state_space_dual_kernel(
    x_ptr,
    step_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    initial_ptr,
    starts_ptr,
    y_ptr,
    final_ptr,
    C: tl.constexpr,
):
    BLOCK_H: tl.constexpr = C.BLOCK_H
    BLOCK_STATE: tl.constexpr = C.BLOCK_STATE
    dtype = b_ptr.dtype.element_ty
    place = tl.program_id(0).to(tl.int64)
    row, head = place // C.NUM_HEADS, place % C.NUM_HEADS
    token, n = tl.arange(0, C.CHUNK), tl.arange(0, BLOCK_STATE)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    state_at = (place * C.H + column[:, None]) * C.STATE + n[None, :]
    state_in = (column < C.H)[:, None] & (n < C.STATE)[None, :]
    state = tl.zeros((BLOCK_H, BLOCK_STATE), tl.float32)
    if initial_ptr is not None:
        state += tl.load(initial_ptr + state_at, state_in, 0.0).to(tl.float32)
    a = tl.load(a_ptr + head).to(tl.float32)
    x_ptr += (row * C.T * C.NUM_HEADS + head) * C.H
    y_ptr += (row * C.T * C.NUM_HEADS + head) * C.H
    step_ptr += row * C.T * C.NUM_HEADS + head
    b_ptr += (row * C.T * C.NUM_GROUPS + head // C.GROUP) * C.STATE
    c_ptr += (row * C.T * C.NUM_GROUPS + head // C.GROUP) * C.STATE
    if starts_ptr is not None:
        starts_ptr += row * C.T
    for chunk in range(C.CHUNKS):
        rows = (chunk * C.CHUNK + token).to(tl.int64)
        step, total = load_decays(step_ptr, starts_ptr, rows, a, C.T, C.NUM_HEADS)
        end = tl.sum(tl.where(token == C.CHUNK - 1, total, 0.0), 0)
        at = rows[:, None] * (C.NUM_GROUPS * C.STATE) + n[None, :]
        present = (rows < C.T)[:, None] & (n < C.STATE)[None, :]
        b = tl.load(b_ptr + at, present, 0.0)
        c = tl.load(c_ptr + at, present, 0.0)
        x_at = rows[None, :] * (C.NUM_HEADS * C.H) + column[:, None]
        x_in = (rows < C.T)[None, :] & (column < C.H)[:, None]
        x = tl.load(x_ptr + x_at, x_in, 0.0)
        seen = token[None, :] >= token[:, None]
        between = decay_between(total[None, :], total[:, None], seen)
        pairs = tl.dot(b, tl.trans(c)) * between * step[:, None]
        y = tl.dot(state.to(dtype), tl.trans(c)) * tl.exp(total)[None, :]
        y = tl.dot(x, pairs.to(dtype), y)
        tl.store(y_ptr + x_at, y.to(y_ptr.dtype.element_ty), x_in)
        stored = x.to(tl.float32) * (step * tl.exp(end - total))[None, :]
        state = tl.dot(stored.to(dtype), b, tl.exp(end) * state)
    tl.store(final_ptr + state_at, state.to(final_ptr.dtype.element_ty), state_in)


def unsupported(
    x: Any,
    step: Any,
    a: Any,
    b: Any,
    c: Any,
    initial_state: Any,
    starts: Any,
    *,
    chunk_size: int,
) -> str | None:
    """A reason in words, or None."""
    del chunk_size
    operands = {"x": x, "step": step, "a": a, "b": b, "c": c, "starts": starts}
    if reason := bridge.unsupported(**operands, initial_state=initial_state):
        return reason
    if not x.size * b.size:
        return "an operand is empty"
    named = {"x": x, "b": b, "c": c}
    if len({y.dtype for y in named.values()}) > 1:
        names = ", ".join(y.dtype.name for y in named.values())
        return f"`x`, `b` and `c` have the dtypes {names}"
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"`x` is {x.dtype.name}"
    if (size := b.shape[-1]) > LARGEST:
        return f"a state has {size} numbers a column, more than {LARGEST}"
    if size > 128 and bridge.max_shared_bytes() < MUCH_SHARED:
        return f"a state of {size} a column needs more than the GPU's shared memory"
    return None


def tokens_of_chunk(t: int) -> int:
    return max(16, min(CHUNK, next_power_of_2(t)))


def state_space_dual(
    x, step, a, b, c, initial_state, starts, *, chunk_size
) -> tuple[jax.Array | None, ...]:
    del chunk_size  # the same function up to rounding
    rows, t, n, h = x.shape
    k, size = b.shape[2:]
    kept = jnp.float32 if initial_state is None else initial_state.dtype
    block = max(16, min(COLUMNS, next_power_of_2(h)))
    return sparse_call(
        state_space_dual_kernel,
        (rows * n, -(-h // block)),
        {
            "x_ptr": x,
            "step_ptr": step,
            "a_ptr": a,
            "b_ptr": b,
            "c_ptr": c,
            "initial_ptr": initial_state,
            "starts_ptr": None if starts is None else starts.astype(jnp.int8),
        },
        {
            "y_ptr": jax.ShapeDtypeStruct(x.shape, x.dtype),
            "final_ptr": jax.ShapeDtypeStruct((rows, n, h, size), kept),
        },
        dict(
            num_warps=4 if size <= 128 else 8,
            num_stages=2,
            C=Constants(
                T=t,
                NUM_HEADS=n,
                GROUP=n // k,
                H=h,
                STATE=size,
                CHUNK=tokens_of_chunk(t),
                BLOCK_H=block,
                BLOCK_STATE=max(16, next_power_of_2(size)),
            ),
        ),
    )
