"""A mixture of experts for a few tokens: two launches, no sort.

    hidden    act(gate[e] x, up[e] x) of one slot of a token, some rows of its expert
    y         the weighted sum of down[e] hidden over a token's slots, some dims of it

Each weight is read once per slot, and the tokens are so few that reading decides: a
matrix product would leave the tensor cores empty, so sums run over registers. At 1
token, 2048 dims, 8 experts of 512 that is 50 MB, 10.5 us of an H200's memory.

In a chain of launches the second asks for its first weights before hidden is there:
which experts they are of was known before the first began.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.dependent_launch import let_next_begin, wait_for_those_ahead
from jaxkern.gpu.device import WARP, compute_capability, next_power_of_2
from jaxkern.gpu.triton_call import jit, libdevice, tl
from jaxkern.triton.quant.row_decode import float_of_e4m3

MOST_SLOTS = 16  # of a token: their loop is unrolled
FP8_CONVERSION = 89  # the compute capability that has it
EARLY_REGISTERS = 128  # of a thread, for weights that are read before hidden is there
EARLY_REGISTERS_OF_BYTES = 32  # likewise; what they become needs more


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
def activated(
    gate,
    up,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
):
    if ACTIVATION == "swiglu":
        if LIMIT is not None:  # NaN stays
            gate = tl.where(gate > LIMIT, LIMIT, gate)
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return gate * tl.sigmoid(ALPHA * gate) * (up + UP_OFFSET)
    if ACTIVATION == "geglu":
        return 0.5 * gate * (1.0 + libdevice.erf(gate * 0.7071067811865476)) * up
    bent = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(2.0 * bent) * up  # (1 + tanh z) / 2 is sigmoid 2 z


@jit
def as_float(w, HARDWARE: tl.constexpr):
    """Weights in float32; of bytes the 8-bit floats that they are."""
    if w.dtype != tl.uint8:
        return w.to(tl.float32)
    elif HARDWARE:
        return w.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return float_of_e4m3(w.to(tl.int32))


@jit
def hidden_kernel(
    x_ptr,
    ids_ptr,
    gate_ptr,
    gate_scales_ptr,
    up_ptr,
    up_scales_ptr,
    shared_ptr,
    shared_scales_ptr,
    gate_bias_ptr,
    up_bias_ptr,
    hidden_ptr,
    K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    HALVES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LATE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD:
        wait_for_those_ahead()
        if LATE:
            let_next_begin()
    slot = tl.program_id(1)
    expert = tl.load(ids_ptr + slot)
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    out = hidden_ptr + slot * F + f
    known = is_known(expert, E)
    if is_named(expert, shared_ptr, E) == 0:
        tl.store(out, tl.zeros((BLOCK_F,), hidden_ptr.dtype.element_ty), f < F)
        return
    place = tl.where(known, expert, 0).to(tl.int64)
    gate_rows = gate_ptr + place * (HALVES * F * D)
    if HALVES == 2:  # up's rows stand behind those of gate, as do their biases
        up_rows = gate_rows + F * D
    else:
        up_rows = up_ptr + place * (F * D)
    if shared_ptr is not None:
        gate_rows = tl.where(known, gate_rows, shared_ptr)
        up_rows = tl.where(known, up_rows, shared_ptr + F * D)
    column = tl.arange(0, BLOCK_D)
    rows = tl.minimum(f, F - 1)[:, None] * D
    gate = tl.zeros((BLOCK_F, BLOCK_D), tl.float32)
    up = tl.zeros((BLOCK_F, BLOCK_D), tl.float32)
    for first in tl.static_range(0, D, BLOCK_D):
        d = (first + column)[None, :]
        inside = d < D
        x = tl.load(x_ptr + slot // K * D + d, inside, 0.0).to(tl.float32)
        gate += as_float(tl.load(gate_rows + rows + d, inside, 0), HARDWARE) * x
        up += as_float(tl.load(up_rows + rows + d, inside, 0), HARDWARE) * x
    gate = tl.sum(gate, 1)
    up = tl.sum(up, 1)
    biased = f < tl.where(known, F, 0)
    at = place * (HALVES * F) + f
    if gate_scales_ptr is not None:
        gate_scales = tl.load(gate_scales_ptr + at, biased, 0.0).to(tl.float32)
        if HALVES == 2:
            up_scales = tl.load(gate_scales_ptr + at + F, biased, 0.0).to(tl.float32)
        else:
            up_scales = tl.load(up_scales_ptr + at, biased, 0.0).to(tl.float32)
        if shared_scales_ptr is not None:  # one of both is zero
            other = f < tl.where(known, 0, F)
            of_all = shared_scales_ptr + f
            gate_scales += tl.load(of_all, other, 0.0).to(tl.float32)
            up_scales += tl.load(of_all + F, other, 0.0).to(tl.float32)
        gate *= gate_scales
        up *= up_scales
    if gate_bias_ptr is not None:
        gate += tl.load(gate_bias_ptr + at, biased, 0.0).to(tl.float32)
        if HALVES == 2:
            up += tl.load(gate_bias_ptr + at + F, biased, 0.0).to(tl.float32)
    if up_bias_ptr is not None:
        up += tl.load(up_bias_ptr + at, biased, 0.0).to(tl.float32)
    hidden = activated(gate, up, ACTIVATION, ALPHA, LIMIT, UP_OFFSET)
    tl.store(out, hidden.to(hidden_ptr.dtype.element_ty), f < F)


@jit
def result_kernel(
    hidden_ptr,
    early_ids_ptr,
    weights_ptr,
    early_down_ptr,
    early_scales_ptr,
    early_shared_ptr,
    early_shared_scales_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLLED: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD:
        let_next_begin()
        if AHEAD != 3:
            wait_for_those_ahead()
    token = tl.program_id(1)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_F)
    STEPS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    row = tl.minimum(d, D - 1)
    rows = row[:, None] * F
    NUM_EARLY: tl.constexpr = EARLY if AHEAD == 3 else 0
    experts = ()
    for j in tl.static_range(NUM_EARLY):
        at = (
            early_ids_ptr + token * K + j
        )  # past the first cache: written shortly before
        experts += (tl.load(at, cache_modifier=".cg"),)
    early = ()
    early_scales = ()
    for j in tl.static_range(NUM_EARLY):
        early += (
            down_of_slot(
                experts[j], early_down_ptr, early_shared_ptr, rows, column, E, D, F
            ),
        )
        early_scales += (
            scales_of_slot(
                experts[j], early_scales_ptr, early_shared_scales_ptr, row, E, D
            ),
        )
    if AHEAD == 3:
        wait_for_those_ahead()
    acc = tl.zeros((BLOCK_D, BLOCK_F), tl.float32)
    beside = tl.zeros((BLOCK_D,), tl.float32)
    for j in tl.static_range(K):
        slot = token * K + j
        if j < NUM_EARLY:
            expert = experts[j]
        else:
            expert = tl.load(early_ids_ptr + slot)
        known = is_known(expert, E)
        named = is_named(expert, early_shared_ptr, E)
        weight = tl.where(named, tl.load(weights_ptr + slot).to(tl.float32), 0.0)
        present = tl.where(named, F, 0)
        hidden = hidden_ptr + slot * F
        if j < NUM_EARLY:
            down = early[j]
            scale = early_scales[j] * weight
        else:
            down = down_of_slot(
                expert, early_down_ptr, early_shared_ptr, rows, column, E, D, F
            )
            scale = weight * scales_of_slot(
                expert, early_scales_ptr, early_shared_scales_ptr, row, E, D
            )
        if UNROLLED:
            acc += weighed(down, scale, hidden, column, present, HARDWARE)
            for i in tl.static_range(1, STEPS):
                f = i * BLOCK_F + column
                down = down_of_slot(
                    expert, early_down_ptr, early_shared_ptr, rows, f, E, D, F
                )
                acc += weighed(down, scale, hidden, f, present, HARDWARE)
        else:
            for i in range(STEPS):  # behind the last step nothing is read
                f = (i + 1) * BLOCK_F + column
                following = down_of_slot(
                    expert, early_down_ptr, early_shared_ptr, rows, f, E, D, F
                )
                acc += weighed(down, scale, hidden, f - BLOCK_F, present, HARDWARE)
                down = following
        if bias_ptr is not None:
            biased = d < tl.where(known, D, 0)
            place = tl.where(known, expert, 0).to(tl.int64)
            bias = tl.load(bias_ptr + place * D + d, biased, 0.0)
            beside += weight * bias.to(tl.float32)
    y = tl.sum(acc, 1) + beside
    at = token * D + d
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, d < D, 0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), d < D)


@jit
def weighed(down, scale, hidden_ptr, f, present, HARDWARE: tl.constexpr):
    """down times hidden, one scale for all or one for each row of down."""
    hidden = tl.load(hidden_ptr + f, f < present, 0.0).to(tl.float32)[None, :]
    down = as_float(down, HARDWARE)
    if scale.shape == ():
        return down * (hidden * scale)
    else:
        return down * scale[:, None] * hidden


@jit
def is_known(expert, E: tl.constexpr):
    return (expert >= 0) & (expert < E)


@jit
def is_named(expert, shared_ptr, E: tl.constexpr):
    """Whether an id is that of an expert, or of the one that all tokens pass."""
    if shared_ptr is not None:
        return (expert >= 0) & (expert <= E)
    else:
        return is_known(expert, E)


@jit
def down_of_slot(
    expert,
    down_ptr,
    shared_ptr,
    rows,
    f,
    E: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
):
    """Some rows and the columns `f` of an expert's `down`, as they are stored."""
    known = is_known(expert, E)
    at = down_ptr + tl.where(known, expert, 0).to(tl.int64) * (D * F)
    if shared_ptr is not None:
        at = tl.where(known, at, shared_ptr)
    present = tl.where(is_named(expert, shared_ptr, E), F, 0)
    return tl.load(at + rows + f[None, :], f[None, :] < present, 0)


@jit
def scales_of_slot(
    expert, scales_ptr, shared_scales_ptr, row, E: tl.constexpr, D: tl.constexpr
):
    """Of some rows of an expert's `down`; 1 where there are none."""
    if scales_ptr is None:
        return 1.0
    else:
        known = is_known(expert, E)
        place = tl.where(known, expert, 0).to(tl.int64)
        there = row < tl.where(known, D, 0)
        scales = tl.load(scales_ptr + place * D + row, there, 0.0).to(tl.float32)
        if shared_scales_ptr is not None:  # one of both is zero
            there = row < tl.where(expert == E, D, 0)
            scales += tl.load(shared_scales_ptr + row, there, 0.0).to(tl.float32)
        return scales


def blocks(
    summed: int, rows: str, other: str, widest: int, elements: int = 8192
) -> dict[str, Any]:
    """Sums of up to `widest` terms are one step, longer ones have steps of 1024."""
    width = next_power_of_2(summed)
    width = width if width <= widest else 1024
    return {rows: min(max(1, elements // width), 8), other: width, "num_warps": 4}


def hidden_of(
    x,
    ids,
    gate,
    up,
    *,
    gate_scales=None,
    up_scales=None,
    shared=None,
    shared_scales=None,
    gate_bias=None,
    up_bias=None,
    activation="swiglu",
    alpha=1.0,
    limit=None,
    up_offset=0.0,
):
    """`[*ids.shape, f]` of x `[..., d]`, ids `[..., k]` and gate `[e, f, d]`.

    Or `[e, 2, f, d]`, which has up too.
    """
    e, *_, f, d = gate.shape
    # a step as wide as a row has 2 rows of bfloat16, 4 of bytes
    fewer = gate_scales is None and 1024 < d <= 2048
    found = blocks(d, "BLOCK_F", "BLOCK_D", 2048, 4096 if fewer else 8192)
    [hidden] = bridge.sparse_call(
        hidden_kernel,
        (-(-f // found["BLOCK_F"]), ids.size),
        {
            "x_ptr": x,
            "ids_ptr": ids.astype(jnp.int32),
            "gate_ptr": gate,
            "gate_scales_ptr": gate_scales,
            "up_ptr": up,
            "up_scales_ptr": up_scales,
            "shared_ptr": shared,
            "shared_scales_ptr": shared_scales,
            "gate_bias_ptr": gate_bias,
            "up_bias_ptr": up_bias,
        },
        {"hidden_ptr": jax.ShapeDtypeStruct((*ids.shape, f), x.dtype)},
        dict(K=ids.shape[-1], E=e, D=d, F=f, HALVES=1 if up is not None else 2)
        | dict(ACTIVATION=activation)
        | dict(ALPHA=alpha, LIMIT=limit, UP_OFFSET=up_offset, LATE=True)
        | dict(HARDWARE=compute_capability() >= FP8_CONVERSION)
        | found,
    )
    return hidden


def result_of(
    hidden,
    ids,
    weights,
    down,
    *,
    scales=None,
    shared=None,
    shared_scales=None,
    bias=None,
    residual=None,
):
    """`[..., d]` of hidden `[..., k, f]`, ids and weights `[..., k]`."""
    (e, d, f), lead = down.shape, ids.shape[:-1]
    # the scales of rows, and what bytes are on the way to floats, need registers
    found = blocks(f, "BLOCK_D", "BLOCK_F", 1024, 8192 if scales is None else 4096)
    # steps of bytes are faster one after the other, though registers spill
    found["UNROLLED"] = scales is not None or f <= found["BLOCK_F"]
    found["EARLY"] = early_slots(found, ids.shape[-1], f, down.dtype.itemsize)
    [y] = bridge.sparse_call(
        result_kernel,
        (-(-d // found["BLOCK_D"]), math.prod(lead)),
        {
            "hidden_ptr": hidden,
            "early_ids_ptr": ids.astype(jnp.int32),
            "weights_ptr": weights,
            "early_down_ptr": down,
            "early_scales_ptr": scales,
            "early_shared_ptr": shared,
            "early_shared_scales_ptr": shared_scales,
            "bias_ptr": bias,
            "residual_ptr": residual,
        },
        {"y_ptr": jax.ShapeDtypeStruct((*lead, d), hidden.dtype)},
        dict(K=ids.shape[-1], E=e, D=d, F=f)
        | dict(HARDWARE=compute_capability() >= FP8_CONVERSION)
        | found,
    )
    return y


def early_slots(sizes: dict[str, Any], k: int, f: int, itemsize: int) -> int:
    """Of how many slots a program can keep what it reads first in registers."""
    if f > sizes["BLOCK_F"]:
        return 1
    threads = WARP * sizes["num_warps"]
    elements = max(1, sizes["BLOCK_D"] * sizes["BLOCK_F"] // threads)
    room = EARLY_REGISTERS if itemsize > 1 else EARLY_REGISTERS_OF_BYTES
    return min(k, room * 4 // (elements * itemsize))


def moe_ffn_few(x, ids, weights, gate, up, down, *, activation):
    """y `[t, d]`."""
    hidden = hidden_of(x, ids, gate, up, activation=activation)
    return result_of(hidden, ids, weights, down)
