"""Prefill and decode of whole models on a GPU: random weights in real shapes.

    python -m benchmarks gpu_generate [--model 8B] [--weights Q4_K_M] [--prompt 512]

Weights are bf16, Q4_K_M, Q4_K, Q6_K, Q8_0, int4, affine4, fp8 or mxfp4.

Batch 1, chunks of 16 tokens; the median of four streams after one that warms up.
"""

import argparse
import functools
import statistics
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern import (
    GGUFTensor,
    interleave,
    quantize_affine,
    quantize_fp8,
    quantize_int,
    quantize_microscaled,
)
from jaxkern.models.generate import Generator
from jaxkern.models.llama import Layer, LlamaConfig, LlamaWeights
from jaxkern.models.products import Matrix
from jaxkern.primitives.quant.gguf_blocks import BLOCK_FORMATS


class Shape(NamedTuple):
    layers: int
    d: int
    ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int = 128256


SHAPES = {
    "1.5B": Shape(16, 2048, 8192, 32, 8, 64),
    "8B": Shape(32, 4096, 14336, 32, 8, 128),
}
# where the float16 scales of a block are, and how large
SCALES = {"Q8_0": {0: 5e-4}, "Q6_K": {208: 2e-4}, "Q4_K": {0: 2e-3, 2: 0.015}}
CONTAINERS = {
    "int4": functools.partial(quantize_int, bits=4, group_size=128),
    "affine4": functools.partial(quantize_affine, bits=4, group_size=64),
    "fp8": functools.partial(quantize_fp8, block=(128, 128)),
    "mxfp4": functools.partial(quantize_microscaled, format="mxfp4"),
}


@functools.cache
def drawn(kind: str, f: int, d: int):
    """A function of a key that makes a matrix."""

    @jax.jit
    def draw(key) -> Matrix:
        if kind not in SCALES:
            w = jax.random.normal(key, (f, d), jnp.bfloat16) * d**-0.5
            return w if kind == "bf16" else CONTAINERS[kind](w)
        form = BLOCK_FORMATS[kind]
        blocks = jax.random.bits(key, (f, d // form.elements, form.bytes), "uint8")
        for at, scale in SCALES[kind].items():
            half = np.array([scale], np.float16).view(np.uint8)
            blocks = blocks.at[:, :, at : at + 2].set(half)
        return interleave(GGUFTensor(blocks.reshape(f, -1), kind))

    return draw


def model(shape: Shape, weights: str) -> tuple[LlamaConfig, LlamaWeights]:
    """Q4_K_M has half of v and down, and the output, in Q6_K; others one kind."""
    numbers = iter(range(10**6))
    mixed = weights == "Q4_K_M"
    kind = "Q4_K" if mixed else weights

    def matrix(kind, f, d):
        return drawn(kind, f, d)(jax.random.key(next(numbers)))

    def layer(i: int) -> Layer:
        eighth = shape.layers // 8
        outer = i < eighth or i >= 7 * eighth or (i - eighth) % 3 == 2
        finer = "Q6_K" if mixed and outer else kind
        q, kv = (n * shape.head_dim for n in (shape.heads, shape.kv_heads))
        parts = [(kind, q + 2 * kv)] if finer == kind else [(kind, q + kv), (finer, kv)]
        return Layer(
            attention_norm=jnp.ones(shape.d),
            qkv=tuple(matrix(part, f, shape.d) for part, f in parts),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            attention_output=(matrix(kind, shape.d, q),),
            ffn_norm=jnp.ones(shape.d),
            gate_up=(matrix(kind, 2 * shape.ff, shape.d),),
            down=(matrix(finer, shape.d, shape.ff),),
        )

    config = LlamaConfig(
        *("llama", 8192, shape.layers, shape.d, shape.heads, shape.kv_heads),
        *(shape.head_dim, shape.vocabulary, 1e-5, shape.head_dim, 5e5, "interleaved"),
        dtype="bfloat16",
        fused=True,
    )
    return config, LlamaWeights(
        matrix("bf16", shape.vocabulary, shape.d),
        tuple(map(layer, range(shape.layers))),
        jnp.ones(shape.d),
        (matrix("Q6_K" if mixed else kind, shape.vocabulary, shape.d),),
        None,
    )


def measure(shape: Shape, weights: str, prompt: int, new: int) -> str:
    config, arrays = model(shape, weights)
    generator = Generator(
        config, arrays, batch=1, prompt_slots=prompt, max_tokens=new + 1, chunk=16
    )
    ids = np.random.default_rng(0).integers(0, shape.vocabulary, prompt).tolist()
    decode, prefill = [], []
    for _ in range(5):
        for _ in generator.stream([ids]):
            pass
        t = generator.timings
        decode.append(t.decode_steps / t.decode_seconds)
        prefill.append(t.prefill_tokens / t.prefill_seconds)
    return (
        f"decode {statistics.median(decode[1:]):.0f} tokens/s, prefill "
        f"{statistics.median(prefill[1:]):.0f}, compiled in "
        f"{generator.compile_seconds:.0f} s"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks gpu_generate", description=__doc__
    )
    parser.add_argument("--model", default="1.5B,8B")
    parser.add_argument("--weights", default="bf16,Q4_K_M,Q8_0")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
        return 2
    for name in options.model.split(","):
        for weights in options.weights.split(","):
            line = measure(SHAPES[name], weights, options.prompt, options.new)
            print(f"{name} {weights}: {line}", flush=True)
    return 0
