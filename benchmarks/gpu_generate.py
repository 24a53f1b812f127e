"""Prefill and decode of whole models on a GPU: random weights in real shapes.

    python -m benchmarks gpu_generate [--model 8B] [--weights Q4_K_M] [--prompt 512]

"hybrid" has three gated delta nets for each attention, in the sizes of Qwen3-Next but
with dense blocks; bf16 alone. gpt-oss-20b, Qwen3.6-35B-A3B and Qwen3-30B-A3B have
their published sizes. Weights are bf16, Q4_K_M, Q4_K, Q6_K, Q8_0, int4, affine4, fp8
or mxfp4; of the published models bf16, those of blocks, or for the experts alone mxfp4,
fp8_experts (multiplied in 8 bits) or fp8_decoded (the same, decoded for prompts).

Prefill of a model in the sizes of Qwen3-Next with kernels and without:

    python -m benchmarks gpu_generate --model hybrid --prompt 4096 [--backend xla]

Batch 1, or --batch, whose tokens are counted together; chunks of 16 tokens; the median
of four streams after one that warms up. --prompt takes several lengths. With --out DIR
figures are kept for `pages --add`, beside what the bytes of a token allow at the rate
of a copy: matrices, keys and values, of the models whose tokens read all of them.
--draft N reads N drafts with each token; how many of them stay is no more than random
weights repeat themselves.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._rows import Rows
from benchmarks._time import copy_rate
from benchmarks.drawn_models import PUBLISHED, drawn, drawn_model
from jaxkern import backend
from jaxkern.models.decoder import DecoderConfig, DecoderWeights, LayerWeights
from jaxkern.models.feed_forward import Dense, DenseWeights
from jaxkern.models.generate import Generator
from jaxkern.models.llama import Layer, LlamaConfig, LlamaWeights
from jaxkern.models.mixers.delta_net import DeltaNet, DeltaNetWeights
from jaxkern.models.mixers.full_attention import AttentionWeights, FullAttention
from jaxkern.models.mixers.mixing import Rotation


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
HYBRID = Shape(16, 2048, 6144, 16, 2, 256, 151936)


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


def hybrid(shape: Shape) -> tuple[DecoderConfig, DecoderWeights]:
    """Every fourth layer is attention, the others are gated delta nets."""
    numbers = iter(range(10**6))
    net = DeltaNet(16, 32, 128, 128, taps=4)
    attention = FullAttention(
        *(shape.heads, shape.kv_heads, shape.head_dim, Rotation(64, 1e7)),
        output_gate=True,
        head_norms=True,
    )

    def matrix(f: int, d: int = shape.d):
        return drawn("bf16", f, d)(jax.random.key(next(numbers)))

    def delta_net() -> DeltaNetWeights:
        n, values = net.value_heads, net.value_heads * net.value_dim
        return DeltaNetWeights(
            input=(matrix(net.channels + values + 2 * n),),
            convolution=matrix(net.channels, net.taps),
            a_log=jnp.linspace(-1.0, 2.0, n),
            dt_bias=jnp.ones(n),
            norm=jnp.ones(net.value_dim),
            output=(matrix(shape.d, values),),
        )

    def full_attention() -> AttentionWeights:
        q, kv = (heads * shape.head_dim for heads in (shape.heads, shape.kv_heads))
        ones = jnp.ones(shape.head_dim)
        return AttentionWeights(
            qkv=(matrix(2 * q + 2 * kv),),
            output=(matrix(shape.d, q),),
            q_norm=ones,
            k_norm=ones,
        )

    def layer(attends: bool) -> LayerWeights:
        return LayerWeights(
            mixer_norm=jnp.ones(shape.d),
            mixer=full_attention() if attends else delta_net(),
            feed_forward_norm=jnp.ones(shape.d),
            feed_forward=DenseWeights(
                (matrix(2 * shape.ff),), (matrix(shape.d, shape.ff),)
            ),
        )

    attends = [i % 4 == 3 for i in range(shape.layers)]
    config = DecoderConfig(
        *("qwen3next", 8192, shape.d, shape.vocabulary, 1e-6),
        mixers=tuple(attention if yes else net for yes in attends),
        feed_forwards=(Dense(shape.ff),) * shape.layers,
        dtype="bfloat16",
        fused=True,
    )
    table = matrix(shape.vocabulary)
    layers = tuple(map(layer, attends))
    return config, DecoderWeights(table, layers, jnp.ones(shape.d), (table,))


def named(name: str, weights: str) -> tuple[Any, Any]:
    """Config and drawn weights of the model of a name."""
    if name in PUBLISHED:
        return drawn_model(name, weights)
    if name == "hybrid":
        return hybrid(HYBRID)
    return model(SHAPES[name], weights)


class Run(NamedTuple):
    """Tokens a second, and what else is known of a run."""

    decode: float
    prefill: float
    tokens_a_step: float
    compile_seconds: float


def measure(
    config: Any, arrays: Any, prompt: int, new: int, batch: int, drafts: int
) -> Run:
    sizes = {"batch": batch, "prompt_slots": prompt, "max_tokens": new + 1}
    generator = Generator(config, arrays, **sizes, chunk=16, drafts=drafts)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, config.vocabulary, (batch, prompt)).tolist()
    decode, prefill = [], []
    for _ in range(5):
        for _ in generator.stream(ids):
            pass
        t = generator.timings
        steps = t.decode_steps / t.decode_seconds
        decode.append(batch * steps * t.tokens_a_step)
        prefill.append(t.prefill_tokens / t.prefill_seconds)
    return Run(
        statistics.median(decode[1:]),
        statistics.median(prefill[1:]),
        generator.timings.tokens_a_step,
        generator.compile_seconds,
    )


def limit(name: str, arrays: LlamaWeights, length: float, batch: int) -> float:
    """Tokens a second that the bytes of a step allow, `length` tokens behind each."""
    shape = SHAPES[name]
    matrices = sum(x.nbytes for x in jax.tree.leaves(arrays)) - arrays.embedding.nbytes
    kept = 4.0 * shape.layers * shape.kv_heads * shape.head_dim * length
    return batch * copy_rate() / (matrices + batch * kept)


def keep(kept: Rows, case: str, tokens: tuple[int, int, int], run: Run, **beside: Any):
    """Rows of decode and of prefill; `tokens` are those of prompt, answer and batch."""
    prompt, _, batch = tokens
    many = f", {batch} sequences" if batch > 1 else ""
    behind = "" if prompt == 512 else f" behind {prompt} tokens"
    decode = {"jaxkern": round(run.decode)}
    kept.add(f"{case}{behind}{many}", "decode", decode, **beside)
    read = "" if prompt == 512 else f", {prompt} tokens"
    kept.add(f"{case}{read}{many}", "prefill", {"jaxkern": round(run.prefill)})


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks gpu_generate", description=__doc__
    )
    parser.add_argument("--model", default="1.5B,8B,hybrid")
    parser.add_argument("--weights", default="bf16,Q4_K_M,Q8_0")
    parser.add_argument("--prompt", default="512")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--draft", type=int, default=0)
    parser.add_argument("--backend", default="auto", help="xla: without kernels")
    parser.add_argument("--out", type=Path, help="folder for the figures")
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
        return 2
    kept = Rows("gpu_generate", "whole models", "tokens/s", options.out)
    kept.record_of = "models", "generate"
    for name in options.model.split(","):
        kinds = "bf16" if name == "hybrid" else options.weights
        for weights in kinds.split(","):
            config, arrays = named(name, weights)
            for prompt in map(int, options.prompt.split(",")):
                sizes = prompt, options.new, options.batch
                with backend(options.backend):
                    run = measure(config, arrays, *sizes, options.draft)
                print(
                    f"{name} {weights}, {prompt} tokens: decode {run.decode:.0f} "
                    f"tokens/s, {run.tokens_a_step:.2f} a step, prefill "
                    f"{run.prefill:.0f}, compiled in {run.compile_seconds:.0f} s",
                    flush=True,
                )
                allowed = {}
                if name in SHAPES:
                    length = prompt + options.new / 2
                    bound = limit(name, arrays, length, options.batch)
                    allowed["limit"] = round(bound)
                case = f"{name} {weights.replace('bf16', 'bfloat16')}"
                keep(kept, case, sizes, run, **allowed)
    return 0
