"""PTX and SASS of Mosaic kernels, as `explain` shows them on a Hopper GPU."""

import os

import jax
import jax.numpy as jnp

from jaxkern import attention, backend, explain
from tests.gpu.truth import on_hopper

pytestmark = on_hopper


def loss(q, k, v):
    return attention(q, k, v, causal=True).astype(jnp.float32).sum()


def test_every_kernel_of_attention_and_its_gradients_has_ptx_and_sass():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 512, 2, 128), jnp.bfloat16)
    environment = dict(os.environ)
    with backend("mosaic_gpu"):
        f = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
        before, _ = f(q, k, v)  # the plugin knows the kernels from here on
        rows = explain(f, q, k, v).rows
        mosaic = [x for row in rows for x in row.launches if hasattr(x, "mlir")]
        assert len({launch.name for launch in mosaic}) > 1
        for launch in mosaic:
            assert ".target sm_90a" in launch.ptx and ".entry" in launch.ptx
            assert "EXIT" in launch.sass
        assert any("wgmma.mma_async" in launch.ptx for launch in mosaic)
        assert any("HGMMA" in launch.sass for launch in mosaic)
    assert dict(os.environ) == environment
    assert f(q, k, v)[0] == before
