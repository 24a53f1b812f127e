"""Layers that JAX traces once, however many of a model are alike.

    layer = traced_once(partial(one_layer, config))
    for weights in layers:
        x = layer(weights, x)

A layer is a hundred lines of Python, each with its checks: 10 ms, a third of a second
for 32. What is traced is copied, operation by operation, to where the next like it
stands, so the program is the same.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

# where JAX has other times to inline at, True is a later one
AT_ONCE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)


def traced_once(layer: Callable) -> Callable:
    """A function of arrays alone. Outside of a trace it runs as it is."""
    copied = jax.jit(layer, inline=AT_ONCE)

    def call(*operands: Any) -> Any:
        leaves = jax.tree.leaves(operands)
        traced = any(isinstance(leaf, Tracer) for leaf in leaves)
        return copied(*operands) if traced else layer(*operands)

    return call
