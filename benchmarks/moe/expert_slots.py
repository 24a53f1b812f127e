"""A mixture of experts at decode: its two ops, beside the limit of their bytes.

    python -m benchmarks expert_slots [--tokens 1,4,8]

Layers of gpt-oss-20b (biases; mxfp4 lies row by row, MXFP4 16 rows side by side) and of
Qwen3.6-35B-A3B (a shared expert) with random weights and experts drawn as a balanced
router chooses; "in turn" are gate, up, activation and down by `moe_ffn`, without the
shared expert.
"""

import argparse
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.drawn_models import drawn, drawn_experts
from benchmarks.quant.interleaved_matmul import compare
from jaxkern import moe_ffn
from jaxkern.primitives.moe.expert_slots import expert_hidden, expert_sum

SETS = 8  # of ids, so of experts that are read
GPT_OSS = dict(alpha=1.702, limit=7.0, up_offset=1.0)
PLAIN = dict(alpha=1.0, limit=None, up_offset=0.0)


class Layer(NamedTuple):
    experts: int
    chosen: int
    d: int
    f: int
    shared: bool
    bias: bool


LAYERS = {
    "gpt-oss-20b": (Layer(32, 4, 2880, 2880, False, True), ("mxfp4", "MXFP4", "bf16")),
    "Qwen3.6-35B-A3B": (Layer(256, 8, 2048, 512, True, False), ("Q4_K", "bf16")),
}


def drawn_layer(layer: Layer, kind: str) -> tuple[Any, ...]:
    """gate, up, down, their biases, the shared expert's two matrices."""
    e, d, f = layer.experts, layer.d, layer.f
    keys = iter(jax.random.split(jax.random.key(0), 5))
    weights = [
        drawn_experts(kind, s)(next(keys)) for s in [(e, f, d)] * 2 + [(e, d, f)]
    ]
    biases = [jnp.ones(s) if layer.bias else None for s in ((e, f), (e, f), (e, d))]
    shared = [None, None]
    if layer.shared:
        shared = [drawn(kind, *s)(next(keys)) for s in ((2 * f, d), (d, f))]
    return *weights, *biases, *shared


def measure(name: str, layer: Layer, kind: str, tokens: int) -> None:
    gate, up, down, gate_bias, up_bias, bias, both, back = drawn_layer(layer, kind)
    options = GPT_OSS if layer.bias else PLAIN
    keys = jax.random.split(jax.random.key(1), SETS)

    def slots(key):
        order = jax.vmap(lambda k: jax.random.permutation(k, layer.experts))
        ids = order(jax.random.split(key, tokens))[:, : layer.chosen]
        last = jnp.full((tokens, int(layer.shared)), layer.experts)
        return jnp.concatenate([ids, last], axis=1).astype(jnp.int32)

    ids = [slots(key) for key in keys]
    x = jax.random.normal(keys[0], (tokens, layer.d), jnp.bfloat16)
    weights = jnp.full(ids[0].shape, 0.125)
    hidden = jax.random.normal(keys[0], (*ids[0].shape, layer.f), jnp.bfloat16)
    each = gate.nbytes // layer.experts
    of_shared = 0 if both is None else both.nbytes // 2
    read = len(set(ids[0].ravel().tolist()) - {layer.experts}) * each + of_shared
    title = f"{name} {kind}, {tokens} tokens"

    wide = functools.partial(expert_hidden, **options)
    around = gate_bias, up_bias, both
    calls: dict[str, Any] = {"ours": (wide, [(x, i, gate, up, *around) for i in ids])}
    compare(f"{title}, gate and up", calls, 2 * read)
    around = down, bias, x, back
    calls = {"ours": (expert_sum, [(hidden, i, weights, *around) for i in ids])}
    compare(f"{title}, weighted sum", calls, read)

    def both_ops(x, ids, *w):
        gate, up, down, gate_bias, up_bias, bias, wide_in, back = w
        y = wide(x, ids, gate, up, gate_bias, up_bias, wide_in)
        return expert_sum(y, ids, weights, down, bias, x, back)

    def in_turn(x, ids, *w):
        return x + moe_ffn(x, ids, weights.astype(x.dtype), *w[:6], **options)

    rest = gate, up, down, gate_bias, up_bias, bias, both, back
    given = [(x, i, *rest) for i in ids]
    calls = {"ours": (both_ops, given), "in turn": (in_turn, given)}
    compare(f"{title}, all", calls, 3 * read)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks expert_slots", description=__doc__
    )
    parser.add_argument("--tokens", default="1,4,8")
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
        return 2
    for name, (layer, kinds) in LAYERS.items():
        for kind in kinds:
            for tokens in map(int, options.tokens.split(",")):
                measure(name, layer, kind, tokens)
    return 0
