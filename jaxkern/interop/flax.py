"""The `attention_fn` of Flax's attention layers, of NNX and of Linen; what NNX trains.

from jaxkern.interop.flax import dot_product_attention, trainable

nnx.MultiHeadAttention(..., attention_fn=dot_product_attention)
nn.MultiHeadDotProductAttention(..., attention_fn=dot_product_attention)

nnx.grad(loss, argnums=nnx.DiffState(0, trainable))
nnx.Optimizer(model, optimizer, wrt=trainable)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxkern.interop.attending import attend_as_jax_nn
from jaxkern.interop.calling import as_asked, takes_holders
from jaxkern.primitives.attention.dropout import Dropout

__all__ = ["dot_product_attention", "trainable"]


def trainable(path: Any, variable: Any) -> bool:
    """A filter of NNX: each `nnx.Param` of floats, packed weights left out.

    `nnx.grad` differentiates every `nnx.Param`, and of the bytes of packed weights
    there is no derivative: JAX refuses integers. The scales of some containers are
    floats, which this leaves out too. Where a filter stands in NNX, this may:

        nnx.grad(loss, argnums=nnx.DiffState(0, trainable))
        nnx.Optimizer(model, optimizer, wrt=trainable)
        graph, trained, rest = nnx.split(model, trainable, ...)

    Args:
      path: of the variable; not read.
      variable: what a module holds.

    Returns:
      Whether it is trained.

    Example:
      >>> from flax import nnx
      >>> from jaxkern.interop.flax import trainable
      >>> w = jnp.ones((4, 32))
      >>> packed = nnx.Param(jaxkern.quantize_gguf(w, "Q8_0"))
      >>> [trainable((), x) for x in (nnx.Param(w), packed, nnx.BatchStat(w))]
      [True, False, False]
    """
    from flax import nnx

    from jaxkern.primitives.quant.dequantize import DEQUANTIZE

    del path
    if not isinstance(variable, nnx.Param):
        return False
    containers = tuple(DEQUANTIZE)
    held = jax.tree.leaves(variable, is_leaf=lambda x: isinstance(x, containers))
    return all(
        hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact) for x in held
    )


@takes_holders
def dot_product_attention(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s n h"],
    value: Float[Array, "*b s n hv"],
    bias: Float[Array, "*b #n #t #s"] | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    module: Any = None,
    promote_dtype: Callable | None = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    **einsums: Any,
) -> Float[Array, "*b t n hv"]:
    """Flax's `dot_product_attention`, by `jaxkern.attention`.

    Args:
      query, key, value, bias: as in Flax.
      mask: bool or numbers, where not 0 a key may be seen. A query that sees no key
        gives zeros.
      broadcast_dropout: Flax drops the same weights in all sequences and heads with
        True. The operator drops each for itself: False is needed where it drops.
      dropout_rng, dropout_rate, deterministic: weights are dropped unless
        deterministic or the rate is 0.
      dtype: of the operands and the result; the promoted one of all without it.
      precision: of the products.
      module: None. The operator has no weights that it could sow.
      promote_dtype: as in Flax NNX.
      is_causal: queries see no key after their own position.
      force_fp32_for_softmax: always so here.
      einsums: None, each: the operator has its own products.

    Raises:
      NotImplementedError: a `module`, an einsum, or dropout that is broadcast.
      TypeError: a shape or dtype does not fit.
      ValueError: dropout without `dropout_rng`.

    Example:
      >>> from jaxkern.interop.flax import dot_product_attention
      >>> x = jnp.ones((2, 3, 5, 4, 8))  # two batch dims
      >>> dot_product_attention(x, x, x, mask=jnp.ones((1, 1, 1, 5, 5))).shape
      (2, 3, 5, 4, 8)
    """
    op = "dot_product_attention"
    del force_fp32_for_softmax
    given = {"module": module, **einsums}
    for name in [name for name, x in given.items() if x is not None]:
        raise NotImplementedError(
            f"{op}: `{name}` is not supported, for one kernel makes and uses the "
            "weights. Leave it out, or take Flax's own function for this layer."
        )
    drops = dropout_rate > 0 and not deterministic
    if drops and broadcast_dropout:
        raise NotImplementedError(
            f"{op}: `broadcast_dropout` would drop the same weights everywhere. Make "
            "the layer with broadcast_dropout=False."
        )
    if promote_dtype is not None:
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
    else:
        wanted = dtype or jnp.result_type(query, key, value)
        query, key, value = (jnp.asarray(x, wanted) for x in (query, key, value))
    if mask is not None and mask.dtype != jnp.bool_:
        mask = mask != 0
    options: dict[str, Any] = {}
    if drops:
        if dropout_rng is None:
            raise ValueError(
                f"{op}: `dropout_rate` is {dropout_rate} without a key. Pass "
                "`dropout_rng`, a new one for each step."
            )
        options = dict(dropout=Dropout(dropout_rate, dropout_rng))
    with as_asked(op, None, precision):
        out, _ = attend_as_jax_nn(
            op,
            *(query, key, value, bias, mask),
            is_causal=is_causal,
            query_seq_lengths=None,
            key_value_seq_lengths=None,
            local_window_size=None,
            **options,
        )
    return out
