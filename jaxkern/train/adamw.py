"""AdamW by the operator `adamw_update`, as an optimiser of `train_step`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxkern import adamw_update

Rate = float | Callable[[Int32[Array, ""]], Float[Array, ""] | float]


class Moments(NamedTuple):
    """What AdamW keeps: running means of g and of g**2, and how many steps it took."""

    count: Int32[Array, ""]
    m: Any
    v: Any


@dataclass(frozen=True)
class AdamW:
    """`optax.adamw` by one operator: it writes weights and moments in one equation.

    Attributes:
      learning_rate: a number, or a schedule as optax's: from the number of updates made
        before, 0 for the first, to the rate.
      b1, b2, eps, eps_root, weight_decay: see `adamw_update`. The decay is that of
        every weight; `optax.adamw` with a mask leaves some out.

    Example:
      >>> adamw = jaxkern.train.AdamW(0.1, weight_decay=0.0)
      >>> w = jnp.zeros(2)
      >>> adamw.write(w, jnp.array([3.0, -5.0]), adamw.init(w))[0]
      Array([-0.1,  0.1], dtype=float32)
    """

    learning_rate: Rate
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    eps_root: float = 0.0
    weight_decay: float = 1e-4

    def init(self, params: Any) -> Moments:
        """Before the first step: zeros in float32, or wider, cut as the weights."""

        def zeros(p: Array) -> Array:
            return jnp.zeros_like(p, jnp.promote_types(p.dtype, jnp.float32))

        m, v = jax.tree.map(zeros, params), jax.tree.map(zeros, params)
        return Moments(jnp.zeros((), jnp.int32), m, v)

    def write(
        self,
        params: Any,
        grads: Any,
        state: Moments,
        copy: Any = None,
        grad_scale: Float[Array, ""] | None = None,
    ) -> tuple[Any, Any, Moments]:
        """The weights, their copies where there are some, and the moments.

        `copy` is like `params`, or None in the place of any part of it; gradients of
        any dtype are multiplied by `grad_scale`.
        """
        rate = self.learning_rate
        leaves, tree = jax.tree.flatten(params)
        copies = tree.flatten_up_to(copy) if copy is not None else [None] * len(leaves)
        lists = [leaves, *(tree.flatten_up_to(x) for x in (grads, state.m, state.v))]
        new: list[list] = [*map(list, (leaves, *lists[2:], copies))]
        for copied in (True, False):
            at = [i for i, c in enumerate(copies) if (c is not None) == copied]
            if not at:
                continue
            p, g, m, v = ([x[i] for i in at] for x in lists)
            written = adamw_update(
                p,
                g,
                m,
                v,
                state.count + 1,
                learning_rate=rate(state.count) if callable(rate) else rate,
                b1=self.b1,
                b2=self.b2,
                eps=self.eps,
                eps_root=self.eps_root,
                weight_decay=self.weight_decay,
                grad_scale=grad_scale,
                copy=[copies[i] for i in at] if copied else None,
            )
            for place, results in zip(new, written, strict=False):
                for i, result in zip(at, results, strict=True):
                    place[i] = result
        params, m, v, copy = map(tree.unflatten, new)
        return params, copy, Moments(state.count + 1, m, v)
