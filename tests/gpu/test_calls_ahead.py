"""Kernels of Mosaic that were compiled ahead are there when a function is compiled."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from jaxkern import attention, backend
from jaxkern.lowering.calls_ahead import CallsAhead
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
