"""Triton kernels on a GPU: values and gradients of long and odd rows, launch cost."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import (
    add_rms_norm,
    apply_rope,
    backend,
    layer_norm,
    rms_norm,
    softmax,
)
from tests import sharding_checks
from tests.gpu.truth import check_against_float64, on_a_gpu, seconds_a_kernel

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "d",
    [1, 13, 128, 1000, 1025, 4096, 5000, 8193, 16384, 40001, 131071, 131072],
)
@pytest.mark.parametrize("f", [rms_norm, layer_norm, add_rms_norm])
def test_norms_of_long_and_odd_rows(f, d, dtype):
    rng = np.random.default_rng(d)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    rows = 300 if d < 5000 else 37 if d < 100_000 else 5
    operands = [draw(rows, d)] + [draw(rows, d)] * (f is add_rms_norm)
    slack = 1e3 if d == 1 else 1.0  # there layer_norm's rstd is 1 / sqrt(eps)
    check_against_float64(f, *operands, draw(d), draw(d), slack=slack)
    check_against_float64(f, *operands, slack=slack)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("d", [13, 1000, 5000, 16384, 131071])
def test_norms_with_an_offset_and_a_bias(d, dtype):
    rng = np.random.default_rng(d)
    x, residual = (jnp.asarray(rng.standard_normal((37, d)), dtype) for _ in range(2))
    weight, bias = (jnp.asarray(rng.standard_normal(d), dtype) for _ in range(2))

    def shifted(f):
        return lambda *operands: f(*operands, offset=1.0)

    check_against_float64(shifted(rms_norm), x, weight, bias)
    check_against_float64(shifted(rms_norm), x, weight)
    check_against_float64(shifted(add_rms_norm), x, residual, weight)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("d", [8200, 12288, 16384, 24576, 32768])
@pytest.mark.parametrize("rows", [5, 300])  # fewer and more than there are programs
def test_gradients_of_rows_that_stream_through_shared_memory(rows, d, dtype):
    rng = np.random.default_rng(d)
    x, weight = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((rows, d), d))
    check_against_float64(rms_norm, x, weight)
    check_against_float64(lambda x: rms_norm(x, weight, offset=1.0), x)
    check_against_float64(lambda w: rms_norm(x, w), weight)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("d", [1, 13, 1000, 2049, 5000, 16384, 131072])
@pytest.mark.parametrize("masked", [False, True])
def test_softmax_of_long_and_odd_rows(d, dtype, masked):
    rng = np.random.default_rng(d)
    x = jnp.asarray(4 * rng.standard_normal((37, d)), dtype)
    mask = jnp.asarray(rng.random((37, d)) < 0.5).at[3].set(False) if masked else None
    check_against_float64(lambda x: softmax(x, mask, scale=0.7), x)
    bad = x.at[2, d // 2].set(jnp.nan).at[5].set(-jnp.inf)
    with backend("triton", strict=True):
        y = softmax(bad)
    assert jnp.isnan(y[2]).all() and (y[5] == 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("d", [13, 1000, 5000, 32768, 131071])
@pytest.mark.parametrize("masked", [False, True])
def test_softmax_with_a_softcap(d, dtype, masked):
    rng = np.random.default_rng(d)
    x = jnp.asarray(4 * rng.standard_normal((7, d)), dtype)
    mask = jnp.asarray(rng.random((7, d)) < 0.5).at[3].set(False) if masked else None
    check_against_float64(lambda x: softmax(x, mask, scale=0.7, softcap=3.0), x)
    if mask is None:
        return
    with backend("triton", strict=True):
        y, pull = jax.vjp(lambda x: softmax(x, mask, softcap=3.0), x)
        hidden, pull_hidden = jax.vjp(
            lambda x: softmax(jnp.where(mask, x, jnp.nan), mask, softcap=3.0), x
        )
    np.testing.assert_array_equal(np.float32(hidden), np.float32(y))
    for found, expected in zip(pull_hidden(y), pull(y), strict=True):
        np.testing.assert_array_equal(np.float32(found), np.float32(expected))


@pytest.mark.parametrize("d", [20008, 32768])
@pytest.mark.parametrize("rows", [5, 600])  # fewer and more than there are programs
def test_softmax_of_rows_that_stream_through_shared_memory(rows, d):
    rng = np.random.default_rng(d)
    x = jnp.asarray(4 * rng.standard_normal((rows, d)), jnp.bfloat16)
    check_against_float64(lambda x: softmax(x, scale=-0.7), x)
    bad = x.at[1, d - 1].set(jnp.nan).at[2].set(-jnp.inf).at[3, 7].set(jnp.inf)
    bad = bad.at[4].set(-3e38).at[4, 9].set(-2e38)
    with backend("triton", strict=True):
        y = softmax(bad)
    assert jnp.isnan(y[1]).all() and jnp.isnan(y[3, 7]) and (y[2] == 0).all()
    assert y[4, 9] == 1 and y[4].sum() == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "h, pairs, options",
    [
        (128, 64, {"pairing": "interleaved"}),
        (80, 16, {}),
        (80, 16, {"pairing": "interleaved"}),
        (96, 24, {"pair_offset": 48}),
        (2, 1, {"pairing": "interleaved"}),
    ],
)
def test_rotations(h, pairs, options, dtype):
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((2, 37, 3, h)), dtype)
    angle = rng.standard_normal((37, pairs))
    cos, sin = jnp.float32(np.cos(angle)), jnp.float32(np.sin(angle))
    check_against_float64(lambda x: apply_rope(x, cos, sin, **options), x)


def test_rows_far_from_zero_keep_their_variance():
    x = 1000 + jax.random.normal(jax.random.key(0), (64, 5000))
    check_against_float64(layer_norm, x, slack=50)  # x itself is known to 6e-5


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
