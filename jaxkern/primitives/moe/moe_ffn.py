"""Feed-forward block of a mixture of experts, dropless  (https://arxiv.org/abs/2211.15841)."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Integer

from jaxkern.primitives.activation.activations import Activation
from jaxkern.primitives.activation.bias_activation import bias_activation
from jaxkern.primitives.activation.geglu import (
    geglu,
    geglu_bwd_reference,
    geglu_reference,
)
from jaxkern.primitives.activation.glu import glu
from jaxkern.primitives.activation.swiglu import (
    check_swiglu,
    swiglu,
    swiglu_bwd_reference,
    swiglu_reference,
)
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.moe.expert_order import expert_order
from jaxkern.primitives.moe.expert_slots import bias_of_slots
from jaxkern.primitives.moe.grouped_matmul import (
    grouped_matmul,
    grouped_matmul_bwd_reference,
    grouped_matmul_reference,
)
from jaxkern.primitives.moe.grouped_matmul_fp8 import multiply_routed_fp8
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
from jaxkern.primitives.quant.quantized_matmul_id import (
    QUANTIZED_MATMUL_ID,
    quantized_matmul_id,
)
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor

ACTIVATIONS: dict[str, Callable[..., jax.Array]] = {
    "swiglu": swiglu,
    "geglu": partial(geglu, approximate="none"),
    "geglu_tanh": geglu,
    "glu": glu,
    "reglu": partial(glu, activation="relu"),
    "relu2glu": partial(glu, activation="relu2"),
    "tanhglu": partial(glu, activation="tanh"),
    "bilinear": partial(glu, activation="none"),
}
UNGATED: dict[str, Callable[..., jax.Array]] = {
    name: partial(bias_activation, bias=None, activation=name)
    for name in get_args(Activation)
}

REFERENCES: dict[str, tuple[Callable[..., Any], ...]] = {  # and their gradients
    "swiglu": tuple(
        partial(f, alpha=1.0, limit=None, up_offset=0.0)
        for f in (swiglu_reference, swiglu_bwd_reference)
    ),
    "geglu": tuple(
        partial(f, approximate="none") for f in (geglu_reference, geglu_bwd_reference)
    ),
    "geglu_tanh": tuple(
        partial(f, approximate="tanh") for f in (geglu_reference, geglu_bwd_reference)
    ),
}

FEW_TOKENS = 8  # for which kernels read each expert without a sort
SLOTS = 64  # of packed experts, of which each reads its own


@check_arguments
def moe_ffn(
    x: Float[Array, "... d"],
    ids: Int32[Array, "... k"],
    weights: Float[Array, "... k"],
    gate: Float[Array, "e f d"] | QuantizedTensor,
    up: Float[Array, "e f d"] | QuantizedTensor | None,
    down: Float[Array, "e d f"] | QuantizedTensor,
    gate_bias: Float[Array, "e f"] | None = None,
    up_bias: Float[Array, "e f"] | None = None,
    down_bias: Float[Array, "e d"] | None = None,
    *,
    activation: str = "swiglu",
    gated: bool = True,
    weigh_input: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Float[Array, "... d"]:
    """Each token through its k experts, and their weighted sum.

        y = sum_k weights[k] * (down[e] act(gate[e] x + gate_bias[e],
                                            up[e] x + up_bias[e]) + down_bias[e])

    with e = ids[k]. With `weigh_input` the weight scales what the expert reads instead
    of what it gives: x * weights[k], rounded to x.dtype.

    Sorted by expert, multiplied group by group, put back: no token is dropped, whatever
    the balance, and values and gradients have the same bits in every run. An id outside
    `[0, e)` contributes zero: with the experts spread over devices, each one passes
    `ids - first` and its own experts, and the results are summed.

    | model | arguments |
    |---|---|
    | Mixtral, Qwen3, DeepSeek-V3 | the defaults |
    | GPT-OSS | its biases, `alpha=1.702, limit=7.0, up_offset=1.0` |
    | Llama 4 | `weigh_input=True` |
    | Nemotron 3 Nano | `gated=False, activation="relu2", up=None` |

    Up to 8 tokens of plain gated experts are an operator of their own, `moe_ffn_few`,
    whose kernels on a GPU read each token's experts where they lie; those of packed
    experts, up to 64 rows, are three of `quantized_matmul_id`, without a sort.
    `moe_ffn_fp8` multiplies experts of 8-bit floats as they are stored.

    mlx-native's `moe_swiglu` kernels compute "geglu_tanh".

    Source: https://arxiv.org/abs/2211.15841.

    Args:
      x: `[..., d]`, any float dtype.
      ids: `[..., k]`, from `route`.
      weights: `[..., k]`, from `route`.
      gate: `[e, f, d]`, an array or a quantised tensor; if `up` is None both halves
        packed, `[e, 2*f, d]` with the gate first.
      up: `[e, f, d]`, or None.
      down: `[e, d, f]`.
      gate_bias, up_bias: `[e, f]` each, or None; packed as the weights are.
      down_bias: `[e, d]`, or None.
      activation: "swiglu", "geglu_tanh" (Gemma), "geglu" (with erf), "glu" (sigmoid),
        "reglu", "relu2glu", "tanhglu" or "bilinear" (none); without a gate a name of
        `bias_activation`.
      gated: whether there is a gate; without one act(gate[e] x) alone, `up` None.
      weigh_input: scale the inputs of the experts instead of their outputs.
      alpha, limit, up_offset: of "swiglu", see there.

    Returns:
      y: `[..., d]`, dtype of x.

    Raises:
      TypeError: shapes or dtypes do not fit.
      ValueError: `activation` is none of these, or operands that it does not have.

    Example:
      >>> x, logits = jnp.ones((2, 4)), jnp.array([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]])
      >>> weights, ids = jaxkern.route(logits, 2)
      >>> gate, down = jnp.ones((3, 8, 4)), jnp.ones((3, 4, 8))
      >>> jaxkern.moe_ffn(x, ids, weights, gate, gate, down).shape
      (2, 4)
    """
    act = expert_activation(activation, gated, alpha, limit, up_offset)
    check_routes("moe_ffn", x, ids, weights)
    if up is not None and not gated:
        raise ValueError(
            "moe_ffn: gated=False has no `up`. Give its weights as `gate`."
        )
    if up_bias is not None and up is None:
        raise ValueError("moe_ffn: `up_bias` needs `up`. Pack it behind `gate_bias`.")
    k, d = ids.shape[-1], x.shape[-1]
    check_experts(d, gate, up, down, halves=2 if gated and up is None else 1)
    tokens = jnp.reshape(x, (math.prod(x.shape[:-1]), d))
    plain = (alpha, limit, up_offset) == (1.0, None, 0.0) and not weigh_input
    plain = plain and gate_bias is None and up_bias is None and down_bias is None
    plain = plain and gated and activation in REFERENCES
    if plain and tokens.shape[0] <= FEW_TOKENS and are_arrays(gate, up, down):
        few = tokens, ids.reshape(-1, k), weights.reshape(-1, k), gate, up, down
        return moe_ffn_few_p(*few, activation=activation).reshape(x.shape)
    by_id = all(w is None or is_read_by_id(w) for w in (gate, up, down))
    by_id = by_id and len(tokens) <= FEW_TOKENS and 0 < ids.size <= SLOTS
    if by_id and not weigh_input:
        operands = gate, up, down, gate_bias, up_bias, down_bias
        slots = unsorted_experts(tokens, ids.reshape(-1, k), act, *operands)
        y = moe_weighted_reduce(slots, weights.reshape(-1, k))
        return y.astype(x.dtype).reshape(x.shape)
    order, group_sizes = expert_order(ids, gate.shape[0])
    rows = permute_tokens(tokens, order, k)
    if weigh_input:
        weight = permute_tokens(weights.reshape(-1, 1), order, 1)
        rows = (at_least_f32(rows) * at_least_f32(weight)).astype(x.dtype)
        weights = jnp.ones_like(weights)

    def projected(name, rows, w, bias):
        y = grouped_matmul(rows, w, group_sizes)
        return y if bias is None else add_bias(name, y, bias, group_sizes)

    hidden = [projected("gate_bias", rows, gate, gate_bias)]
    if up is not None:
        hidden.append(projected("up_bias", rows, up, up_bias))
    out = projected("down_bias", act(*hidden), down, down_bias)
    slots = unpermute_tokens(out, order, k)
    return moe_weighted_reduce(slots.reshape(*ids.shape, d), weights).astype(x.dtype)


def expert_activation(
    activation: str,
    gated: bool,
    alpha: float,
    limit: float | None,
    up_offset: float,
    op: str = "moe_ffn",
) -> Callable[..., jax.Array]:
    """What an expert applies to its gate and up, or to both packed."""
    known = ACTIVATIONS if gated else UNGATED
    if activation not in known:
        raise ValueError(
            f"{op}: `activation` must be one of {', '.join(known)} with "
            f"gated={gated}, got {activation!r}."
        )
    if activation == "swiglu":
        check_swiglu(op, alpha, limit, up_offset)
        return partial(swiglu, alpha=alpha, limit=limit, up_offset=up_offset)
    if (alpha, limit, up_offset) != (1.0, None, 0.0):
        raise ValueError(
            f"{op}: `alpha`, `limit` and `up_offset` belong to activation='swiglu', "
            f"got {activation!r}."
        )
    return known[activation]


def check_routes(op: str, x: Array, ids: Array, weights: Array) -> None:
    if ids.shape[:-1] != x.shape[:-1] or ids.shape != weights.shape:
        raise TypeError(
            f"{op}: `ids` and `weights` must be [..., k] with the leading dims of "
            f"`x`, got {ids.shape}, {weights.shape} and {x.shape}."
        )


def check_experts(
    d: int, gate: Any, up: Any, down: Any, halves: int, op: str = "moe_ffn"
) -> None:
    """TypeError unless the weights fit x and each other; `halves` are of the gate."""
    shape = gate.shape
    if len(shape) != 3 or shape[2] != d or shape[1] % halves:
        packed = "2*f, gate and up packed" if halves == 2 else "f"
        raise TypeError(
            f"{op}: `gate` must be [e, {packed}, {d}] as `x` has {d} dims, got {shape}."
        )
    e, f = shape[0], shape[1] // halves
    for name, w, expected in (("up", up, (e, f, d)), ("down", down, (e, d, f))):
        if w is not None and w.shape != expected:
            raise TypeError(
                f"{op}: `{name}` must be {expected} as `gate` is {shape}, got "
                f"{w.shape}."
            )


def is_read_by_id(w: object) -> bool:
    """Whether a product takes the experts that ids name, where they lie."""
    read = QUANTIZED_MATMUL_ID.get(type(w))
    alone = getattr(w, "global_scale", None) is None  # no kernel by id has one
    return alone and read is not None and read is not multiply_routed_fp8


def unsorted_experts(
    x: Float[Array, "t d"],
    ids: Integer[Array, "t k"],
    act: Callable[..., jax.Array],
    gate: QuantizedTensor,
    up: QuantizedTensor | None,
    down: QuantizedTensor,
    gate_bias: Float[Array, "e f"] | None,
    up_bias: Float[Array, "e f"] | None,
    down_bias: Float[Array, "e d"] | None,
) -> Float[Array, "t k d"]:
    """What the experts of each slot give, in the order of the slots."""
    (t, k), slots = ids.shape, ids.reshape(-1)

    def projected(name, x, w, bias):
        y = quantized_matmul_id(x, w, slots, top_k=slots.size // len(x))
        return (
            y if bias is None else add_bias_of_slots(name, y, bias, slots, w.shape[0])
        )

    hidden = [projected("gate_bias", x, gate, gate_bias)]
    if up is not None:
        hidden.append(projected("up_bias", x, up, up_bias))
    return projected("down_bias", act(*hidden), down, down_bias).reshape(t, k, -1)


def add_bias_of_slots(
    name: str,
    y: Float[Array, "r f"],
    bias: Float[Array, "e f"],
    slots: Integer[Array, " r"],
    experts: int,
) -> Float[Array, "r f"]:
    """y[i] + bias[slots[i]] in float32, rounded once; an id outside adds nothing."""
    check_bias(name, bias, (experts, y.shape[1]))
    return (at_least_f32(y) + bias_of_slots(bias, slots)).astype(y.dtype)


def check_bias(
    name: str, bias: Array, shape: tuple[int, int], op: str = "moe_ffn"
) -> None:
    if bias.shape != shape:
        raise TypeError(
            f"{op}: `{name}` must have a number for each of {shape[0]} "
            f"experts and {shape[1]} outputs, got shape {bias.shape}."
        )


def add_bias(
    name: str,
    y: Float[Array, "r f"],
    bias: Float[Array, "e f"],
    group_sizes: Int32[Array, " e"],
    op: str = "moe_ffn",
) -> Float[Array, "r f"]:
    """y[i] + bias[g] for the rows i of group g, in float32 and rounded once.

    A product with a column of ones is a gather whose gradient sums the rows of each
    group in order: that of a gather alone would add them in any order.
    """
    check_bias(name, bias, (group_sizes.shape[0], y.shape[1]), op)
    ones = jnp.ones_like(at_least_f32(y[:, :1]))
    with jax.default_matmul_precision("highest"):  # TF32 would round the bias
        rows = grouped_matmul(ones, bias[..., None], group_sizes)
    return (at_least_f32(y) + rows).astype(y.dtype)


def are_arrays(*weights: object) -> bool:
    return all(isinstance(w, jax.Array | np.ndarray) for w in weights)


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
