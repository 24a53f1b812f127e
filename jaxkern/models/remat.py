"""What the forward pass of training keeps of a layer for its gradient.

    "none"       everything
    "products"   results of matrix products, and what "attention" keeps
    "attention"  the result of attention and its log-sum-exp
    "full"       nothing but the layer's input

What is not kept is computed again, layer by layer, so at most one layer's values are in
memory beside what is kept. The gradient is the same.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

Remat = Literal["none", "attention", "products", "full"]

ATTENTION = ("attention", "attention_fwd")  # as inferred, and as differentiated
FP8 = ("linear_fp8", "linear_fp8_fwd")  # with both operands, 8 bits an element
PRODUCTS = ("linear", "dot_general", "quantized_matmul", *FP8)
KEPT = {"full": (), "attention": ATTENTION, "products": (*ATTENTION, *PRODUCTS)}


def saves(*names: str) -> Callable[..., bool]:
    """A policy for `jax.checkpoint`: keeps the results of primitives of these names.

    An operator's primitive has its name, and with `_fwd` behind that of its forward
    pass under a gradient. `jax.ad_checkpoint.checkpoint_name` cannot name what an
    operator saves: its gradient reads the results before they get a name.
    """

    def policy(primitive: Any, *_: Any, **__: Any) -> bool:
        return primitive.name in names

    return policy


def rematerialised(layer: Callable, remat: Remat) -> Callable:
    """The layer, of arrays alone, that keeps for its gradient what `remat` says.

    Raises:
      ValueError: `remat` is none of the four.
    """
    if remat == "none":
        return layer
    if remat not in KEPT:
        raise ValueError(
            f"hidden_states: `remat` must be one of {', '.join(get_args(Remat))}, got "
            f"{remat!r}."
        )
    return jax.checkpoint(layer, policy=saves(*KEPT[remat]))
