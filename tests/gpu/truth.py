"""Kernels on a GPU against their references in float64, memory poisoned first."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend
from jaxkern.gpu.device import device_capability
from jaxkern.lowering.explain import default_platform

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(default_platform() != "cuda", reason="no NVIDIA GPU here"),
]
on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        default_platform() != "cuda" or device_capability() != 90,
        reason="no Hopper GPU here",
    ),
]
EPSILON = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}


def poison(*like):
    """Leaves NaN in the memory that the next results are likely to take."""
    junk = [jnp.full(x.shape, jnp.nan, x.dtype) for x in like for _ in range(3)]
    jax.block_until_ready(junk)


def check_against_float64(
    f, *operands, slack=1.0, least=1e-2, kernels="triton", strict=True
):
    """Values and gradients by kernels against the reference in float64 on the CPU.

    Errors, relative to the result or to `least` where terms of that size cancel (one
    number, or one for each value and gradient), stay below `slack` roundings of the
    dtype or 1.5 times those of XLA.
    """
    # a seed of its own: where dy is x, the gradients of norms cancel
    rng = np.random.default_rng(2718)
    shapes = as_tuple(jax.eval_shape(f, *operands))
    cotangents = [jnp.asarray(rng.standard_normal(s.shape), s.dtype) for s in shapes]

    def run(cotangents, *xs):
        y, pull = jax.vjp(lambda *a: as_tuple(f(*a)), *xs)
        return y, pull(
            tuple(c.astype(v.dtype) for c, v in zip(cotangents, y, strict=True))
        )

    poison(*operands)
    with backend(kernels, strict=strict):
        found = jax.jit(run)(cotangents, *operands)
    cpu = jax.devices("cpu")[0]
    with jax.enable_x64(True), backend("xla"), jax.default_device(cpu):
        truth = jax.jit(run)(
            *jax.tree.map(lambda x: np.asarray(x, np.float64), (cotangents, *operands))
        )
    limit = slack * EPSILON[operands[0].dtype.name]
    errors = relative_errors(found, truth, least)
    if max(errors) >= limit:  # a cancellation costs the reference as many digits
        with backend("xla"):
            plain = jax.jit(run)(cotangents, *operands)
        plain = relative_errors(plain, truth, least)
        for y, error, its in zip(jax.tree.leaves(found), errors, plain, strict=True):
            assert error < max(limit, 1.5 * its), (y.shape, error, its)


def relative_errors(found, truth, least):
    """Of every result; `least` of all of them or of each."""
    found, truth = jax.tree.leaves(found), jax.tree.leaves(truth)
    each = [least] * len(truth) if np.isscalar(least) else least
    return [relative_error(*x) for x in zip(found, truth, each, strict=True)]


def relative_error(y, truth, least=1e-2):
    """||y - truth|| / ||truth||, or of numbers of size `least` if those are smaller.

    What is not finite must be the same, and does not count. A NaN elsewhere fails here:
    among other errors `max` would lose it.
    """
    y, truth = np.asarray(y, np.float64), np.asarray(truth, np.float64)
    assert y.shape == truth.shape
    if not y.size:
        return 0.0
    finite = np.isfinite(truth)
    np.testing.assert_array_equal(y[~finite], truth[~finite])
    y, truth = y[finite], truth[finite]
    assert not np.isnan(y).any()
    size = max(np.linalg.norm(truth), least * truth.size**0.5)
    return np.linalg.norm(y - truth) / size


def as_tuple(y):
    return y if isinstance(y, tuple) else (y,)


def seconds_a_kernel(chain, x, kernels=100):
    """The least time of a launch among so many in one jit, one behind the other."""
    run = jax.jit(chain)
    run(x).block_until_ready()
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(10):
            y = run(x)
        y.block_until_ready()
        times.append((time.perf_counter() - begin) / (10 * kernels))
    return min(times)
