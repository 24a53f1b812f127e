"""A Pallas Mosaic GPU kernel under the rules, on a machine without a GPU.

It runs in interpret mode under jit, vmap and shard_map, and partitioned modules lower
for CUDA with the kernel in them.
"""

import functools

import jax
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
from jaxkern.primitives.norm.rms_norm import rms_norm_bwd_reference, rms_norm_p

pytestmark = pytest.mark.smoke

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


def rms_norm_fwd(x, weight, bias, *, eps, offset, interpret):
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
    rows = x.size // x.shape[-1]
    return f"{rows} rows are no multiple of 64" if rows % BLOCK_ROWS else None


@pytest.fixture(autouse=True)
def mosaic_rows():
    family = [rms_norm_p, rms_norm_p.fwd, rms_norm_p.bwd]
    before = [dict(q.rows) for q in family]
    for q in family:
        q.rows.clear()
    for platform, interpret in (("cpu", True), ("cuda", False)):
        lower(
            rms_norm_p,
            platform,
            "mosaic_gpu",
            fwd=functools.wraps(rms_norm_fwd)(
                functools.partial(rms_norm_fwd, interpret=interpret)
            ),
            bwd=rms_norm_bwd_reference,
            unless=unsupported,
        )
    yield
    for q, rows in zip(family, before, strict=True):
        q.rows.clear()
        q.rows.update(rows)
    jax.clear_caches()


def truth(x, weight):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(weight)


def cuda_text(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_interpreted_kernel_under_jit_vmap_and_grad():
    assert "mosaic_gpu" in str(explain(rms_norm, X, WEIGHT))
    expected = truth(X, WEIGHT)
    np.testing.assert_allclose(jax.jit(rms_norm)(X, WEIGHT), expected, rtol=1e-5)
    weights = jnp.stack([WEIGHT, 2 * WEIGHT, WEIGHT, WEIGHT])
    per_weight = jax.vmap(rms_norm)(X, weights)
    np.testing.assert_allclose(per_weight, truth(X, weights[:, None]), rtol=1e-5)
    gradient = jax.grad(lambda w: rms_norm(X, w).sum())(WEIGHT)
    np.testing.assert_allclose(gradient, truth(X, 1).sum((0, 1)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("check_vma", [True, False])
def test_interpreted_kernel_under_shard_map(check_vma):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(
        rms_norm,
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    np.testing.assert_allclose(jax.jit(f)(X, WEIGHT), truth(X, WEIGHT), rtol=1e-5)


def test_kernel_lowers_for_cuda_without_a_gpu():
    text = cuda_text(rms_norm, X, WEIGHT)
    assert "mosaic_gpu" in text and "rsqrt" not in text.split("backend_config")[0]


def test_sharded_module_lowers_for_cuda_with_its_rule():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    text = cuda_text(rms_norm, x, WEIGHT)
    assert "CustomSPMDPartitioning" in text
    assert "sdy.sharding_rule" in text and "need_replication" in text


def test_explicitly_sharded_module_lowers_for_cuda_on_shards():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("data", None, None))
        text = cuda_text(rms_norm, x, WEIGHT)
    assert "mosaic_gpu" in text and "tensor<64x128xf32>" in text  # one of four blocks
