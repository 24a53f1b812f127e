"""A layer of experts of a prompt in 8 bits, beside `moe_ffn` of the same in bfloat16.

    python -m benchmarks moe_ffn_fp8 [--peers]

4096 tokens through layers of models that are in the registry, and of 8 large experts as
Mixtral has them, gate and up in one array as loaders keep them. "bf16" has the weights
in bfloat16, "bf16, decoded first" the stored ones, which the call decodes. Errors are
those of both roundings, against the decoded weights in float64.
"""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run

LAYERS = {  # d, f, experts, chosen
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "Qwen3.6-35B-A3B": (2048, 512, 256, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "Mixtral-8x7B": (4096, 14336, 8, 2),
}


def layer(name: str, tokens: int, d: int, f: int, e: int, k: int) -> Case:
    def arrays(key):
        keys = jax.random.split(key, 5)
        shapes = (e, f, d), (e, f, d), (e, d, f)
        kept = [
            jaxkern.quantize_fp8(
                jax.random.normal(key, s, jnp.bfloat16) / s[-1] ** 0.5, block=(1, 0)
            )
            for key, s in zip(keys, shapes, strict=False)
        ]
        x = jax.random.normal(keys[3], (tokens, d), jnp.bfloat16)
        weights, ids = jaxkern.route(jax.random.normal(keys[4], (tokens, e)), k)
        decoded = [jaxkern.dequantize(w, dtype=jnp.bfloat16) for w in kept]
        gate, up, down = kept
        both = jax.tree.map(lambda *a: jnp.concatenate(a, axis=1), gate, up)
        return x, ids, weights.astype(jnp.bfloat16), both, down, *decoded

    moved = 3.0 * e * f * d + 4.0 * tokens * d
    small = None if tokens <= 64 else layer(name, 64, 256, 128, min(e, 16), k)
    flops = 6.0 * tokens * k * f * d
    title = f"{name}, {tokens} tokens of {d}, {k} of {e} experts of {f}"
    return Case(title, arrays, (moved, 0.0), (flops, 0.0), checked=small)


def in_8_bits(x, ids, weights, *experts):
    both, down, *_ = experts
    return jaxkern.moe_ffn_fp8(x, ids, weights, both, None, down)


def in_bfloat16(x, ids, weights, *experts):
    return jaxkern.moe_ffn(x, ids, weights, *experts[2:])


def decoded_in_the_call(x, ids, weights, *experts):
    both, down, *_ = experts
    return jaxkern.moe_ffn(x, ids, weights, both, None, down)


BENCHMARK = Benchmark(
    "moe_ffn_fp8",
    in_8_bits,
    [layer(name, 4096, *sizes) for name, sizes in LAYERS.items()],
    jax_peers={"bf16": in_bfloat16, "bf16, decoded first": decoded_in_the_call},
    differentiable=False,
)


def main(arguments):
    return run(BENCHMARK, arguments)
