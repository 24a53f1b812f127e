"""A mixture of packed experts at prefill: its two ops, beside `moe_ffn` and its bytes.

    python -m benchmarks many_slots [--tokens 64,512,2048,4096]

Layers of gpt-oss-20b (MXFP4, biases) and of Qwen3.6-35B-A3B (Q4_K, without its shared
expert) with random weights, and experts drawn as a balanced router chooses. `moe_ffn`
decodes all experts and multiplies group by group.
"""

import argparse

import jax
import jax.numpy as jnp

from benchmarks.moe.expert_slots import GPT_OSS, LAYERS, PLAIN, Layer, drawn_layer
from benchmarks.quant.interleaved_matmul import compare
from jaxkern import moe_ffn
from jaxkern.primitives.moe.expert_slots import expert_hidden, expert_sum

SETS = 2  # of ids


def drawn_tokens(layer: Layer, tokens: int) -> list[tuple[jax.Array, jax.Array]]:
    """(activations, experts of each token), a few times."""

    @jax.jit
    def draw(key):
        x = jax.random.normal(key, (tokens, layer.d), jnp.bfloat16)
        scores = jax.random.uniform(key, (tokens, layer.experts))
        return x, jax.lax.top_k(scores, layer.chosen)[1].astype(jnp.int32)

    return [draw(key) for key in jax.random.split(jax.random.key(1), SETS)]


def layer_of(layer: Layer):
    """The two ops of a layer, and the layer by `moe_ffn`; of x, ids and arrays."""
    options = GPT_OSS if layer.bias else PLAIN
    by_expert = 1 / layer.chosen

    def ours(x, ids, gate, up, down, gate_bias, up_bias, bias):
        weights = jnp.full(ids.shape, by_expert)
        y = expert_hidden(x, ids, gate, up, gate_bias, up_bias, **options)
        return expert_sum(y, ids, weights, down, bias, x)

    def in_turn(x, ids, *arrays):
        weights = jnp.full(ids.shape, by_expert, x.dtype)
        return x + moe_ffn(x, ids, weights, *arrays, **options)

    return {"ours": ours, "moe_ffn": in_turn}


def measure(name: str, layer: Layer, kind: str, tokens: int) -> None:
    arrays = drawn_layer(layer, kind)[:6]
    given = [(*drawn, *arrays) for drawn in drawn_tokens(layer, tokens)]
    calls = {name: (f, given) for name, f in layer_of(layer).items()}
    flops = 6 * tokens * layer.chosen * layer.d * layer.f
    title = f"{name} {kind}, {tokens} tokens, {flops / 1e9:.0f} GFLOP"
    compare(title, calls, sum(w.nbytes for w in arrays[:3]))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks many_slots", description=__doc__)
    parser.add_argument("--tokens", default="64,512,2048,4096")
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
        return 2
    for name, (layer, kinds) in LAYERS.items():
        for tokens in map(int, options.tokens.split(",")):
            measure(name, layer._replace(shared=False), kinds[0], tokens)
    return 0
