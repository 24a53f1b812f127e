"""Kernels of Mosaic that were compiled ahead are there when a function is compiled."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import attention, backend
from jaxkern.lowering.calls_ahead import CallsAhead, calls_compiled_ahead
from jaxkern.pallas.mosaic_assembly import environment, forget_hash, mosaic_calls
from tests.gpu.truth import on_hopper

pytestmark = on_hopper


@pytest.mark.parametrize("ahead", [True, False])
def test_the_plugin_compiles_no_kernel_that_it_knows(ahead, tmp_path):
    """It writes each that it compiles, and none that it has met by its hash."""
    x = jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.bfloat16)
    with backend("mosaic_gpu"):
        lowered = jax.jit(lambda q: attention(q, q, q, causal=True)).lower(x)
    calls = mosaic_calls(lowered.compiler_ir())
    for call in calls:
        forget_hash(call)
    assert calls
    if ahead:
        with ThreadPoolExecutor(1) as workers:
            CallsAhead(workers).begin(lowered)
    with environment(MOSAIC_GPU_DUMP_TO=str(tmp_path)):
        lowered.compile()
    assert any(tmp_path.glob("*.ptx")) is not ahead


def test_a_kernel_that_was_lowered_first_gives_the_same():
    q = jax.random.normal(jax.random.key(0), (1, 512, 2, 128), jnp.bfloat16)

    def f(q):
        y = attention(q, q, q, causal=True)
        return attention(y, q, q, causal=True)

    with backend("mosaic_gpu"):
        expected = jax.jit(lambda q: f(q))(q)
        traced = jax.jit(f).trace(q)
        with calls_compiled_ahead() as ahead:
            ahead.lower_mosaic(traced.jaxpr)
            assert ahead.begun
            found = ahead.begin(traced.lower()).compile()(q)
    np.testing.assert_array_equal(found, expected)
