"""The gated delta rule: XLA, jax-linear-attention, flash-linear-attention and ours.

Heads of 128 dims, bfloat16, keys of length one. jax-linear-attention takes as many key
heads as value heads: repeating them is part of its time.
"""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run

H, CHUNK = 128, 64


def case(b: int, t: int, k: int, n: int, reference: bool = False) -> Case:
    def arrays(key):
        query, keys, value, g, beta = jax.random.split(key, 5)

        def unit(key):
            x = jax.random.normal(key, (b, t, k, H))
            return jaxkern.l2_norm(x).astype(jnp.bfloat16)

        return (
            unit(query),
            unit(keys),
            jax.random.normal(value, (b, t, n, H), jnp.bfloat16),
            -jax.nn.softplus(jax.random.normal(g, (b, t, n)) - 2),
            jax.nn.sigmoid(jax.random.normal(beta, (b, t, n))),
        )

    tokens = float(b * t)
    shared, own, gates = 2 * H * tokens * k, 2 * H * tokens * n, 4 * tokens * n
    forward = 2 * shared + 2 * own + 2 * gates
    backward = 4 * shared + 3 * own + 4 * gates
    # of a token and value head: three products with the state, those within the chunk
    flops = 2 * tokens * n * (3 * H * H + 4 * CHUNK * H)
    name = f"{b}x{t}, {k}/{n} heads"
    small = None if t <= 1024 else case(1, 1024, k, n)
    return Case(
        name,
        arrays,
        (forward, backward),
        (flops, 2.5 * flops),
        reference=reference,
        checked=small,
    )


def attended(query, key, value, g, beta):
    return jaxkern.gated_delta_rule(query, key, value, g, beta)[0]


def jla(query, key, value, g, beta):
    from jla.ops.mosaic_gpu.gated_delta_rule import gated_delta_rule

    group = value.shape[2] // key.shape[2]
    query, key = (jnp.repeat(x, group, 2) for x in (query, key))
    return gated_delta_rule(query, key, value, g, beta)[0]


def fla(case, *tensors):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda *xs: chunk_gated_delta_rule(*xs)[0]


BENCHMARK = Benchmark(
    "gated_delta_rule",
    attended,
    [
        case(2, 8192, 16, 16, reference=True),
        case(1, 32768, 16, 32),
        case(8, 4096, 16, 32),
        case(8, 4096, 8, 32),
    ],
    torch_peers={"fla": fla},
    jax_peers={"jla": jla},
    together=True,
)


def main(arguments):
    return run(BENCHMARK, arguments)
