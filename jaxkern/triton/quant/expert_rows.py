"""What kernels of experts share, whatever their weights are: slots, gate, result."""

from jaxkern.gpu.triton_call import gl, gluon_jit
from jaxkern.triton.quant.product_kernel import finished, place_in


@gluon_jit
def expert_of_slot(ids_ptr, slot, EXPERTS: gl.constexpr):
    """(its place, whether it is one of the experts, whether it is the shared one)."""
    expert = gl.load(ids_ptr + slot)
    known = (expert >= 0) & (expert < EXPERTS)
    return gl.where(known, expert, 0).to(gl.int64), known, expert == EXPERTS


@gluon_jit
def gate_and_up(sums, SHARES: gl.constexpr, COLUMNS: gl.constexpr):
    """Of sums of [2 SHARES] warps, the even of which have gate: both, added up.

    COLUMNS are those of sums that one activation has, 1 or 4.
    """
    y = finished(sums, 2, SHARES, False, COLUMNS)
    of_gate = place_in(y, 0) == 0
    gate = gl.sum(gl.where(of_gate, y, 0.0), 0)
    up = gl.sum(gl.where(of_gate, 0.0, y), 0)
    return gl.expand_dims(gate, 0), gl.expand_dims(up, 0)


@gluon_jit
def with_bias(y, bias_ptr, at, mask):
    if bias_ptr is not None:
        y += gl.load(bias_ptr + at, mask, 0.0).to(gl.float32)
    return y


@gluon_jit
def gated(gate, up, ALPHA: gl.constexpr, LIMIT: gl.constexpr, UP_OFFSET: gl.constexpr):
    """gate sigmoid(ALPHA gate) (up + UP_OFFSET), both within LIMIT; NaN stays."""
    if LIMIT is not None:
        gate = gl.where(gate > LIMIT, LIMIT, gate)
        up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))
    return gate / (1 + gl.exp(-ALPHA * gate)) * (up + UP_OFFSET)


@gluon_jit
def put_hidden(
    gate,
    up,
    expert,
    known,
    is_shared,
    slot,
    row,
    mask,
    pointers,
    ROWS: gl.constexpr,
    HALVES: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    UP_OFFSET: gl.constexpr,
):
    """The gated rows of a slot; `pointers` to both biases, the shared expert, y.

    Of two HALVES the bias of up stands behind that of gate.
    """
    gate_bias_ptr, up_bias_ptr, shared_ptr, y_ptr = pointers
    at = expert * (HALVES * ROWS) + row
    gate = with_bias(gate, gate_bias_ptr, at, mask & known)
    if HALVES == 2:
        up = with_bias(up, gate_bias_ptr, at + ROWS, mask & known)
    else:
        up = with_bias(up, up_bias_ptr, at, mask & known)
    y = gated(gate, up, ALPHA, LIMIT, UP_OFFSET)
    named = known
    if shared_ptr is not None:
        named = known | is_shared
    y = gl.where(named, y, 0.0)
    gl.store(y_ptr + slot * ROWS + row, y.to(y_ptr.dtype.element_ty), mask)


@gluon_jit
def put_sum(
    y,
    token,
    row,
    mask,
    pointers,
    ROWS: gl.constexpr,
    TOP_K: gl.constexpr,
    EXPERTS: gl.constexpr,
):
    """y, the biases of the experts by their weights and what is added, of a token.

    `pointers` to ids, weights, bias, residual, y.
    """
    ids_ptr, weights_ptr, bias_ptr, residual_ptr, y_ptr = pointers
    if bias_ptr is not None:
        for j in gl.static_range(TOP_K):
            expert = gl.load(ids_ptr + token * TOP_K + j)
            known = (expert >= 0) & (expert < EXPERTS)
            at = gl.where(known, expert, 0).to(gl.int64) * ROWS + row
            bias = gl.load(bias_ptr + at, mask & known, 0.0).to(gl.float32)
            y += gl.load(weights_ptr + token * TOP_K + j).to(gl.float32) * bias
    at = token * ROWS + row
    y = with_bias(y, residual_ptr, at, mask)
    gl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask)


@gluon_jit
def slot_of_item(
    item,
    token,
    ids_ptr,
    weights_ptr,
    shared_ptr,
    STEPS: gl.constexpr,
    TOP_K: gl.constexpr,
    EXPERTS: gl.constexpr,
):
    """Of item `slot * STEPS + step` of a token: slot, step, its expert and its weight.

    Last whether it counts: it is not behind the last one and names an expert.
    """
    present = item < TOP_K * STEPS
    item = gl.minimum(item, TOP_K * STEPS - 1)
    slot = token * TOP_K + item // STEPS
    expert, known, is_shared = expert_of_slot(ids_ptr, slot, EXPERTS)
    named = known
    if shared_ptr is not None:
        named = known | is_shared
    weight = gl.load(weights_ptr + slot).to(gl.float32)
    return slot, item % STEPS, expert, is_shared, weight, named & present
