"""Values and gradients of an operator in float64, and how far others are from them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from benchmarks._time import device_alone
from jaxkern.primitives.quant.quantized_matmul import QUANTIZED_MATMUL

KEY = jax.random.key(1)


def relative_error(out: Any, truth: Any) -> float:
    """The largest ||out - truth|| / ||truth|| over all results; NaN if one is NaN.

    Of integers the share that differs.
    """
    with jax.enable_x64(True):
        pairs = zip(jax.tree.leaves(out), jax.tree.leaves(truth), strict=True)
        return float(np.max([error_norm(jnp.asarray(y), t) for y, t in pairs]))


@jax.jit
def error_norm(y: jax.Array, truth: jax.Array) -> jax.Array:
    if jnp.issubdtype(y.dtype, jnp.integer):
        return jnp.mean(y != truth, dtype=jnp.float64)

    def norm(x):
        return jnp.sqrt(jnp.sum(x.astype(jnp.float64) ** 2))

    hidden = jnp.isinf(truth) & (y == truth)  # a score of what is not seen
    y, truth = (jnp.where(hidden, 0.0, x.astype(jnp.float64)) for x in (y, truth))
    return norm(y - truth) / norm(truth)


def in_float64(f: Callable, args: tuple) -> Any:
    """`f` of the same numbers in float64, by the reference; packed weights as given."""

    def is_packed(x):
        return isinstance(x, tuple(QUANTIZED_MATMUL))

    def widened(x):
        floating = not is_packed(x) and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(jnp.float64) if floating else x

    with jax.enable_x64(True), jaxkern.backend("xla"):
        return run_alone(f, *jax.tree.map(widened, args, is_leaf=is_packed))


def run_alone(f: Callable, *args: Any) -> Any:
    """Compiled beside other benchmarks, run without them."""
    compiled = jax.jit(f).lower(*args).compile()
    with device_alone():
        return jax.block_until_ready(compiled(*args))


@dataclasses.dataclass
class Truth:
    """Operands, and values and gradients of them in float64."""

    args: tuple
    values: Any
    dy: Any = None
    slopes: Any = None

    @classmethod
    def of(cls, f: Callable, args: tuple, floats: Sequence[int]) -> "Truth":
        values = in_float64(f, args)
        if not floats:
            return cls(args, values)
        with device_alone():
            dy = jax.tree.map(
                lambda v: jax.random.normal(KEY, v.shape, jnp.bfloat16), values
            )
        slope = functools.partial(gradients, f, floats, dy)
        return cls(args, values, dy, in_float64(slope, args))

    def errors(self, f: Callable, floats: Sequence[int]) -> dict[str, float]:
        found = {"error": relative_error(run_alone(f, *self.args), self.values)}
        if floats:
            slope = functools.partial(gradients, f, floats)
            slopes = run_alone(slope, self.dy, *self.args)
            found["gradient error"] = relative_error(slopes, self.slopes)
        return found


def forward_and_pull(f: Callable, floats: Sequence[int]) -> Callable:
    """`(*args) -> (y, pull)`, where `pull` can be passed to another executable."""

    def run(*args):
        def of_floats(*moving):
            full = list(args)
            for i, x in zip(floats, moving, strict=True):
                full[i] = x
            return f(*full)

        return jax.vjp(of_floats, *(args[i] for i in floats))

    return run


def both_passes(f: Callable, floats: Sequence[int], dy: Any, *args: jax.Array) -> Any:
    """As a training step has them: values, then gradients."""
    y, pull = forward_and_pull(f, floats)(*args)
    return y, pull(jax.tree.map(lambda v, c: c.astype(v.dtype), y, dy))


def gradients(f: Callable, floats: Sequence[int], dy: Any, *args: jax.Array) -> Any:
    return both_passes(f, floats, dy, *args)[1]
