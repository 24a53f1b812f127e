"""Float32 attention multiplies as `jax.default_matmul_precision` of the call says."""

import jax
import jax.numpy as jnp
import pytest

from jaxkern import attention, explain
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.triton.attention.attention.fwd import slower

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
KERNELS = {
    "flash_attention_kernel",
    "flash_attention_bwd_keys_kernel",
    "flash_attention_bwd_queries_kernel",
}


def f(q, k, v):
    return attention(q, k, v, causal=True)


def forward_and_backward(q, k, v):
    y, pull = jax.vjp(f, q, k, v)
    return y, pull(y)


def launches(function, precision, dtype="float32", leading=()):
    """Those of products, by name of the kernel."""
    x = jax.ShapeDtypeStruct((*leading, 1, 256, 2, 64), dtype)
    with compiling_for(90), jax.default_matmul_precision(precision):
        rows = explain(function, x, x, x, platform="cuda").rows
    every = {launch.name: launch for row in rows for launch in row.launches}
    assert set(every) >= KERNELS
    return {name: every[name] for name in KERNELS}


def precisions(found):
    return {dict(launch.constants)["C"].PRECISION for launch in found.values()}


@pytest.mark.parametrize(
    "precision, product",
    [
        (None, "tf32"),
        ("default", "tf32"),
        ("bfloat16", "tf32"),
        ("tensorfloat32", "tf32"),
        ("high", "tf32"),
        ("TF32_TF32_F32", "tf32"),
        ("TF32_TF32_F32_X3", "tf32x3"),
        ("float32", "tf32x3"),
        ("highest", "tf32x3"),
    ],
)
def test_products_of_every_kernel(precision, product):
    assert precisions(launches(forward_and_backward, precision)) == {product}


def test_kernels_differ_for_float32_alone():
    """Three products of TF32 round their operands; one takes the upper bits."""
    with compiling_for(90):
        for precision, rounds in (("default", False), ("highest", True)):
            for launch in launches(forward_and_backward, precision).values():
                assert ("cvt.rna.tf32" in launch.ptx) == rounds, launch.name
    default, highest = (
        launches(forward_and_backward, precision, jnp.bfloat16)
        for precision in ("default", "highest")
    )
    forward = "flash_attention_kernel"
    # of 16 bits the forward kernel alone has more to do: it writes the tail of out
    with_tail = default.pop(forward), highest.pop(forward)
    assert default == highest
    narrow, wide = (launch.operands for launch in with_tail)
    assert [*wide] == [*narrow, "*i8"]
    without = (dict(launch.constants) for launch in with_tail)
    assert next(without) == dict(next(without), tail_ptr=None)


def test_gradients_multiply_as_the_call_did():
    def pulled_outside(*qkv):
        with jax.default_matmul_precision("highest"):
            y, pull = jax.vjp(f, *qkv)
        return y, pull(y)

    def forward_by_default(*qkv):
        with jax.default_matmul_precision("default"):
            y, pull = jax.vjp(jax.checkpoint(f), *qkv)
        return y, pull(y)

    assert precisions(launches(pulled_outside, "default")) == {"tf32x3"}
    assert precisions(launches(forward_by_default, "highest")) == {"tf32"}


def test_vmap_keeps_the_precision():
    every = jax.vmap(forward_and_backward)
    assert precisions(launches(every, "highest", leading=(3,))) == {"tf32x3"}


def test_one_function_compiles_anew_for_another_precision():
    x = jnp.ones((1, 16, 1, 8))
    run = jax.jit(forward_and_backward)
    for precision in ("default", "highest", "default"):
        with jax.default_matmul_precision(precision):
            run(x, x, x)
    assert run._cache_size() == 2


@pytest.mark.parametrize(
    "precision, h, options, forward, backward",
    [
        ("default", 128, {}, None, None),
        ("default", 256, {}, None, 100),
        ("default", 128, dict(causal=True), None, None),
        ("default", 256, dict(causal=True), None, 53),
        ("default", 256, dict(causal=True, window=64), None, None),
        ("default", 320, dict(causal=True), 53, 53),
        ("highest", 64, {}, None, None),
        ("highest", 128, {}, None, 100),
        ("highest", 128, dict(causal=True), None, None),
        ("highest", 256, {}, 100, 100),
        ("highest", 256, dict(window=64), None, 62),
    ],
)
def test_where_xla_is_faster_by_what_is_seen(precision, h, options, forward, backward):
    """In percent of all pairs."""
    x = jax.ShapeDtypeStruct((1, 1024, 8, h), "float32")
    given = dict(query=x, key=x, value=x, q_segment_ids=None)
    given |= dict(causal=False, window=None) | options
    with jax.default_matmul_precision(precision):
        reasons = slower(**given), slower(**given, dout=x)
    for reason, share in zip(reasons, (forward, backward), strict=True):
        words = f"float32 at head dims of {h} and {h} with {share}% of the pairs seen"
        assert reason == (share and words)


def test_gradients_of_few_queries_are_left_to_xla():
    x = jax.ShapeDtypeStruct((8, 128, 32, 128), "float32")
    given = dict(query=x, key=x, value=x, q_segment_ids=None, causal=True, window=None)
    assert slower(**given) is None
    assert "gradients of 128 queries in float32" in str(slower(**given, dout=x))
