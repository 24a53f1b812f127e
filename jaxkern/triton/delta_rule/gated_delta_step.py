"""One token of the gated delta rule: the state is read once and written once.

    S <- exp(g) S + k d^T,   d = beta (v - exp(g) S^T k),   out = scale (exp(g) S^T q + (q.k) d)

A program holds a block of columns of one head's state, [H, BLOCK_V], in registers: both
products with the old state run over its rows, so that no column needs another one. The
new state may lie where the old one did.
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


def tile_sizes(heads: int, h: int, hv: int) -> dict:
    """Wide rows, as far as they leave enough programs to hide the memory's latency."""
    rows, columns = next_power_of_2(h), next_power_of_2(hv)
    width = max(1, min(columns, 32, 8192 // rows))
    while width > 8 and heads * -(-hv // width) < num_sms():
        width //= 2
    warps = max(1, min(rows * width // (32 * WARP), 8))
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
    decay = tl.exp(tl.load(g_ptr + head).to(tl.float32))
    beta = tl.load(beta_ptr + head).to(tl.float32)
    stored = tl.sum(state * key[:, None], 0)
    read = tl.sum(state * query[:, None], 0)
    written = beta * (value - decay * stored)
    out = SCALE * (decay * read + tl.sum(query * key, 0) * written)
    tl.store(out_ptr + of_value, out, columns < HV)
    new = decay * state + key[:, None] * written[None, :]
    tl.store(new_ptr + at, new, inside)


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
    sizes = tile_sizes(b * n, h, hv)
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
    constants = {"SCALE": scale, "GROUP": group, "H": h, "HV": hv}
    grid = (b * n * -(-hv // sizes["BLOCK_V"]),)
    return sparse_call(
        gated_delta_step_kernel,
        grid,
        given,
        results,
        constants | sizes,
        in_place={"state_ptr": "new_ptr"},
    )
