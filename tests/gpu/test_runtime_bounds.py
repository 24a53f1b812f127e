"""Limits and fallbacks where memory really ends: on an NVIDIA GPU."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import dequantize, linear
from jaxkern.runtime import (
    BufferPool,
    MemoryLimitExceeded,
    allocated_bytes,
    limited,
    memory_limit,
    policy,
    upload,
    with_oom_fallback,
)
from tests.gpu.full_device import medians, operands, truth
from tests.gpu.truth import on_a_gpu

pytestmark = on_a_gpu


def test_a_full_device_falls_back_to_the_host_and_works_in_parts():
    """In a process with a hundredth of the GPU: the others keep their memory."""
    share = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.01",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "JAX_PLATFORMS": "cuda,cpu",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.full_device"],
        env={**os.environ, **share},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert "both ways on a full device" in done.stdout


def test_results_stay_in_host_memory_of_the_device():
    x, y = operands()
    with memory_limit(allocated_bytes() + (40 << 20)):
        f = with_oom_fallback(medians, to=None, then=("offload",), axis=(0, None))
        out = f(x, y)
    assert out.sharding.memory_kind == "pinned_host"
    assert out.devices() == x.devices()
    np.testing.assert_allclose(out[:16], truth(x, y, slice(0, 16)), rtol=1e-5)


def test_the_limit_refuses_before_anything_runs():
    runs = []

    def seen(x):
        jax.debug.callback(lambda: runs.append(0))
        return jnp.outer(x, x)

    f, x = limited(seen), jnp.arange(4096.0).block_until_ready()
    used = allocated_bytes()
    assert used == jax.devices()[0].memory_stats()["bytes_in_use"] > 0
    with memory_limit(used + (1 << 20)), pytest.raises(MemoryLimitExceeded) as e:
        f(x)
    jax.effects_barrier()
    assert runs == [] and e.value.breakdown["outputs"] == 4096 * 4096 * 4
    with memory_limit(used + e.value.requested + (1 << 20)):
        out = f(x).block_until_ready()
    jax.effects_barrier()
    assert runs == [0] and float(out[3, 5]) == 15
    grown = allocated_bytes() - used
    assert out.nbytes <= grown <= e.value.requested + (1 << 20)


def test_a_refused_step_keeps_its_donated_cache():
    step = limited(jax.jit(lambda c: c.at[0].add(1), donate_argnums=0))
    cache = jnp.zeros((1024, 1024))
    with memory_limit(1), pytest.raises(MemoryLimitExceeded):
        step(cache)
    assert not cache.is_deleted()
    address = cache.unsafe_buffer_pointer()
    with memory_limit(allocated_bytes() + (1 << 20)):  # in place: no room for a second
        out = step(cache)
    assert cache.is_deleted() and out.unsafe_buffer_pointer() == address


def test_the_pool_gives_the_same_memory_zeroed():
    pool, spec = BufferPool(), jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16)
    x = jax.jit(lambda c: c + 1, donate_argnums=0)(pool.acquire(spec))
    address = x.unsafe_buffer_pointer()
    pool.release(x)
    with pytest.raises(RuntimeError, match="deleted"):
        x + 1
    y = pool.acquire(spec)
    assert y.unsafe_buffer_pointer() == address and not y.any()


def test_upload_in_fp8():
    rng = np.random.default_rng(1)
    w = rng.standard_normal((512, 256)).astype(np.float32)
    w[3, 5] = 1e4  # a plain cast is NaN
    params, report = upload({"w": w, "norm": np.ones(256, np.float32)}, policy="fp8")
    packed = params["w"]
    assert report.bytes == w.size + 4 + 256 * 4 and report.skipped == 0
    assert packed.codes.devices() == {jax.devices()[0]}
    np.testing.assert_allclose(packed.scales, [[1e4 / 448]], rtol=1e-6)
    decoded = np.asarray(dequantize(packed))
    assert np.isfinite(decoded).all()
    np.testing.assert_allclose(decoded, w, atol=1e4 / 448 * 2.0**-9, rtol=2.0**-4)
    again, second = upload(params, policy="fp8")
    assert (second.bytes, second.skipped) == (0, 2) and again["w"] is packed
    x = jnp.asarray(rng.standard_normal((8, 256)), jnp.float32)
    with policy("fp8"):
        y = jax.jit(linear)(x, packed)
    exact = np.float64(x.astype(jnp.bfloat16)) @ np.float64(decoded).T
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["f32", "bf16", "f16"])
def test_policies_round_operands_and_sum_in_float32(name):
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((64, 512)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((128, 512)), jnp.float32)
    with policy(name) as chosen:
        y = jax.jit(linear)(x, w)
    exact = (
        np.float64(x.astype(chosen.compute)) @ np.float64(w.astype(chosen.compute)).T
    )
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, exact, rtol=1e-4, atol=1e-3)
