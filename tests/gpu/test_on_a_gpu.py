"""What needs an NVIDIA GPU: every op there, and a Mosaic GPU kernel under the rules."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern  # noqa: F401  (declares the ops)
from jaxkern import backend, explain, rms_norm
from jaxkern.testing import checks, sharding_checks, transform_checks
from jaxkern.testing.check_op import is_small
from tests.cases import cases_of
from tests.gpu.truth import on_a_gpu, seconds_a_kernel
from tests.lowering.test_mosaic_gpu import WEIGHT, X, truth
from tests.test_every_op import OPS

pytestmark = on_a_gpu

# Tensor cores do not add products of 8 bits in float32: 1e-4 of y on an H200, in ulps.
SUMMED_IN_FEWER_DIGITS = {"linear_fp8": 2e-4 * 2**23}


@pytest.mark.parametrize("p", OPS, ids=lambda p: p.name)
def test_values_and_gradients_on_the_gpu(p):
    for case in cases_of(p):
        if case.full:
            continue
        if ulps := SUMMED_IN_FEWER_DIGITS.get(p.name):
            case = dataclasses.replace(case, ulps=ulps)
        with jax.default_matmul_precision("highest"):
            checks.check_values(p, case)
            if is_small(p, case):
                transform_checks.check_gradients(p, case)
                transform_checks.check_vmap(p, case)


def test_mosaic_kernel_values_vmap_and_gradients(mosaic_rows):
    with backend("mosaic_gpu", strict=True):
        assert "runs mosaic_gpu" in str(explain(rms_norm, X, WEIGHT))
        np.testing.assert_allclose(rms_norm(X, WEIGHT), truth(X, WEIGHT), rtol=1e-5)
        assert "mosaic_gpu" in jax.jit(rms_norm).lower(X, WEIGHT).compile().as_text()
        weights = jnp.stack([WEIGHT, 2 * WEIGHT, WEIGHT, WEIGHT])
        per_weight = jax.vmap(rms_norm)(X, weights)
        np.testing.assert_allclose(per_weight, truth(X, weights[:, None]), rtol=1e-5)

        def loss(x, weight):
            return jnp.sum(jnp.sin(rms_norm(x, weight)))

        grads = jax.jit(jax.grad(loss, (0, 1)))(X, WEIGHT)
        scanned = jax.lax.scan(lambda x, _: (rms_norm(x, WEIGHT), None), X, length=3)
    with backend("xla"):
        expected = jax.grad(loss, (0, 1))(X, WEIGHT)
    for g, e in zip(grads, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-4)
    assert np.isfinite(scanned[0]).all()


def test_a_chain_of_mosaic_kernels_is_captured_into_a_graph():
    """What is launched one by one takes more than 4 us."""
    layout = plgpu.Layout.WG_STRIDED((128,), 1)

    def add_one_kernel(x_ref, y_ref):
        y_ref[...] = plgpu.load(x_ref, layout=layout, optimized=False) + 1

    add_one = plgpu.kernel(
        add_one_kernel, out_type=jax.ShapeDtypeStruct((128,), jnp.float32)
    )

    def chain(x):
        for _ in range(100):
            x = add_one(x)
        return x

    x = jnp.arange(128.0)
    np.testing.assert_array_equal(jax.jit(chain)(x), x + 100)
    assert seconds_a_kernel(chain, x) < 2.6e-6


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "spec, expected", [(P("m"), set()), (P(None, None, "m"), {"all-gather"})]
)
def test_mosaic_kernel_partitions_under_plain_jit(mosaic_rows, spec, expected):
    mesh = jax.make_mesh((2,), ("m",), axis_types=(AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, spec))
    compiled = jax.jit(rms_norm).lower(x, WEIGHT).compile()
    text = compiled.as_text()
    assert "mosaic_gpu" in text
    assert set(re.findall(sharding_checks.COLLECTIVES, text)) == expected
    np.testing.assert_allclose(compiled(x, WEIGHT), truth(X, WEIGHT), rtol=1e-5)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
def test_mosaic_kernel_under_shard_map_and_on_explicit_meshes(mosaic_rows):
    mesh = jax.make_mesh((2,), ("m",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P("m"), P()), "out_specs": P("m")}
    for check_vma in (True, False):
        f = jax.shard_map(rms_norm, mesh=mesh, check_vma=check_vma, **specs)
        np.testing.assert_allclose(jax.jit(f)(X, WEIGHT), truth(X, WEIGHT), rtol=1e-5)
    mesh = jax.make_mesh((2,), ("m",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("m", None, None))
        y = jax.jit(rms_norm)(x, WEIGHT)
    np.testing.assert_allclose(y, truth(X, WEIGHT), rtol=1e-5)
