"""Sampling in clusters of Hopper's multiprocessors, on a machine without a GPU."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxkern import explain, sample
from jaxkern.gpu.device import compiling_for
from jaxkern.pallas.mosaic_launch import MosaicLaunch
from jaxkern.pallas.sampling.sample import plan as plans
from jaxkern.pallas.sampling.sample.fwd import slower, unsupported

KEY = jax.eval_shape(jax.random.key, 0)


def test_in_the_interpreter():
    """16 threads wait for each other, so the runtime needs as many."""
    subprocess.run(
        [sys.executable, "-m", "tests.pallas.interpreted_sampling"],
        env=os.environ | {"NPROC": "32", "JAX_PLATFORMS": "cpu"},
        check=True,
        timeout=300,
    )


@pytest.mark.parametrize("v", [640, 32000, 50304, 128256, 151936, 262144])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("n", [1, 32, 4096])
def test_a_plan_covers_each_row(monkeypatch, n, v, dtype):
    monkeypatch.setattr(plans, "num_sms", lambda: 132)
    c = plans.plan(n, v, dtype)
    assert c is not None
    warps, lines, width = c.held
    assert c.cluster * warps * lines >= c.lines
    assert c.lines * width == v
    assert warps * lines * width * jnp.dtype(dtype).itemsize <= plans.SHARED
    # the weights of a copy of a bin
    assert warps * lines * width // plans.COPIES * 2**c.fixed <= 2**31


@pytest.mark.parametrize(
    "rows, v, dtype, cluster",
    [
        (32, 128_256, jnp.float32, 8),
        (32, 128_256, jnp.bfloat16, 8),
        (256, 32_000, jnp.float32, 2),
    ],
)
def test_it_lowers_for_hopper(rows, v, dtype, cluster):
    def f(logits, key):
        return sample(logits, key, top_p=0.9, min_p=0.01)

    logits = jax.ShapeDtypeStruct((rows, v), dtype)
    with compiling_for(90):
        [row] = explain(f, logits, KEY, platform="cuda").rows
        [launch] = row.launches
        assert isinstance(launch, MosaicLaunch)
        assert launch.cluster == (cluster,)
        # three of them share a multiprocessor: some clusters would wait otherwise
        assert launch.shared_bytes + 1024 <= 228 * 1024 // 3
        lowered = jax.jit(f).trace(logits, KEY).lower(lowering_platforms=("cuda",))
        assert "@mosaic_gpu" in lowered.as_text()


def test_what_it_refuses():
    rows = jax.ShapeDtypeStruct((32, 128_256), jnp.float32)
    odd = jax.ShapeDtypeStruct((32, 128_257), jnp.float32)
    long = jax.ShapeDtypeStruct((32, 2**20), jnp.float32)
    p = jax.ShapeDtypeStruct((32,), jnp.float32)
    with compiling_for(90):
        assert unsupported(logits=rows, top_k=None, top_p=p) is None
        for logits, top_k, top_p, why in (
            (rows, p, p, "`top_k` is Triton's"),
            (rows, None, None, "without `top_p`"),
            (odd, None, p, "no multiple of 64"),
            (long, None, p, "no cluster of 8 holds"),
        ):
            assert why in str(unsupported(logits=logits, top_k=top_k, top_p=top_p))
    short = jax.ShapeDtypeStruct((32, 4096), jnp.float32)
    assert "less than 8192" in str(slower(logits=short))
    assert slower(logits=rows) is None
    with compiling_for(80):
        found = unsupported(logits=rows, top_k=None, top_p=p)
        assert "not 90" in str(found)
