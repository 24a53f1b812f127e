"""The gradient of a large table: two launches, and XLA for small ones."""

import jax
import jax.numpy as jnp
import pytest

from jaxkern import explain
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch import compiled
from jaxkern.primitives.index.embedding import embedding

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
IDS = jnp.zeros((3, 50), jnp.int32)


def gradient(table):
    return jax.grad(lambda t: embedding(IDS, t).astype(jnp.float32).sum())(table)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    "dtype, shape", [(jnp.float32, (70001, 121)), (jnp.bfloat16, (8192, 1024))]
)
def test_kernels_compile_and_fit(capability, dtype, shape):
    with compiling_for(capability):
        *_, row = explain(
            gradient, jax.ShapeDtypeStruct(shape, dtype), platform="cuda"
        ).rows
        assert row.op == "embedding_bwd" and len(row.launches) == 2
        for launch in row.launches:
            assert compiled(launch, capability).asm["cubin"]
            assert launch.stack_bytes == 0
            assert launch.shared_bytes <= bridge.max_shared_bytes()


def test_a_small_table_is_left_to_xla():
    *_, row = explain(gradient, jnp.ones((100, 64)), platform="cuda").rows
    assert row.runs.startswith("xla") and "fewer than" in row.refused[0]
