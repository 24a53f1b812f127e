"""The norm before a mixture of experts and the choice, of a few tokens: ours and XLA's.

python -m benchmarks norm_route [--tokens 1,8]
"""

import argparse
import functools

import jax
import jax.numpy as jnp

from benchmarks.quant.interleaved_matmul import compare
from jaxkern import backend
from jaxkern.primitives.moe.norm_route import norm_route_p

SETS = 8  # of routers, which are rotated
CASES = {  # dims, experts, chosen, whether one is shared
    "gpt-oss-20b": (2880, 32, 4, False),
    "Qwen3.6-35B-A3B": (2048, 256, 8, True),
}


def by_xla(f, *operands):
    with backend("xla"):
        return f(*operands)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks norm_route", description=__doc__)
    parser.add_argument("--tokens", default="1,8")
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
        return 2
    for name, (d, e, k, shared) in CASES.items():
        choose = functools.partial(
            norm_route_p,
            eps=1e-6,
            shared=shared,
            k=k,
            score="softmax",
            normalize=True,
            num_groups=1,
            top_groups=1,
            group_score="max",
            scaling_factor=1.0,
        )
        for tokens in map(int, options.tokens.split(",")):
            keys = jax.random.split(jax.random.key(tokens), SETS)
            x = jax.random.normal(keys[0], (tokens, d), jnp.bfloat16)
            around = None, None, jnp.ones(d) / d if shared else None
            given = [
                (x, jnp.ones(d), jax.random.normal(key, (e, d)), *around)
                for key in keys
            ]
            calls = {
                "ours": (choose, given),
                "XLA": (functools.partial(by_xla, choose), given),
            }
            compare(f"{name}, {tokens} tokens", calls, 4 * e * d)
    return 0
