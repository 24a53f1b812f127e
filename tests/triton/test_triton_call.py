"""Triton kernels on a machine without a GPU: they compile, fit and are explained."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxkern import backend, explain, rms_norm
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.triton_call import triton_call

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
X = jnp.ones((4, 4096), jnp.bfloat16)
WEIGHT = jnp.ones(4096, jnp.bfloat16)


def launches_of(f, *args):
    rows = explain(f, *args, platform="cuda").rows
    return [launch for row in rows for launch in row.launches]


@pytest.mark.smoke
def test_explain_names_kernel_sizes_registers_and_shared_memory():
    text = str(explain(rms_norm, X, WEIGHT, platform="cuda"))
    assert "rms_norm on cuda runs triton: triton.norm.rms_norm.rms_norm\n" in text
    assert "long_row_norm_fwd_kernel: 4 programs of 8 warps" in text
    assert "BLOCK=4096" in text and "registers" in text and "B shared" in text
    [launch] = launches_of(rms_norm, X, WEIGHT)
    assert "tt.load" in launch.ttir and "ld.global" in launch.ptx
    assert "LDG" in launch.sass


def test_loads_are_sixteen_bytes_wide():
    [launch] = launches_of(rms_norm, X, WEIGHT)
    assert "LDG.E.128" in launch.sass or "LDG.E.EF.128" in launch.sass


@pytest.mark.smoke
def test_kernels_are_in_the_module_for_cuda():
    f = jax.jit(jax.grad(lambda x, w: rms_norm(x, w).sum(), (0, 1)))
    text = f.trace(X, WEIGHT).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call_ffi") == 2


def test_kernels_lower_inside_shard_map_with_checked_axes():
    mesh = jax.make_mesh((2,), ("m",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P("m"), P()), "out_specs": P("m")}
    f = jax.jit(jax.shard_map(rms_norm, mesh=mesh, **specs))
    text = f.trace(X, WEIGHT).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call_ffi") == 1


def test_vmap_of_rows_is_one_launch():
    batched = jax.vmap(rms_norm, (0, None))
    [launch] = launches_of(batched, jnp.ones((3, 4, 4096), jnp.bfloat16), WEIGHT)
    assert launch.grid == (12,)


def test_float64_is_refused_in_words():
    with jax.enable_x64(True):
        x = jnp.ones((2, 8), jnp.float64)
        assert "`x` is float64" in str(explain(rms_norm, x, platform="cuda"))


def test_only_wanted_gradients_are_written():
    def dx(x):
        return jax.grad(lambda x: rms_norm(x, WEIGHT).astype(jnp.float32).sum())(x)

    *_, launch = launches_of(dx, X)
    assert dict(launch.constants)["dweight_ptr"] is None


@bridge.jit
def add_one_kernel(x_ptr, y_ptr, N: bridge.tl.constexpr):
    i = bridge.tl.arange(0, N)
    bridge.tl.store(y_ptr + i, bridge.tl.load(x_ptr + i) + 1)


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="add_one_kernel takes pointers"):
        call = functools.partial(
            triton_call, add_one_kernel, out=[X[0]], grid=(1,), BLOCK=4096
        )
        jax.jit(call).trace(X[0]).lower(lowering_platforms=("cuda",))


def test_nothing_to_do_gives_zeros():
    [y] = triton_call(add_one_kernel, X[:0], out=[X[:0]], grid=(0,), N=1)
    np.testing.assert_array_equal(y, X[:0])


def test_a_strict_backend_runs_the_kernel():
    with backend("triton", strict=True):
        [row] = explain(rms_norm, X, WEIGHT, platform="cuda").rows
    assert row.runs.startswith("triton: ")


@pytest.mark.parametrize("check_vma", [True, False])
def test_kernels_lower_under_shard_map(check_vma):
    mesh = jax.make_mesh((2,), ("m",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P("m"), P()), "out_specs": P("m")}
    f = jax.shard_map(rms_norm, mesh=mesh, check_vma=check_vma, **specs)
    lowered = jax.jit(f).trace(X, WEIGHT).lower(lowering_platforms=("cuda",))
    assert "@triton_kernel_call_ffi" in lowered.as_text()
