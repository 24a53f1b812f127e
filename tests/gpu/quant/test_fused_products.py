"""Products with packed and plain weights on a GPU, against float64 and bfloat16.

The truth has the decoded weights in float64. An error may be 1.5 times that of the same
product with activations and decoded weights rounded to bfloat16.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    InterleavedTensor,
    backend,
    interleave,
    linear,
    quantize_gguf,
    quantized_matmul,
    quantized_matmul_add,
    quantized_rms_norm_matmul,
    quantized_swiglu,
)
from jaxkern.models.llama import Layer, LlamaConfig, LlamaWeights, empty_cache, prefill
from jaxkern.primitives.quant.interleaved_tensor import interleaved
from jaxkern.primitives.quant.tile_formats import (
    OWN_FORMATS,
    TILE_FORMATS,
    decode_blocks,
)
from jaxkern.triton.quant import packed_products
from jaxkern.triton.quant.packed_products import BYTES
from tests.gpu.truth import on_a_gpu, poison, relative_error
from tests.primitives.quant.tile_bytes import put_numbers

pytestmark = on_a_gpu
# of the library's own formats those whose paths differ
TESTED = [q for q in BYTES if q not in OWN_FORMATS]
TESTED += ["NVFP4_256", "AFFINE4_64_BF16", "AFFINE4_128_F16"]
TESTED += ["INT4_32_F16", "INT4_128_BF16"]

SCALES = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}  # else 0 and 2
SCALES |= {"Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
SCALES |= {"MXFP4": ()}
EPS = 1e-5


def weights(qtype, f, d, seed=0) -> tuple[Any, np.ndarray]:
    """Random blocks with float16 scales of size 0.01, and their float64 values."""
    rng = np.random.default_rng(seed)
    if qtype == "dense":
        w = jnp.asarray(rng.standard_normal((f, d)) / d**0.5, jnp.bfloat16)
        return w, np.asarray(w, np.float64)
    form = TILE_FORMATS[qtype]
    shape = (f, d // form.elements, form.bytes)
    blocks = rng.integers(0, 256, shape, dtype=np.uint8)
    for at in SCALES.get(qtype, () if qtype in OWN_FORMATS else (0, 2)):
        scale = rng.uniform(0.005, 0.02, (*shape[:2], 1)).astype(np.float16)
        blocks[:, :, at : at + 2] = scale.view(np.uint8)
    if qtype == "MXFP4":
        blocks[:, :, 0] = rng.integers(118, 124, shape[:2])
    if qtype in OWN_FORMATS:
        put_numbers(rng, qtype, blocks)
    rows = blocks.reshape(f, -1)
    with jax.default_device(jax.devices("cpu")[0]):
        values = decode_blocks(jnp.asarray(rows), qtype, dtype=jnp.float32)
    tiles = jnp.asarray(interleaved(rows, qtype))
    return InterleavedTensor(tiles, qtype), np.asarray(values, np.float64)


def of(kind, x, w, norm, residual):
    """What `kind` computes by the library."""
    if kind == "norm":
        return quantized_rms_norm_matmul(x, norm, w, eps=EPS)
    if kind in ("gated", "gelu"):
        activation = "silu" if kind == "gated" else "gelu_tanh"
        return quantized_swiglu(x, w, norm, eps=EPS, activation=activation)
    if kind == "times":
        return quantized_swiglu(x, w, None, residual, activation="gelu_tanh")
    if kind == "add":
        return quantized_matmul_add(x, w, residual)
    return linear(x, w) if isinstance(w, jax.Array) else quantized_matmul(x, w)


def truth_of(kind, x, w, norm, residual, rounded=False):
    """The same in float64, or with the factors of the product in bfloat16."""
    if kind in ("norm", "gated", "gelu"):
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * norm
    if rounded:
        x, w = (a.astype(jnp.bfloat16).astype(np.float64) for a in (x, w))
    y = x @ w.T
    if kind == "gated":
        gate, up = np.split(y, 2, axis=-1)
        y = gate / (1 + np.exp(-np.maximum(gate, -700))) * up
    if kind == "gelu":
        gate, up = np.split(y, 2, axis=-1)
        y = gelu(gate) * up
    if kind == "times":
        y = gelu(y) * residual
    return y + residual if kind == "add" else y


def gelu(x):
    return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def check(kind, qtype, rows, f, d, dtype):
    rng = np.random.default_rng(rows)
    w, values = weights(qtype, f, d)
    x = jnp.asarray(0.1 * rng.standard_normal((rows, d)), dtype)
    norm = jnp.asarray(0.1 * rng.uniform(0.5, 1.5, d), jnp.float32)
    residual = jnp.asarray(rng.standard_normal((rows, f)), dtype)
    x64, norm64, residual64 = (np.asarray(a, np.float64) for a in (x, norm, residual))
    truth = truth_of(kind, x64, values, norm64, residual64)
    rounded = truth_of(kind, x64, values, norm64, residual64, rounded=True)
    rounded = rounded.astype(dtype)
    poison(x, residual)
    with backend("triton", strict=True):
        found = jax.jit(lambda *a: of(kind, *a))(x, w, norm, residual)
    assert found.dtype == x.dtype
    error, allowed = (relative_error(y, truth) for y in (found, rounded))
    assert error <= 1.5 * max(allowed, 1e-6), (error, allowed)


@pytest.mark.parametrize("kind", ["plain", "norm", "gated", "add"])
@pytest.mark.parametrize("qtype", [*TESTED, "dense"])
def test_one_activation(qtype, kind):
    check(kind, qtype, 1, 96, 4096, "bfloat16")


@pytest.mark.parametrize("kind", ["plain", "norm", "gated", "gelu", "add"])
@pytest.mark.parametrize("f, d", [(98, 512), (6, 1024), (3074, 2048)])
def test_short_rows(f, d, kind):
    check(kind, "dense", 1, f, d, "bfloat16")


@pytest.mark.parametrize("kind", ["gelu", "times"])
@pytest.mark.parametrize(
    "qtype, rows, f, d",
    [
        ("Q4_K", 1, 96, 1536),
        ("Q6_K", 1, 1536, 256),
        ("Q8_0", 1, 96, 512),
        ("Q4_0", 1, 96, 544),  # no whole steps: by another kernel
        ("Q4_K", 3, 96, 1536),
        ("Q4_K", 12, 96, 1536),
        ("Q4_K", 400, 96, 1536),
        ("dense", 1, 96, 1536),
        ("dense", 2, 98, 256),
        ("dense", 12, 96, 1536),
    ],
)
def test_gates_of_gelu(kind, qtype, rows, f, d):
    """Of one activation by whole numbers and not, of more by every other path."""
    check(kind, qtype, rows, f, d, "bfloat16")


@pytest.mark.parametrize("kind", ["plain", "norm", "gated", "add"])
@pytest.mark.parametrize("qtype", packed_products.SUMMED)
def test_one_activation_summed_by_groups(qtype, kind):
    for f, d in ((32, 256), (96, 14336)):  # tiles of 16 rows of the gate too
        check(kind, qtype, 1, f, d, "bfloat16")


@pytest.mark.parametrize(
    "dtype, rows",
    [
        *(("bfloat16", rows) for rows in (2, 8, 9, 16, 17, 64, 100, 300, 384, 385)),
        *(("float16", rows) for rows in (2, 8, 32)),
        *(("float32", rows) for rows in (1, 2, 9, 16)),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "norm"])
def test_more_activations(kind, rows, dtype):
    check(kind, "Q4_K", rows, 80, 768, dtype)


@pytest.mark.parametrize(
    "qtype, rows, f, d",
    [
        ("Q4_0", 1, 16, 32),
        ("Q5_1", 3, 48, 2080),  # no multiple of 256
        ("Q8_0", 1, 4112, 512),
        ("Q4_K", 1, 16, 256),
        ("Q6_K", 1, 16, 14336),
        ("Q5_K", 2, 8208, 256),
        ("Q5_1", 40, 48, 2080),
        ("Q8_0", 30, 4112, 512),
        ("MXFP4", 20, 160, 1056),
        ("MXFP4", 1, 4112, 512),
        ("MXFP4", 1, 48, 2880),
        ("MXFP4", 16, 48, 14336),
        ("NVFP4_256", 1, 16, 256),
        ("NVFP4_256", 5, 48, 768),
        ("NVFP4_256", 16, 4112, 512),
        ("NVFP4_256", 100, 288, 768),
        ("AFFINE4_64_BF16", 2, 48, 2880),
        ("AFFINE4_64_BF16", 1, 4112, 512),
        ("AFFINE4_64_F16", 130, 64, 576),
        ("INT4_128_F16", 1, 16, 14336),
        ("INT4_128_BF16", 12, 32, 896),
        ("INT4_32_BF16", 33, 288, 1056),
        ("INT4_128_BF16", 9, 4112, 512),
        ("INT4_128_BF16", 33, 288, 8192),
        ("INT4_64_BF16", 50, 48, 1280),
        ("AFFINE4_64_BF16", 64, 1072, 2816),
        ("AFFINE4_32_BF16", 17, 32, 256),
        ("Q4_K", 50, 27136, 512),
        ("IQ4_XS", 12, 32, 768),
        ("Q2_K", 33, 288, 768),
        ("Q3_K", 130, 64, 512),
        ("Q6_K", 16, 32, 14336),
        ("dense", 4, 97, 14336),
        ("dense", 1, 97, 14336),
        ("dense", 1, 98, 2880),  # not of whole kilobytes
        ("dense", 1, 98, 7168),  # of 8192 columns at once
        ("dense", 3, 34, 904),
        ("dense", 3, 34, 1032),
        ("dense", 1, 32, 520),
        ("dense", 1, 1536, 256),
        ("dense", 2, 34, 264),
    ],
)
def test_odd_sizes(qtype, rows, f, d):
    for kind in ("plain", "norm", "add", "gated"):
        if kind == "gated" and f % (2 if qtype == "dense" else 32):
            continue  # halves
        check(kind, qtype, rows, f, d, "bfloat16")


def test_a_norm_that_fills_the_shared_memory():
    check("norm", "Q4_K", 4, 32, 8192, "bfloat16")
    check("norm", "Q4_K", 2, 32, 16384, "bfloat16")
    check("gated", "Q8_0", 2, 32, 4096, "float32")


def test_gradient_and_vmap():
    w, values = weights("Q4_K", 32, 512)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 512)), jnp.float32)
    with backend("triton"):
        dx = jax.jit(jax.grad(lambda x: quantized_matmul(x, w).sum()))(x)
        stack = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), w)
        found = jax.jit(jax.vmap(quantized_matmul, (None, 0)))(x, stack)
    np.testing.assert_allclose(dx[0], values.sum(0), rtol=1e-4, atol=1e-3)
    truth = np.asarray(x, np.float64) @ values.T
    assert relative_error(found[0], truth) < 2e-6
    turned = truth.reshape(3, 2, 16)[:, ::-1].reshape(3, 32)
    assert relative_error(found[1], turned) < 2e-6


def small_model(quantised):
    """Two layers of 512 columns, 8 query and 4 key heads of 64."""
    seeds = iter(range(100))

    def matrices(f, d):
        w = weights("dense", f, d, next(seeds))[0]
        if quantised:  # of mean 0 too: else all logits are one large number
            w = interleave(quantize_gguf(w.astype(jnp.float32), "Q4_K"))
        return (w,)

    layers = tuple(
        Layer(
            jnp.ones(512) * 0.1,
            matrices(1024, 512),
            None,
            None,
            None,
            matrices(512, 512),
            jnp.ones(512) * 0.1,
            matrices(2048, 512),
            matrices(512, 1024),
        )
        for _ in range(2)
    )
    table = jnp.asarray(
        np.random.default_rng(1).standard_normal((96, 512)), jnp.float32
    )
    config = LlamaConfig("llama", 64, 2, 512, 8, 4, 64, 96, EPS, 64, 1e4, "interleaved")
    return config, LlamaWeights(table, layers, jnp.ones(512), matrices(96, 512), None)


ROUNDED = {"xla_allow_excess_precision": False}


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("quantised", [False, True])
def test_a_model_of_fused_products(quantised, tokens):
    """Its logits in bfloat16 are as near to float32 as those of op after op.

    XLA leaves out roundings between ops that it fuses. Here it may not.
    """
    config, model = small_model(quantised)
    ids = np.arange(tokens, dtype=np.int32)[None] % 96

    def logits(dtype, fused, kernels):
        chosen = replace(config, dtype=dtype, fused=fused)
        cache = empty_cache(chosen, 1, 64, dtype)
        with backend(kernels), jax.default_matmul_precision("highest"):
            run = jax.jit(prefill, static_argnums=0, compiler_options=ROUNDED)
            return run(chosen, model, ids, np.array([tokens]), cache)[0]

    truth = np.asarray(logits("float32", False, "xla"))
    found = relative_error(logits("bfloat16", True, "auto"), truth)
    plain = relative_error(logits("bfloat16", False, "xla"), truth)
    assert np.abs(truth).max() > 0.1 and found <= 1.5 * plain, (found, plain)
