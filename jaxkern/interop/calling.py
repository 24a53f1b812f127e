"""How other libraries say which implementation, which precision and which batch."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxkern.lowering.lower import backend
from jaxkern.primitives.declared_dims import unwrapped

# Theirs and ours. What the kernels of a kind refuse XLA runs, as `explain` says.
KINDS = {
    "xla": "xla",
    "xla_chunked": "xla",
    "chunked_xla": "xla",
    "triton": "triton",
    "mosaic": "mosaic_gpu",
    "mosaic_gpu": "mosaic_gpu",
}


def takes_holders[F: Callable](fn: F) -> F:
    """`fn` that also takes what holds an array: an `nnx.Param`, a variable of Keras."""

    @functools.wraps(fn)
    def unwrapping(*args: Any, **kwargs: Any) -> Any:
        named = {name: unwrapped(x) for name, x in kwargs.items()}
        return fn(*map(unwrapped, args), **named)

    return cast(F, unwrapping)


@contextlib.contextmanager
def as_asked(op: str, implementation: Any, precision: Any = None) -> Iterator[None]:
    """Calls in this block, and their gradients, run by that implementation."""
    with contextlib.ExitStack() as stack:
        if implementation is not None:
            stack.enter_context(backend(kind_of(op, implementation)))
        name = precision_name(op, precision)
        if name is not None:
            stack.enter_context(jax.default_matmul_precision(name))
        yield


def kind_of(op: str, implementation: Any) -> str:
    """Our name of an implementation; of several the first."""
    several = isinstance(implementation, tuple | list)
    wanted = implementation if several else (implementation,)
    if not wanted or not all(isinstance(x, str) and x in KINDS for x in wanted):
        raise ValueError(
            f"{op}: `implementation` must be one or several of {sorted(KINDS)}, got "
            f"{implementation!r}. None takes the fastest that runs."
        )
    return KINDS[wanted[0]]


def precision_name(op: str, precision: Any) -> str | None:
    """What `jax.default_matmul_precision` takes, of all that JAX calls a precision."""
    if isinstance(precision, tuple) and len(set(precision)) == 1:
        precision = precision[0]
    if isinstance(precision, jax.lax.Precision):
        return precision.name.lower()
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        return precision.name
    if precision is None or isinstance(precision, str):
        return precision
    raise ValueError(
        f"{op}: `precision` must be None, a name, a `jax.lax.Precision` or a "
        f"`jax.lax.DotAlgorithmPreset`, one for both operands, got {precision!r}."
    )


def one_batch_dim(x: ArrayLike, batch: tuple[int, ...], dims: int) -> Array:
    """`x` `[*batch, ...]` with one dim in the place of batch; 1 where all of it is 1.

    Args:
      x: may lack leading dims and have 1 in the place of any.
      batch: of the result.
      dims: behind the batch.
    """
    x = jnp.asarray(x)
    x = x.reshape((1,) * (len(batch) + dims - x.ndim) + x.shape)
    own, rest = x.shape[: x.ndim - dims], x.shape[x.ndim - dims :]
    if math.prod(own) == 1:
        return x.reshape(1, *rest)
    return jnp.broadcast_to(x, (*batch, *rest)).reshape(-1, *rest)
