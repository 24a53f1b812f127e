"""A Pallas Mosaic GPU kernel under the rules, on a machine without a GPU.

It runs in interpret mode under jit, vmap and shard_map, and partitioned modules lower
for CUDA with the kernel in them.
"""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import explain, rms_norm
from jaxkern.lowering.lower import lower
from jaxkern.primitives.call import Call
from jaxkern.primitives.norm.rms_norm import rms_norm_bwd_reference, rms_norm_p
from jaxkern.testing import checks

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("mosaic_rows")]

BLOCK_ROWS = 64  # rows of one WGMMA register tile
X = jnp.linspace(-1.0, 2.0, 4 * 64 * 128).reshape(4, 64, 128)
WEIGHT = jnp.linspace(0.5, 1.5, 128)


def rms_norm_fwd_kernel(x_ref, weight_ref, y_ref, rstd_ref, *, eps):
    rows = pl.ds(lax.axis_index("rows") * BLOCK_ROWS, BLOCK_ROWS)
    wgmma = plgpu.Layout.WGMMA
    x = plgpu.load(x_ref.at[rows], layout=wgmma, optimized=False)  # [64, d]
    weight = plgpu.load(weight_ref, layout=wgmma.reduce(0), optimized=False)  # [d]
    rstd = lax.rsqrt(jnp.sum(x * x, axis=1) / x.shape[1] + eps)  # [64]
    scaled = x * lax.broadcast_in_dim(rstd, x.shape, [0])
    y_ref[rows] = scaled * lax.broadcast_in_dim(weight, x.shape, [1])
    rstd_ref[rows] = rstd


def rms_norm_fwd(x, weight, bias, *, eps, offset, interpret=False):
    del bias, offset
    rows = x.reshape(-1, x.shape[-1])
    y, rstd = plgpu.kernel(
        functools.partial(rms_norm_fwd_kernel, eps=eps),
        out_type=(
            jax.ShapeDtypeStruct(rows.shape, x.dtype),
            jax.ShapeDtypeStruct(rows.shape[:1], jnp.float32),
        ),
        grid=(rows.shape[0] // BLOCK_ROWS,),
        grid_names=("rows",),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(rows, weight)
    return y.reshape(x.shape), rstd.reshape(*x.shape[:-1], 1)


def unsupported(x, weight=None, bias=None, offset=0.0, **_):
    if weight is None or bias is not None or offset:
        return "only a weight is written"
    if {x.dtype.name, weight.dtype.name} != {"float32"}:
        return "only float32 is written"
    rows = x.size // x.shape[-1]
    return f"{rows} rows are no multiple of 64" if rows % BLOCK_ROWS else None


@pytest.fixture
def mosaic_rows():
    with checks.own_rows(rms_norm_p):
        lower(
            rms_norm_p,
            "cuda",
            "mosaic_gpu",
            fwd=rms_norm_fwd,
            bwd=rms_norm_bwd_reference,
            unsupported=unsupported,
        )
        yield
    jax.clear_caches()


def interpreted(x, weight, *, vmaps=()):
    """What a lowering runs on one device, in the interpreter.

    The interpreter orders its callbacks by an effect, which no lowering of a pure
    primitive may have; so the kernel is called where the lowering would call it.
    """
    kernel = functools.partial(rms_norm_fwd, interpret=True)
    call = Call(absent=(2,), vmaps=vmaps)
    fwd = rms_norm_p.fwd
    y, _ = fwd.evaluate_with(kernel, x, weight, call=call, eps=1e-6, offset=0.0)
    return y


def truth(x, weight):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(weight)


def cuda_text(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_interpreted_kernel_under_jit_and_recorded_vmap():
    y = jax.jit(interpreted)(X, WEIGHT)
    np.testing.assert_allclose(y, truth(X, WEIGHT), rtol=1e-5)
    weights = jnp.stack([WEIGHT, 2 * WEIGHT, WEIGHT, WEIGHT])
    y = interpreted(X, weights, vmaps=((0, 0),))
    np.testing.assert_allclose(y, truth(X, weights[:, None]), rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_interpreted_kernel_under_shard_map(check_vma):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(
        interpreted,
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    np.testing.assert_allclose(jax.jit(f)(X, WEIGHT), truth(X, WEIGHT), rtol=1e-5)


def test_explain_names_the_kernel_for_cuda_and_its_refusals():
    assert "runs mosaic_gpu: " in str(explain(rms_norm, X, WEIGHT, platform="cuda"))
    refused = explain(rms_norm, X[:, :63], WEIGHT, platform="cuda")
    assert "252 rows are no multiple of 64" in str(refused)


def test_kernel_lowers_for_cuda_without_a_gpu():
    assert cuda_text(rms_norm, X, WEIGHT).count("@mosaic_gpu") == 1
    grad = jax.grad(lambda x, w: rms_norm(x, w).sum(), (0, 1))
    assert cuda_text(grad, X, WEIGHT).count("@mosaic_gpu") == 1  # the fwd kernel
    assert "mosaic_gpu" in cuda_text(jax.vmap(rms_norm, (0, None)), X, WEIGHT)


def test_sharded_module_lowers_for_cuda_with_its_rule():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    text = cuda_text(rms_norm, x, WEIGHT)
    assert "CustomSPMDPartitioning" in text
    assert "sdy.sharding_rule" in text and "need_replication" in text


def test_module_under_shard_map_lowers_for_cuda_on_shards():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(
        rms_norm, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
    )
    text = cuda_text(f, X, WEIGHT)
    assert "@mosaic_gpu" in text and "tensor<64x128xf32>" in text  # 1 of 4 blocks


def test_explicitly_sharded_module_lowers_for_cuda_on_shards():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("data", None, None))
        text = cuda_text(rms_norm, x, WEIGHT)
    assert "@mosaic_gpu" in text and "tensor<64x128xf32>" in text


def test_module_with_the_kernel_is_exported():
    exported = jax.export.export(jax.jit(rms_norm), platforms=("cuda",))(X, WEIGHT)
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
    assert "mosaic_gpu" in again.mlir_module()
