"""Triton kernels of rms_norm on a GPU: long and odd rows, launch cost, two devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import backend, rms_norm
from jaxkern.testing import sharding_checks
from tests.gpu.norm.rows import DTYPES, ODD, check_long_and_odd_rows, draws
from tests.gpu.truth import check_against_float64, on_a_gpu, poison, seconds_a_kernel

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", ODD)
def test_long_and_odd_rows(d, dtype):
    check_long_and_odd_rows(rms_norm, d, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [13, 1000, 5000, 16384, 131071])
def test_an_offset_and_a_bias(d, dtype):
    draw = draws(dtype, d)
    x, weight, bias = draw(37, d), draw(d), draw(d)

    def shifted(*operands):
        return rms_norm(*operands, offset=1.0)

    check_against_float64(shifted, x, weight, bias)
    check_against_float64(shifted, x, weight)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("d", [8200, 12288, 16384, 24576, 32768])
@pytest.mark.parametrize("rows", [5, 300])  # fewer and more than there are programs
def test_gradients_of_rows_that_stream_through_shared_memory(rows, d, dtype):
    rng = np.random.default_rng(d)
    x, weight = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((rows, d), d))
    check_against_float64(rms_norm, x, weight)
    check_against_float64(lambda x: rms_norm(x, weight, offset=1.0), x)
    check_against_float64(lambda w: rms_norm(x, w), weight)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 31, 4097])
def test_short_rows_for_inference(rows, d, dtype):
    draw = draws(dtype, d)
    x, weight = draw(rows, d), draw(d)
    u, w = (np.asarray(v, np.float64) for v in (x, weight))
    truth = u / np.sqrt((u * u).mean(-1, keepdims=True) + 1e-6)
    step = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    cases = [
        (rms_norm, (x,), truth),
        (rms_norm, (x, weight.astype("float32")), truth * w),
        (lambda *a: rms_norm(*a, offset=1.0), (x, weight), truth * (w + 1)),
    ]
    for f, operands, expected in cases:
        poison(x)
        with backend("triton", strict=True):
            y = np.asarray(jax.jit(f)(*operands), np.float64)
        np.testing.assert_allclose(y, expected, rtol=step, atol=1e-6)


def test_kernels_run_under_transformations():
    x = jax.random.normal(jax.random.key(0), (4, 8, 256))
    weights = jax.random.normal(jax.random.key(1), (4, 256))

    def every(x, weights):
        each = jax.vmap(rms_norm)(x, weights)
        scanned, _ = jax.lax.scan(lambda c, w: (rms_norm(c, w), None), x, weights)
        slopes = jax.vmap(jax.grad(lambda x, w: jnp.sin(rms_norm(x, w)).sum(), (0, 1)))
        return (
            each,
            scanned,
            slopes(x, weights),
            jax.jvp(lambda x: rms_norm(x, weights[0]), (x,), (x[::-1],)),
        )

    with backend("triton", strict=True):
        found = jax.jit(every)(x, weights)
    with backend("xla"):
        expected = jax.jit(every)(x, weights)
    for y, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(y, e, rtol=2e-5, atol=2e-5)


def test_a_chain_of_kernels_is_captured_into_a_graph():
    x = jax.random.normal(jax.random.key(0), (64, 4096), jnp.bfloat16)
    weight = jnp.ones(4096, jnp.bfloat16)

    def chain(x):
        for _ in range(100):
            x = rms_norm(x, weight)
        return x

    assert seconds_a_kernel(chain, x) < 2.6e-6


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "spec, expected", [(P("m"), set()), (P(None, "m"), {"all-gather"})]
)
def test_kernels_partition_under_plain_jit(spec, expected):
    mesh = jax.make_mesh((2,), ("m",), axis_types=(AxisType.Auto,))
    x = jax.random.normal(jax.random.key(0), (64, 4096))
    weight = jnp.linspace(0.5, 1.5, 4096)
    cut = jax.device_put(x, NamedSharding(mesh, spec))
    compiled = jax.jit(rms_norm).lower(cut, weight).compile()
    text = compiled.as_text()
    assert "triton_kernel_call" in text
    assert set(re.findall(sharding_checks.COLLECTIVES, text)) == expected
    np.testing.assert_allclose(compiled(cut, weight), rms_norm(x, weight), rtol=1e-5)
    slope = jax.jit(jax.grad(lambda x, w: jnp.sin(rms_norm(x, w)).sum(), (0, 1)))
    for y, e in zip(slope(cut, weight), slope(x, weight), strict=True):
        np.testing.assert_allclose(y, e, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("check_vma", [True, False])
def test_kernels_run_under_shard_map(check_vma):
    mesh = jax.make_mesh((2,), ("m",), axis_types=(AxisType.Auto,))
    x = jax.random.normal(jax.random.key(0), (64, 4096))
    weight = jnp.linspace(0.5, 1.5, 4096)
    specs = {"in_specs": (P("m"), P()), "out_specs": P("m")}
    f = jax.shard_map(rms_norm, mesh=mesh, check_vma=check_vma, **specs)
    np.testing.assert_allclose(jax.jit(f)(x, weight), rms_norm(x, weight), rtol=1e-5)
