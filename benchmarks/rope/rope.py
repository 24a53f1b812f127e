"""Rotation of queries and keys together, by a given table."""

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run, torch_compiled


def case(name: str, tokens: int, heads: int, h: int, pairs: int) -> Case:
    def arrays(key):
        x = jax.random.normal(key, (1, tokens, heads, h), jnp.bfloat16)
        cos, sin = jaxkern.rope_cos_sin(jnp.arange(tokens), 2 * pairs)
        return x, cos, sin

    tensor, table = 2.0 * tokens * heads * h, 8.0 * tokens * pairs
    return Case(name, arrays, (2 * tensor + table, 2 * tensor + table))


def rotate(x, cos, sin):
    fixed = jax.lax.stop_gradient((cos, sin))
    return jaxkern.apply_rope(x, *fixed)


def rotate_torch(torch, x, cos, sin):
    pairs = cos.shape[-1]
    a, b, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    cos, sin = cos[:, None], sin[:, None]
    turned = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat([*(y.to(x.dtype) for y in turned), rest], -1)


BENCHMARK = Benchmark(
    "rope",
    rotate,
    [
        case("llama3_8b_8192", 8192, 40, 128, 64),
        case("llama3_8b_65536", 65536, 40, 128, 64),
        case("qwen3_next_partial", 16384, 18, 256, 32),
    ],
    torch_peers={"torch.compile": torch_compiled(rotate_torch)},
    floats=(0,),
)


def main(arguments):
    return run(BENCHMARK, arguments)
