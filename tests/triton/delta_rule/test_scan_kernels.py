"""Kernels of causal_conv1d, cumsum and the transforms compile without spilling."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxkern import (
    Float8Codec,
    IntCodec,
    QuantizedVectors,
    TurboQuantCodec,
    cumsum,
    dequantize_vectors,
    explain,
    fwht,
    quantize_vectors,
)
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.primitives.delta_rule.causal_conv1d import causal_conv1d_p

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)


def launches_of(f, *args):
    rows = explain(f, *args, platform="cuda").rows
    assert all(row.runs.startswith("triton: ") for row in rows)
    return [launch for row in rows for launch in row.launches]


def check_launches(f, *args):
    for capability in (80, 90):
        with compiling_for(capability):
            for launch in launches_of(f, *args):
                assert launch.shared_bytes <= bridge.max_shared_bytes()
                assert launch.stack_bytes == 0, launch.describe()


@pytest.mark.parametrize("w", [1, 4, pytest.param(8, marks=pytest.mark.full)])
def test_convolution_with_every_operand(w):
    b, t, d = 2, 300, 600
    x, state = jnp.ones((b, t, d), jnp.bfloat16), jnp.ones((b, w - 1, d))
    weight, bias, ids = jnp.ones((d, w)), jnp.ones(d), jnp.zeros((b, t), jnp.int32)

    def f(x, weight, bias, state):
        y = causal_conv1d_p(x, weight, bias, state, ids, activation="silu")
        return jnp.sin(y.astype(jnp.float32)).sum()

    check_launches(jax.grad(f, (0, 1, 2, 3)), x, weight, bias, state)


def test_few_tokens_and_many_taps_are_refused_in_words():
    def f(t, w):
        x, weight = jnp.ones((1, t, 8)), jnp.ones((8, w))
        call = causal_conv1d_p
        return str(
            explain(
                lambda x, w: call(x, w, None, None, None, activation=None),
                x,
                weight,
                platform="cuda",
            )
        )

    assert "XLA is as fast for 3 tokens" in f(3, 4)
    assert "9 taps" in f(64, 9)


@pytest.mark.parametrize("n", [64, pytest.param(40001, marks=pytest.mark.full)])
def test_running_sums(n):
    x = jnp.ones((300, n))
    check_launches(lambda x: cumsum(x, exclusive=True, reverse=True), x)
    check_launches(cumsum, x.astype(jnp.bfloat16))


@pytest.mark.parametrize("d", [64, 8192, pytest.param(32768, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_transforms(d, dtype):
    check_launches(fwht, jnp.ones((5, d), dtype))


@pytest.mark.parametrize(
    "codec, d",
    [
        (TurboQuantCodec(4), 256),
        (TurboQuantCodec(7), 256),
        (IntCodec(5, group=16), 96),
        pytest.param(TurboQuantCodec(8), 256, marks=pytest.mark.full),
        pytest.param(TurboQuantCodec(2.25), 64, marks=pytest.mark.full),
        pytest.param(TurboQuantCodec(8, seed=1), 32768, marks=pytest.mark.full),
        pytest.param(TurboQuantCodec(7, seed=1), 16384, marks=pytest.mark.full),
        pytest.param(Float8Codec(), 20000, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_codes(codec, d):
    f = functools.partial(quantize_vectors, codec=codec)
    for dtype in (jnp.bfloat16, jnp.float32):
        check_launches(f, jnp.ones((33, d), dtype))


@pytest.mark.parametrize("bits, d", [(4, 128), (7, 256), (2.25, 64), (8, 16384)])
def test_vectors_of_codes(bits, d):
    codes = QuantizedVectors.zeros((33, d), TurboQuantCodec(bits, seed=1))
    check_launches(dequantize_vectors, codes)


@pytest.mark.parametrize(
    "codec, d, reason",
    [
        (IntCodec(8), 65536, "vectors of 65536 dims, above 32768, are too long"),
        (IntCodec(8, group=24), 48, "groups of 24 dims, not a power of 2"),
    ],
    ids=str,
)
def test_codes_that_are_refused_in_words(codec, d, reason):
    f = functools.partial(quantize_vectors, codec=codec)
    assert reason in str(explain(f, jnp.ones((2, d)), platform="cuda"))


def test_vectors_that_are_refused_in_words():
    codes = QuantizedVectors.zeros((2, 80), IntCodec(8))
    text = str(explain(dequantize_vectors, codes, platform="cuda"))
    assert "vectors of 80 dims are no power of 2" in text
