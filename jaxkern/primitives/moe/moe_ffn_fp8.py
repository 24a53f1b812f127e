"""Feed-forward block of a mixture whose products are of 8-bit floats.

    hidden = act(gate[e] q(x), up[e] q(x)),   y = sum_k weights[k] * down[e] q(hidden)

q rounds rows to e4m3fn (encode_rows_fp8.py): each token once, before its codes are
copied to its k slots, and hidden where its gate is computed, in one pass.
"""

import functools
import math

from jax import lax
from jaxtyping import Array, Float, Int32

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.linear.encode_rows_fp8 import swiglu_rows_fp8_p
from jaxkern.primitives.moe.expert_order import expert_order
from jaxkern.primitives.moe.grouped_matmul_fp8 import (
    Rows,
    check_rows,
    encoded_rows,
    permuted,
    slots_of_tokens,
    stored_product,
    stored_rows,
)
from jaxkern.primitives.moe.moe_ffn import (
    add_bias,
    check_experts,
    check_routes,
    expert_activation,
)
from jaxkern.primitives.moe.moe_weighted_reduce import moe_weighted_reduce
from jaxkern.primitives.moe.unpermute_tokens import unpermute_tokens
from jaxkern.primitives.quant.fp8_tensor import FP8Tensor

OP = "moe_ffn_fp8"


@check_arguments
def moe_ffn_fp8(
    x: Float[Array, "... d"],
    ids: Int32[Array, "... k"],
    weights: Float[Array, "... k"],
    gate: FP8Tensor,
    up: FP8Tensor | None,
    down: FP8Tensor,
    gate_bias: Float[Array, "e f"] | None = None,
    up_bias: Float[Array, "e f"] | None = None,
    down_bias: Float[Array, "e d"] | None = None,
    *,
    activation: str = "swiglu",
    gated: bool = True,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Float[Array, "... d"]:
    """`moe_ffn` of experts stored in 8-bit floats, which multiplies in 8-bit floats.

        y = sum_k weights[k] * (down[e] q(act(gate[e] q(x), up[e] q(x))) + down_bias[e])

    q rounds to e4m3fn with a scale for each row, as `grouped_matmul_fp8` does: x once
    a token, and what is between gate and up and `down` once a slot. `moe_ffn` of the
    same containers decodes them and rounds neither. Each q is off by up to 1/16 of an
    element, in the mean by 2.65 % of a row's norm. Biases are added to the products.

    Of "swiglu" what the gate lets through stays in float32 until it is rounded; of the
    other activations it is rounded to x.dtype before. The gradient of x is that of the
    product where q has derivative 1, with decoded weights; they have none.

    On Hopper the products are a kernel, and from compute capability 8.0 on so are both
    roundings: 4096 tokens of a layer of Qwen3-30B-A3B take 0.65 of what they take in
    bfloat16. Elsewhere XLA adds the same products in float32.

    Args:
      x: `[..., d]`, any float dtype.
      ids: `[..., k]`, from `route`; one outside `[0, e)` contributes zero.
      weights: `[..., k]`, from `route`.
      gate: `[e, f, d]` in e4m3fn with scales of whole rows, `block=(1, 0)` or `(0, 0)`;
        if `up` is None both halves packed, `[e, 2*f, d]` with the gate first.
      up: `[e, f, d]`, or None.
      down: `[e, d, f]`.
      gate_bias, up_bias, down_bias: as of `moe_ffn`.
      activation, gated: as of `moe_ffn`.
      alpha, limit, up_offset: of "swiglu", see there.

    Returns:
      y: `[..., d]`, dtype of x.

    Raises:
      TypeError: shapes or dtypes do not fit, or weights are not stored in 8 bits.
      ValueError: weights in another format or with scales along a row, `activation` is
        not known, or operands that it does not have.

    Example:
      >>> x, logits = jnp.ones((2, 4)), jnp.array([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]])
      >>> weights, ids = jaxkern.route(logits, 2)
      >>> rows = dict(block=(1, 0))
      >>> gate = jaxkern.quantize_fp8(jnp.ones((3, 8, 4)), **rows)
      >>> down = jaxkern.quantize_fp8(jnp.ones((3, 4, 8)), **rows)
      >>> jaxkern.moe_ffn_fp8(x, ids, weights, gate, gate, down).shape
      (2, 4)
    """
    act = expert_activation(activation, gated, alpha, limit, up_offset, op=OP)
    check_routes(OP, x, ids, weights)
    if up is not None and not gated:
        raise ValueError(f"{OP}: gated=False has no `up`. Give its weights as `gate`.")
    if up_bias is not None and up is None:
        raise ValueError(f"{OP}: `up_bias` needs `up`. Pack it behind `gate_bias`.")
    k, d = ids.shape[-1], x.shape[-1]
    check_experts(d, gate, up, down, 2 if gated and up is None else 1, op=OP)
    for name, w in (("gate", gate), ("up", up), ("down", down)):
        if w is not None:
            check_rows(OP, name, w)
    tokens = x.reshape(math.prod(x.shape[:-1]), d)
    order, group_sizes = expert_order(ids, gate.shape[0])

    def projected(name, rows_of, floats, rows, w, bias):
        sorted_rows = rows, stored_rows(w), group_sizes
        y = stored_product(rows_of, x.dtype, floats, *sorted_rows)
        return y if bias is None else add_bias(name, y, bias, group_sizes, op=OP)

    slots = functools.partial(slots_of_tokens, k=k)
    read = slots, (tokens, order), permuted(encoded_rows(tokens), order // k)
    hidden = [projected("gate_bias", *read, gate, gate_bias)]
    if up is not None:
        hidden.append(projected("up_bias", *read, up, up_bias))
    if activation == "swiglu":
        options = dict(alpha=alpha, limit=limit, up_offset=up_offset)
        rounded = swiglu_rows(*hidden, **options)
    else:
        rounded = encoded_rows(act(*hidden))
    out = projected("down_bias", act, tuple(hidden), rounded, down, down_bias)
    y = unpermute_tokens(out, order, k).reshape(*ids.shape, d)
    return moe_weighted_reduce(y, weights).astype(x.dtype)


def swiglu_rows(
    gate: Float[Array, "r n"],
    up: Float[Array, "r f"] | None = None,
    *,
    alpha: float,
    limit: float | None,
    up_offset: float,
) -> Rows:
    options = dict(
        alpha=float(alpha),
        limit=None if limit is None else float(limit),
        up_offset=float(up_offset),
    )
    fixed = [None if a is None else lax.stop_gradient(a) for a in (gate, up)]
    return Rows(*swiglu_rows_fp8_p(*fixed, **options))
