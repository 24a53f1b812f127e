"""One token of a delta rule: the state is read once and written once.

    S <- exp(g) S,   S <- S + k d^T with d = beta (v - S^T k),   out = scale S^T q

A program holds a block of columns of one head's state, [H, BLOCK_V], in registers. The
products with k and q run over its rows, so that no column needs another one, and both
are taken of the decayed state: the new one gives S^T q + (q . k) d. It may lie where
the old one did. With CHANNELS every row has a g: `kimi_delta_attention_step` runs this.
"""

from typing import Any

import jax

from jaxkern.gpu.device import WARP, next_power_of_2, num_sms
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere

LONGEST = 4096  # dims of a key: a program holds whole columns


def unsupported(key: Any, state: Any, **rest: Any) -> str | None:
    """A reason in words, or None."""
    if key.shape[-1] > LONGEST:
        return f"keys of {key.shape[-1]} dims, above {LONGEST}, fill no program"
    return unsupported_anywhere(key=key, state=state, **rest)


def tile_sizes(heads: int, h: int, hv: int, itemsize: int) -> dict:
    """Wide rows, as far as they leave enough programs to hide the memory's latency."""
    rows, columns = next_power_of_2(h), next_power_of_2(hv)
    many = itemsize == 4 and heads * -(-hv // 64) >= 8 * num_sms()
    width = max(1, min(columns, 64 if many else 32, 8192 // rows))
    while width > 8 and heads * -(-hv // width) < num_sms():
        width //= 2
    warps = max(1, min(rows * width // (64 * WARP), 8))  # 64 elements a thread
    return {"BLOCK_H": rows, "BLOCK_V": width, "num_warps": warps}


@jit
def gated_delta_step_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    g_ptr,
    beta_ptr,
    state_ptr,
    out_ptr,
    new_ptr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    blocks: tl.constexpr = (HV + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // blocks  # of all value heads of all sequences
    rows = tl.arange(0, BLOCK_H)
    columns = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    at = rows[:, None] * HV + columns[None, :] + head.to(tl.int64) * (H * HV)
    inside = (rows < H)[:, None] & (columns < HV)[None, :]
    state = tl.load(state_ptr + at, inside, 0.0).to(tl.float32)
    of_key = head // GROUP * H + rows
    query = tl.load(query_ptr + of_key, rows < H, 0.0).to(tl.float32)
    key = tl.load(key_ptr + of_key, rows < H, 0.0).to(tl.float32)
    of_value = head * HV + columns
    value = tl.load(value_ptr + of_value, columns < HV, 0.0).to(tl.float32)
    beta = tl.load(beta_ptr + head).to(tl.float32)
    if CHANNELS:
        g = tl.load(g_ptr + head * H + rows, rows < H, 0.0)
        decay = tl.exp(g.to(tl.float32))[:, None]
    else:
        decay = tl.exp(tl.load(g_ptr + head).to(tl.float32))
    # what is forgotten may be NaN, which 0 would keep
    state = decay * tl.where(decay == 0.0, 0.0, state)
    stored = tl.sum(state * key[:, None], 0)
    read = tl.sum(state * query[:, None], 0)
    written = beta * (value - stored)
    out = SCALE * (read + tl.sum(query * key, 0) * written)
    tl.store(out_ptr + of_value, out, columns < HV)
    state += key[:, None] * written[None, :]
    tl.store(new_ptr + at, state, inside)


def gated_delta_step(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array | None, ...]:
    b, n, h, hv = state.shape
    sizes = tile_sizes(b * n, h, hv, state.dtype.itemsize)
    given = {
        "query_ptr": query,
        "key_ptr": key,
        "value_ptr": value,
        "g_ptr": g,
        "beta_ptr": beta,
        "state_ptr": state,
    }
    results = {"out_ptr": like(value), "new_ptr": like(state)}
    group = n // max(key.shape[1], 1)
    channels = g.ndim == 3
    constants = {"SCALE": scale, "GROUP": group, "H": h, "HV": hv, "CHANNELS": channels}
    grid = (b * n * -(-hv // sizes["BLOCK_V"]),)
    return sparse_call(
        gated_delta_step_kernel,
        grid,
        given,
        results,
        constants | sizes,
        in_place={"state_ptr": "new_ptr"},
    )
