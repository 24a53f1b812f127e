"""A vmap over sequences as more sequences of one launch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def over_sequences(
    launch: Callable,
    caches: Sequence[int],
    shared: Sequence[int],
    *operands: jax.Array | None,
    **options: Any,
) -> tuple:
    """`launch`, where a vmap over sequences makes more sequences, not more launches.

    Args:
      launch: takes operands, the query first, and options; returns arrays.
      caches: operands that are too large to be copied for each sequence.
      shared: operands without a dim of sequences.
    """
    run = custom_vmap(functools.partial(launch, **options))
    again = functools.partial(over_sequences, launch, caches, shared, **options)

    @run.def_vmap
    def batch(size, mapped, *operands):
        own = all(mapped[i] or operands[i] is None for i in caches)
        if mapped[0] and own and not any(mapped[i] for i in shared):

            def fold(i, x):
                if x is None or i in shared:
                    return x
                x = x if mapped[i] else jnp.broadcast_to(x, (size, *x.shape))
                return x.reshape(-1, *x.shape[2:])

            out = again(*(fold(i, x) for i, x in enumerate(operands)))
            out = tuple(y.reshape(size, -1, *y.shape[1:]) for y in out)
            return out, (True,) * len(out)

        def one(moving):
            both = zip(moving, operands, strict=True)
            return again(*(x if m is None else m for m, x in both))

        moving = [x if m else None for x, m in zip(operands, mapped, strict=True)]
        out = jax.lax.map(one, moving)
        return out, (True,) * len(out)

    return run(*operands)
