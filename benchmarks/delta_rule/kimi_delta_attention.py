"""Kimi delta attention: XLA, flash-linear-attention and ours.

Heads of 128 dims, bfloat16, keys of length one, decays as Kimi Linear begins with.
flash-linear-attention takes g as it is here, a log-decay of each channel.
"""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run

H, CHUNK = 128, 64


def case(b: int, t: int, n: int, reference: bool = False) -> Case:
    def arrays(key):
        query, keys, value, g, beta = jax.random.split(key, 5)

        def unit(key):
            x = jax.random.normal(key, (b, t, n, H))
            return jaxkern.l2_norm(x).astype(jnp.bfloat16)

        return (
            unit(query),
            unit(keys),
            jax.random.normal(value, (b, t, n, H), jnp.bfloat16),
            -jax.nn.softplus(jax.random.normal(g, (b, t, n, H)) - 2),
            jax.nn.sigmoid(jax.random.normal(beta, (b, t, n))),
        )

    rows = float(b * t * n)
    narrow, decays, strengths = 2 * H * rows, 4 * H * rows, 4 * rows
    forward = 4 * narrow + decays + strengths
    backward = 7 * narrow + 2 * decays + 2 * strengths
    # of a token and head: three products with the state, those within the chunk
    flops = 2 * rows * (3 * H * H + 4 * CHUNK * H)
    small = None if t <= 1024 else case(1, 1024, n)
    return Case(
        f"{b}x{t}, {n} heads",
        arrays,
        (forward, backward),
        (flops, 2.5 * flops),
        reference=reference,
        checked=small,
    )


def attended(query, key, value, g, beta):
    return jaxkern.kimi_delta_attention(query, key, value, g, beta)[0]


def fla(case, *tensors):
    from fla.ops.kda import chunk_kda

    return lambda *xs: chunk_kda(*xs)[0]


BENCHMARK = Benchmark(
    "kimi_delta_attention",
    attended,
    [
        case(1, 4096, 16, reference=True),
        case(2, 8192, 16, reference=True),
    ],
    torch_peers={"fla": fla},
    together=True,
)


def main(arguments):
    return run(BENCHMARK, arguments)
