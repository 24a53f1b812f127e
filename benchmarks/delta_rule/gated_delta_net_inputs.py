"""What a gated delta net's rule reads, out of its product: one operator, and four.

"one by one" are a slice, causal_conv1d, two of l2_norm and more slices. In Qwen3-Next's
sizes: 16 key heads and 32 value heads of 128, a gate as wide as the values.
"""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run

KEYS, VALUES, HEADS, DIM, GATES = 2048, 4096, 16, 128, 64
CONVOLVED = 2 * KEYS + VALUES


def case(b: int, t: int) -> Case:
    columns = CONVOLVED + VALUES + GATES

    def arrays(key):
        x, weight = jax.random.split(key)
        return (
            jax.random.normal(x, (b, t, columns), jnp.bfloat16),
            jax.random.normal(weight, (CONVOLVED, 4), jnp.bfloat16),
        )

    whole, convolved = 2.0 * b * t * columns, 2.0 * b * t * CONVOLVED
    return Case(f"{b}x{t}, 16/32 heads", arrays, (2 * whole, 2 * whole + convolved))


def together(x, weight):
    sizes = dict(key_heads=HEADS, key_dim=DIM, gate_columns=VALUES)
    return jaxkern.gated_delta_net_inputs(x, weight, **sizes)


def one_by_one(x, weight):
    part, gate, rest = jnp.split(x, (CONVOLVED, CONVOLVED + VALUES), axis=-1)
    y, _ = jaxkern.causal_conv1d(part, weight, activation="silu")
    query, key, value = jnp.split(y, (KEYS, 2 * KEYS), axis=-1)
    query, key = (
        jaxkern.l2_norm(a.reshape(*a.shape[:2], HEADS, DIM)) for a in (query, key)
    )
    return query, key, value, gate, rest


BENCHMARK = Benchmark(
    "gated_delta_net_inputs",
    together,
    [case(4, 2048), case(1, 32768)],
    jax_peers={"one by one": one_by_one},
)


def main(arguments):
    return run(BENCHMARK, arguments)
