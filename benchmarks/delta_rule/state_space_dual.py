"""State-space duality (Mamba-2): XLA, flash-linear-attention and ours.

Heads of 64, states of 128 numbers a column, bfloat16. flash-linear-attention has the
same sums as `simple_gla`, whose value is step * x, and which takes as many key heads as
value heads: scaling and repeating are part of its time.
"""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run

H, STATE, CHUNK = 64, 128, 64


def case(rows: int, t: int, heads: int, reference: bool = False) -> Case:
    def arrays(key):
        x, step, a, b, c = jax.random.split(key, 5)
        return (
            jax.random.normal(x, (rows, t, heads, H), jnp.bfloat16),
            jax.nn.softplus(jax.random.normal(step, (rows, t, heads)) - 3),
            -jnp.exp(jax.random.uniform(a, heads, maxval=2.7)),
            jax.random.normal(b, (rows, t, 1, STATE), jnp.bfloat16),
            jax.random.normal(c, (rows, t, 1, STATE), jnp.bfloat16) * STATE**-0.5,
        )

    tokens = float(rows * t)
    forward = tokens * (4 * H * heads + 4 * heads + 4 * STATE)
    forward += 4 * rows * heads * H * STATE
    # x, dy, dx; step, dstep; b, c and their gradients
    backward = tokens * (6 * H * heads + 8 * heads + 8 * STATE)
    # of a token and head: two products with the state, two within the chunk
    flops = 2 * tokens * heads * (2 * H * STATE + CHUNK * (STATE + H))
    small = None if t <= 1024 else case(1, 1024, heads)
    name = f"{rows}x{t}, {heads} heads"
    return Case(
        name, arrays, (forward, backward), (flops, 2.5 * flops), reference, small
    )


def fla(case, *tensors):
    from fla.ops.simple_gla import chunk_simple_gla

    def run(x, step, a, b, c):
        value = (step.to(x.dtype)[..., None] * x).contiguous()
        key, query = (y.expand(-1, -1, x.shape[2], -1).contiguous() for y in (b, c))
        return chunk_simple_gla(query, key, value, step * a, scale=1.0)[0]

    return run


BENCHMARK = Benchmark(
    "state_space_dual",
    lambda *operands: jaxkern.state_space_dual(*operands)[0],
    [
        case(1, 4096, 48, reference=True),  # Granite 4, small
        case(8, 4096, 80, reference=True),
        case(1, 32768, 128),
        case(1, 1, 48, reference=True),  # a decoding step
        case(32, 1, 48, reference=True),
    ],
    torch_peers={"fla": fla},
)


def main(arguments):
    return run(BENCHMARK, arguments)
