"""Feed-forward block of a mixture of experts, dropless  (https://arxiv.org/abs/2211.15841)."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Integer

from jaxkern.primitives.activation.geglu import (
    geglu,
    geglu_bwd_reference,
    geglu_reference,
)
from jaxkern.primitives.activation.swiglu import (
    swiglu,
    swiglu_bwd_reference,
    swiglu_reference,
)
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.moe.expert_order import expert_order
from jaxkern.primitives.moe.grouped_matmul import (
    grouped_matmul,
    grouped_matmul_bwd_reference,
    grouped_matmul_reference,
)
from jaxkern.primitives.moe.moe_weighted_reduce import (
    moe_weighted_reduce,
    moe_weighted_reduce_bwd_reference,
    moe_weighted_reduce_reference,
)
from jaxkern.primitives.moe.permute_tokens import (
    permute_tokens,
    permute_tokens_bwd_reference,
    permute_tokens_reference,
)
from jaxkern.primitives.moe.unpermute_tokens import (
    unpermute_tokens,
    unpermute_tokens_bwd_reference,
    unpermute_tokens_reference,
)
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor

ACTIVATIONS = {
    "swiglu": swiglu,
    "geglu": partial(geglu, approximate="none"),
    "geglu_tanh": geglu,
}
REFERENCES = {  # and their gradients
    "swiglu": (swiglu_reference, swiglu_bwd_reference),
    "geglu": tuple(
        partial(f, approximate="none") for f in (geglu_reference, geglu_bwd_reference)
    ),
    "geglu_tanh": tuple(
        partial(f, approximate="tanh") for f in (geglu_reference, geglu_bwd_reference)
    ),
}

FEW_TOKENS = 8  # for which kernels read each expert without a sort


def moe_ffn(
    x: Float[Array, "... d"],
    ids: Int32[Array, "... k"],
    weights: Float[Array, "... k"],
    gate: Float[Array, "e f d"] | QuantizedTensor,
    up: Float[Array, "e f d"] | QuantizedTensor | None,
    down: Float[Array, "e d f"] | QuantizedTensor,
    *,
    activation: str = "swiglu",
) -> Float[Array, "... d"]:
    """Each token through its k experts, and their weighted sum.

        y = sum_k weights[k] * down[e] act(gate[e] x, up[e] x),   e = ids[k]

    Sorted by expert, multiplied group by group, put back: no token is dropped, whatever
    the balance, and values and gradients have the same bits in every run. An id outside
    `[0, e)` contributes zero: with the experts spread over devices, each one passes
    `ids - first` and its own experts, and the results are summed.

    Up to 8 tokens are an operator of their own, `moe_ffn_few`, whose kernels on a GPU
    read each token's experts where they lie.

    mlx-native's `moe_swiglu` kernels compute "geglu_tanh".

    Args:
      x: `[..., d]`, any float dtype.
      ids: `[..., k]`, from `route`.
      weights: `[..., k]`, from `route`.
      gate: `[e, f, d]`, an array or a quantised tensor; if `up` is None both halves
        packed, `[e, 2*f, d]` with the gate first.
      up: `[e, f, d]`, or None.
      down: `[e, d, f]`.
      activation: "swiglu", "geglu_tanh" (Gemma) or "geglu" (with erf).

    Returns:
      y: `[..., d]`, dtype of x.

    Raises:
      TypeError: shapes or dtypes do not fit.
      ValueError: `activation` is none of the three.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"moe_ffn: `activation` must be one of {', '.join(ACTIVATIONS)}, got "
            f"{activation!r}."
        )
    if ids.shape[:-1] != x.shape[:-1] or ids.shape != weights.shape:
        raise TypeError(
            "moe_ffn: `ids` and `weights` must be [..., k] with the leading dims of "
            f"`x`, got {ids.shape}, {weights.shape} and {x.shape}."
        )
    k, d = ids.shape[-1], x.shape[-1]
    tokens = jnp.reshape(x, (math.prod(x.shape[:-1]), d))
    operands = tokens, ids.reshape(-1, k), weights.reshape(-1, k), gate, up, down
    if tokens.shape[0] <= FEW_TOKENS and are_arrays(gate, up, down):
        y = moe_ffn_few_p(*operands, activation=activation)
    else:
        y = sorted_by_expert(*operands, activation=activation)
    return y.reshape(x.shape)


def are_arrays(*weights: object) -> bool:
    return all(isinstance(w, jax.Array | np.ndarray) for w in weights)


def sorted_by_expert(x, ids, weights, gate, up, down, *, activation):
    """y `[t, d]` by products of groups of rows."""
    (t, d), k = x.shape, ids.shape[1]
    order, group_sizes = expert_order(ids, gate.shape[0])
    rows = permute_tokens(x, order, k)
    hidden = grouped_matmul(rows, gate, group_sizes)
    packed_or_pair = (hidden,)
    if up is not None:
        packed_or_pair = (hidden, grouped_matmul(rows, up, group_sizes))
    hidden = ACTIVATIONS[activation](*packed_or_pair)
    slots = unpermute_tokens(grouped_matmul(hidden, down, group_sizes), order, k)
    return moe_weighted_reduce(slots.reshape(t, k, d), weights).astype(x.dtype)


def moe_ffn_few_reference(
    x: Float[Array, "t d"],
    ids: Integer[Array, "t k"],
    weights: Float[Array, "t k"],
    gate: Float[Array, "e f d"],
    up: Float[Array, "e f d"],
    down: Float[Array, "e d f"],
    *,
    activation: str,
) -> Float[Array, "t d"]:
    if ids.shape[1] == 0:
        raise ValueError(
            "moe_ffn_few: `ids` must be [t, k] with at least 1 expert of each token, "
            f"got {ids.shape}."
        )
    order, sizes = expert_order(ids, gate.shape[0])
    *_, hidden = hidden_rows(x, ids, order, sizes, gate, up, activation)
    rows = grouped_matmul_reference(hidden, down, sizes)
    slots = unpermute_tokens_reference(rows, order, k=ids.shape[1])
    return moe_weighted_reduce_reference(slots, weights, None, None, None)


def hidden_rows(x, ids, order, sizes, gate, up, activation):
    """(rows of x, products with gate and up, hidden), sorted by expert."""
    rows = permute_tokens_reference(x, order, k=ids.shape[1])
    products = [grouped_matmul_reference(rows, w, sizes) for w in (gate, up)]
    return rows, *products, REFERENCES[activation][0](*products)


def moe_ffn_few_bwd_reference(
    x: Float[Array, "t d"],
    ids: Integer[Array, "t k"],
    weights: Float[Array, "t k"],
    gate: Float[Array, "e f d"],
    up: Float[Array, "e f d"],
    down: Float[Array, "e d f"],
    dy: Float[Array, "t d"],
    *,
    activation: str,
) -> tuple[
    Float[Array, "t d"],
    Float[Array, "t k"],
    Float[Array, "e f d"],
    Float[Array, "e f d"],
    Float[Array, "e d f"],
]:
    k = ids.shape[1]
    order, sizes = expert_order(ids, gate.shape[0])
    rows, *products, hidden = hidden_rows(x, ids, order, sizes, gate, up, activation)
    slots = grouped_matmul_reference(hidden, down, sizes)
    slots = unpermute_tokens_reference(slots, order, k=k)
    dslots, dweights, *_ = moe_weighted_reduce_bwd_reference(
        slots, weights, None, None, None, dy
    )
    drows = unpermute_tokens_bwd_reference(order, dslots, k=k)
    dhidden, ddown = grouped_matmul_bwd_reference(hidden, down, sizes, drows)
    dproducts = REFERENCES[activation][1](*products, dhidden)
    (by_gate, dgate), (by_up, dup) = (
        grouped_matmul_bwd_reference(rows, w, sizes, d)
        for w, d in zip((gate, up), dproducts, strict=True)
    )
    dx = permute_tokens_bwd_reference(order, by_gate + by_up, k=k)
    return dx, dweights, dgate, dup, ddown


moe_ffn_few_p = kernel_primitive(
    moe_ffn_few_reference,
    bwd=moe_ffn_few_bwd_reference,
    replicated=("d", "e", "k"),  # hidden depends on all of d; an expert may be any
)
