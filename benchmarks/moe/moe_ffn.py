"""A layer of experts, bf16: XLA and ours, both passes; few tokens for inference.

Of few tokens reading the experts that they reach decides. Beside the layer stands what
one writes with JAX alone: rows sorted by expert, and three times `lax.ragged_dot`.
"""

import jax
import jax.numpy as jnp
from jax import lax

import jaxkern
from benchmarks._gpu import Benchmark, Case, run


def layer(tokens: int, d: int = 2048, f: int = 512, e: int = 256, k: int = 8) -> Case:
    def arrays(key):
        keys = jax.random.split(key, 5)
        logits = jax.random.normal(keys[4], (tokens, e))
        shapes = (tokens, d), (e, f, d), (e, f, d), (e, d, f)
        x, gate, up, down = (
            jax.random.normal(key, s, jnp.bfloat16) / (1 if i == 0 else d**0.5)
            for i, (key, s) in enumerate(zip(keys, shapes, strict=False))
        )
        weights, ids = jaxkern.route(logits, k)
        return x, ids, weights.astype(jnp.bfloat16), gate, up, down

    reached = e * (1 - (1 - k / e) ** tokens)  # experts, in the mean
    weights = 3 * 2.0 * reached * f * d
    product = 3 * 2.0 * tokens * k * f * d
    name = f"{tokens} tokens of {d}, {k} of {e} experts of {f}"
    moved = weights + 4.0 * tokens * d
    # in float64 the weights of all experts would take 6 GB
    small = None if e <= 16 else layer(min(tokens, 64), 256, 128, 16, k)
    return Case(name, arrays, (moved, 2 * moved), (product, 2 * product), checked=small)


def by_ragged_dot(x, ids, weights, gate, up, down):
    order = jnp.argsort(ids.reshape(-1))
    sizes = jnp.bincount(ids.reshape(-1), length=gate.shape[0]).astype(jnp.int32)
    token = order // ids.shape[1]

    def product(rows, w):
        return lax.ragged_dot(rows, w.mT, sizes)

    rows = x[token]
    hidden = jax.nn.silu(product(rows, gate)) * product(rows, up)
    rows = product(hidden, down) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[token].add(rows)


LAYER = Benchmark(
    "moe_ffn",
    jaxkern.moe_ffn,
    [layer(8192)],
    jax_peers={"lax.ragged_dot": by_ragged_dot},
    floats=(0, 2, 3, 4, 5),
)
FEW = Benchmark(
    "moe_ffn_few",
    jaxkern.moe_ffn,
    [layer(t) for t in (1, 2, 4, 8, 16, 32)],
    differentiable=False,
)
BENCHMARKS = [LAYER, FEW]
BENCHMARK = LAYER


def main(arguments):
    return max(run(b, arguments) for b in BENCHMARKS)
