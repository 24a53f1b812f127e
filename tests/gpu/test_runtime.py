"""What of the runtime only a GPU shows: CUDA graphs, kernel times, PTX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, rms_norm, runtime
from jaxkern.runtime.plan.kernel_cache import KernelCache
from tests.gpu.truth import on_a_gpu

pytestmark = on_a_gpu
X = jax.random.normal(jax.random.key(0), (64, 1024), jnp.float32)
WEIGHT = jnp.linspace(0.5, 1.5, 1024)
W = jax.random.normal(jax.random.key(1), (1024, 1024), jnp.float32) / 32


def chain(x, w):
    """Products that keep elementwise work and reductions apart: many launches."""
    for _ in range(6):
        x = jnp.tanh(x @ w)
        x = x / jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    return x


@pytest.fixture(scope="module")
def plan():
    return runtime.compile(chain, X, W)


def test_instructions_and_values(plan):
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(plan(X, W), chain(X, W), rtol=0.05, atol=0.05)
    assert plan.platform == "gpu"
    found = plan.instructions()
    print(plan.report())
    print(plan)
    assert len(found) == len(plan) >= 12
    # six products, whatever runs them: a library or a Triton fusion of XLA
    products = [i for i in found if (i.flops or 0) >= 2 * 64 * 1024 * 1024]
    assert len(products) == 6
    assert all(i.bytes >= 4 * (64 * 1024 + 1024 * 1024) for i in products)


def test_command_buffers_are_counted(plan):
    report = plan.command_buffer_report()
    print(report)
    assert report.sizes, report.note
    assert report.inside >= 5
    off = runtime.compile(chain, X, W, command_buffers="off")
    none = off.command_buffer_report()
    print(none, none.outside)
    assert not none.sizes and sum(none.outside.values()) >= 12
    everything = runtime.compile(chain, X, W, command_buffers="all")
    print(everything.command_buffer_report())
    assert everything.command_buffer_report().share >= report.share
    np.testing.assert_allclose(off(X, W), everything(X, W), rtol=0.05, atol=0.05)


def test_memory_has_an_arena(plan):
    memory = plan.memory()
    print(memory)
    assert memory.why_no_arena is None, memory.why_no_arena
    assert memory.arguments >= 4 * (64 * 1024 + 1024 * 1024)
    assert memory.allocations and memory.peak >= 0
    for a in memory.allocations:
        for n, p in enumerate(a.buffers):
            for q in a.buffers[n + 1 :]:
                apart = p.offset + p.size <= q.offset or q.offset + q.size <= p.offset
                assert apart or p.last <= q.first or q.last <= p.first, (p, q)


def test_profile_rows_have_times(plan):
    profile = plan.profile(X, W, calls=3)
    print(profile)
    print(profile.limits)
    assert profile.note == "" and profile.rows
    assert all(row.seconds > 0 for row in profile.rows)
    listed = {i.name for i in plan.instructions()}
    named = [row for row in profile.rows if row.name in listed]
    assert len(named) >= 0.5 * len(profile.rows), [row.name for row in profile.rows]
    assert sum(row.seconds for row in profile.rows) < 3 * profile.seconds
    assert profile.limits.bytes_per_second > 1e12
    assert profile.timeline


def test_dispatch_overhead(plan):
    seconds = plan.dispatch_overhead(X, W)
    print(f"dispatch overhead: {seconds * 1e6:.1f} us")
    assert 1e-6 < seconds < 1e-3


def test_kernel_cache_shows_the_triton_kernel(tmp_path):
    cache = KernelCache(tmp_path / "cache")
    with backend("triton", strict=True):
        kernel = cache.get_or_compile(rms_norm, X, WEIGHT)
    np.testing.assert_allclose(
        kernel(X, WEIGHT),
        X * jax.lax.rsqrt(jnp.mean(X * X, -1, keepdims=True) + 1e-6) * WEIGHT,
        rtol=1e-4,
        atol=1e-5,
    )
    (launch,) = kernel.launches
    print(launch.name, launch.grid, launch.num_warps, launch.capability)
    assert "norm" in launch.name
    assert kernel.global_size == launch.grid and launch.grid[0] >= 1
    assert kernel.local_size == (32 * launch.num_warps, 1, 1)
    assert ".entry" in kernel.source("ptx") and launch.name in kernel.source("ptx")
    assert "tt.func" in kernel.source("ttir")
    assert kernel.device == "gpu:0"
    (row,) = [i for i in kernel.program.instructions() if i.kernel]
    assert launch.name in (row.kernel or "")
    # x, weight and y, and the saved statistic of each row
    assert 0 <= row.bytes - 4 * (2 * X.size + WEIGHT.size) <= 8 * len(X)
    with backend("triton", strict=True):
        again = KernelCache(tmp_path / "cache").get_or_compile(rms_norm, X, WEIGHT)
    print("read from the folder:", again.from_disk)
    np.testing.assert_array_equal(again(X, WEIGHT), kernel(X, WEIGHT))
    profile = kernel.program.profile(X, WEIGHT, calls=3)
    print(profile)
    assert profile.rows


def test_saved_plans(tmp_path):
    pytest.importorskip("flatbuffers")  # jax.export needs it to serialise
    path = tmp_path / "chain.plan"
    plan = runtime.compile(chain, X, W)
    plan.save(path)
    loaded = runtime.load(path)
    np.testing.assert_allclose(loaded(X, W), plan(X, W), rtol=0.05, atol=0.05)
    fast = runtime.load(path, trusted=True, machine_code=True)
    np.testing.assert_array_equal(fast(X, W), plan(X, W))
    with backend("triton", strict=True):
        own = runtime.compile(rms_norm, X, WEIGHT)
    own.save(path)
    with pytest.raises(ValueError, match="calls code outside XLA: triton_kernel_call"):
        runtime.load(path)
    again = runtime.load(path, trusted=True)
    np.testing.assert_array_equal(again(X, WEIGHT), own(X, WEIGHT))
