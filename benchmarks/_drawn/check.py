"""Whether the results of a draw are right: against float64, as the tests have it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._drawn.draw import EPSILON, Draw
from benchmarks._gpu import under_backend
from benchmarks._truth import KEY, both_passes, in_float64, run_alone

LEAST = 1e-2  # size of numbers below which terms cancel


def wrong_results(draw: Draw, args: tuple, floats: Sequence[int]) -> str:
    """What is wrong with our values and gradients, or "".

    Relative errors stay below `draw.slack` roundings of the operands' dtype, or 1.5
    times those of XLA.
    """
    if draw.check is not None:
        return failed_check(draw.check, args, run_alone(draw.f, *args))
    run, operands = of_passes(draw.f, args, floats), args
    if floats:
        operands = (cotangents(draw.f, args), *args)
    truth = in_float64(run, operands)
    errors = distances(run_alone(run, *operands), truth)
    limits = [limit_of(draw, y, args) for y in jax.tree.leaves(truth)]
    if all(e <= most for e, most in zip(errors, limits, strict=True)):
        return ""
    plain = run_alone(of_passes(under_backend("xla", draw.f), args, floats), *operands)
    said = []
    theirs = distances(plain, truth)
    for i, (e, most, its) in enumerate(zip(errors, limits, theirs, strict=True)):
        if not e <= max(most, 1.5 * its):
            said.append(f"result {i}: {e:.1e}, allowed {most:.1e}, by XLA {its:.1e}")
    return "; ".join(said)


def of_passes(f: Callable, args: tuple, floats: Sequence[int]) -> Callable:
    """Values, or with cotangents before the operands values and gradients."""
    return functools.partial(both_passes, f, floats) if floats else f


def cotangents(f: Callable, args: tuple) -> Any:
    """Random, in bfloat16 and so the same numbers in any dtype."""
    return jax.tree.map(
        lambda y: jax.random.normal(KEY, y.shape, jnp.bfloat16),
        jax.eval_shape(f, *args),
    )


def failed_check(check: Callable, args: tuple, results: Any) -> str:
    try:
        check(args, results)
    except AssertionError as error:
        return str(error).strip()[:200] or "its own check fails"
    return ""


def limit_of(draw: Draw, result: Any, args: tuple) -> float:
    if jnp.issubdtype(result.dtype, jnp.integer):
        return draw.differing
    dtypes = {str(x.dtype) for x in jax.tree.leaves(args)}
    return draw.slack * max(EPSILON[d] for d in dtypes & EPSILON.keys())


def distances(found: Any, truth: Any) -> list[float]:
    """Of every result."""
    with jax.enable_x64(True):
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True)
        return [float(distance(jnp.asarray(y), t)) for y, t in pairs]


@jax.jit
def distance(y: jax.Array, truth: jax.Array) -> jax.Array:
    """||y - truth|| / ||truth||, or of numbers of LEAST; of integers the share that
    differs. Infinite where one is not finite and the other is."""
    if jnp.issubdtype(y.dtype, jnp.integer):
        return jnp.mean(y != truth, dtype=jnp.float64)
    y, finite = y.astype(jnp.float64), jnp.isfinite(truth)
    same = jnp.all(jnp.where(finite, jnp.isfinite(y), y == truth))
    off = jnp.linalg.norm(jnp.where(finite, y - truth, 0).ravel())
    size = jnp.linalg.norm(jnp.where(finite, truth, 0).ravel())
    least = LEAST * max(truth.size, 1) ** 0.5
    return jnp.where(same, off / jnp.maximum(size, least), jnp.inf)
