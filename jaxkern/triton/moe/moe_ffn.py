"""A mixture of experts for a few tokens: two launches, no sort.

    hidden    act(gate[e] x, up[e] x) of one slot of a token, some rows of its expert
    y         the weighted sum of down[e] hidden over a token's slots, some dims of it

Each weight is read once per slot, and the tokens are so few that reading decides: a
matrix product would leave the tensor cores empty, so sums run over registers. At 1
token, 2048 dims, 8 experts of 512 that is 50 MB, 10.5 us of an H200's memory.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import jit, libdevice, tl

MOST_SLOTS = 16  # of a token: their loop is unrolled


def unsupported(
    x: Any, ids: Any, gate: Any, up: Any, down: Any, **named: Any
) -> str | None:
    """A reason in words, or None."""
    if reason := bridge.unsupported(x=x, **named):
        return reason
    if not gate.size * ids.size:
        return "an operand is empty"
    if len({a.dtype for a in (x, gate, up, down)}) > 1:
        names = [a.dtype.name for a in (x, gate, up, down)]
        return f"`x`, `gate`, `up` and `down` have the dtypes {', '.join(names)}"
    if ids.shape[1] > MOST_SLOTS:
        return f"a token has {ids.shape[1]} experts, more than {MOST_SLOTS}"
    return None


@jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "swiglu":
        return gate * tl.sigmoid(gate) * up
    if ACTIVATION == "geglu":
        return 0.5 * gate * (1.0 + libdevice.erf(gate * 0.7071067811865476)) * up
    bent = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(2.0 * bent) * up  # (1 + tanh z) / 2 is sigmoid 2 z


@jit
def hidden_kernel(
    x_ptr,
    ids_ptr,
    gate_ptr,
    up_ptr,
    hidden_ptr,
    K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    slot = tl.program_id(1)
    expert = tl.load(ids_ptr + slot)
    if (expert < 0) | (expert >= E):
        return  # nobody reads it
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    column = tl.arange(0, BLOCK_D)
    rows = (expert.to(tl.int64) * F + tl.minimum(f, F - 1))[:, None] * D
    gate = tl.zeros((BLOCK_F, BLOCK_D), tl.float32)
    up = tl.zeros((BLOCK_F, BLOCK_D), tl.float32)
    for first in tl.static_range(0, D, BLOCK_D):
        d = (first + column)[None, :]
        inside = d < D
        x = tl.load(x_ptr + slot // K * D + d, inside, 0.0).to(tl.float32)
        gate += tl.load(gate_ptr + rows + d, inside, 0.0).to(tl.float32) * x
        up += tl.load(up_ptr + rows + d, inside, 0.0).to(tl.float32) * x
    hidden = activated(tl.sum(gate, 1), tl.sum(up, 1), ACTIVATION)
    out = hidden_ptr + slot * F + f
    tl.store(out, hidden.to(hidden_ptr.dtype.element_ty), f < F)


@jit
def result_kernel(
    hidden_ptr,
    ids_ptr,
    weights_ptr,
    down_ptr,
    y_ptr,
    K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(1)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_F)
    acc = tl.zeros((BLOCK_D, BLOCK_F), tl.float32)
    for j in tl.static_range(K):
        slot = token * K + j
        expert = tl.load(ids_ptr + slot)
        known = (expert >= 0) & (expert < E)
        weight = tl.where(known, tl.load(weights_ptr + slot).to(tl.float32), 0.0)
        present = tl.where(known, F, 0)
        expert = tl.where(known, expert, 0).to(tl.int64)
        rows = (expert * D + tl.minimum(d, D - 1))[:, None] * F
        for first in tl.static_range(0, F, BLOCK_F):
            f = (first + column)[None, :]
            inside = f < present
            hidden = tl.load(hidden_ptr + slot * F + f, inside, 0.0).to(tl.float32)
            down = tl.load(down_ptr + rows + f, inside, 0.0).to(tl.float32)
            acc += down * (hidden * weight)
    y = tl.sum(acc, 1)
    tl.store(y_ptr + token * D + d, y.to(y_ptr.dtype.element_ty), d < D)


def moe_ffn_few(x, ids, weights, gate, up, down, *, activation):
    """y `[t, d]`."""
    (t, d), k, (e, f, _) = x.shape, ids.shape[1], gate.shape
    sizes = dict(K=k, E=e, D=d, F=f)
    ids = ids.astype(jnp.int32)

    def blocks(summed: int, rows: str, other: str) -> dict[str, Any]:
        width = min(next_power_of_2(summed), 1024)
        return {rows: min(max(1, 8192 // width), 8), other: width, "num_warps": 4}

    found = blocks(d, "BLOCK_F", "BLOCK_D")
    [hidden] = bridge.triton_call(
        hidden_kernel,
        x,
        ids,
        gate,
        up,
        out=[jax.ShapeDtypeStruct((t * k, f), x.dtype)],
        grid=(-(-f // found["BLOCK_F"]), t * k),
        ACTIVATION=activation,
        **sizes,
        **found,
    )
    found = blocks(f, "BLOCK_D", "BLOCK_F")
    [y] = bridge.triton_call(
        result_kernel,
        hidden,
        ids,
        weights,
        down,
        out=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        grid=(-(-d // found["BLOCK_D"]), t),
        **sizes,
        **found,
    )
    return y
