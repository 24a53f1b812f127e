"""Results and gradients of a delta rule against its chunk form in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern import backend
from tests.gpu.truth import EPSILON, poison, relative_errors

NAMES = ("out", "state", "dquery", "dkey", "dvalue", "dg", "dbeta", "dinitial")


def draw(decays, b, t, k, n, h, hv, dtype, state=True, seed=0):
    """Keys of length one, as models have them; g is -`decays(rng, b, t, n, h)`."""
    rng = np.random.default_rng(seed)

    def unit(*shape):
        x = rng.standard_normal(shape)
        return jnp.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True), dtype)

    value = jnp.asarray(rng.standard_normal((b, t, n, hv)), dtype)
    g = jnp.asarray(-decays(rng, b, t, n, h), jnp.float32)
    beta = jnp.asarray(rng.uniform(0, 1, (b, t, n)), jnp.float32)
    operands = [unit(b, t, k, h), unit(b, t, k, h), value, g, beta]
    if state:
        operands.append(jnp.asarray(rng.standard_normal((b, n, h, hv)), jnp.float32))
    return operands


def both(rule, dout, dstate, *operands):
    """Results and gradients."""
    y, pull = jax.vjp(lambda *a: rule(*a), *operands)
    return *y, *pull((dout.astype(y[0].dtype), dstate.astype(y[1].dtype)))


def check(rule, operands, slack=1.0):
    """All results and gradients, relative errors in roundings of the dtype.

    Matrix units take the states in the dtype of keys: what this rounding of the states
    that were given does to the exact results is allowed beside.
    """
    rng = np.random.default_rng(9)
    value, (b, *_, h) = operands[2], operands[1].shape
    dtype, (n, hv) = value.dtype, value.shape[2:]
    dout = jnp.asarray(rng.standard_normal(value.shape), dtype)
    dstate = jnp.asarray(rng.standard_normal((b, n, h, hv)), jnp.float32)
    run = functools.partial(both, rule)
    poison(*operands)
    with backend("triton", strict=True):
        found = jax.jit(run)(dout, dstate, *operands)
    with jax.enable_x64(True), backend("xla"):
        wide = [x.astype(jnp.float64) for x in (dout, dstate, *operands)]
        truth = jax.jit(run)(*wide)
        for i in (1, *range(7, len(wide))):
            wide[i] = wide[i].astype(dtype).astype(jnp.float64)
        rounded = relative_errors(jax.jit(run)(*wide), truth, 1e-3)
    errors = relative_errors(found, truth, 1e-3)
    for name, error, allowed in zip(NAMES, errors, rounded, strict=False):
        assert error < slack * EPSILON[dtype.name] + allowed, (name, error, allowed)
    return found
