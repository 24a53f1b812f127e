"""Queries, keys and values out of one product, the first two rotated, and back."""

import functools

import jax

import jaxkern
from benchmarks._gpu import Benchmark, run, torch_compiled
from benchmarks.rope.rope import case
from benchmarks.rope.rope import rotate_torch as rotated

KV_HEADS = 16


def take_out(qkv, cos, sin):
    fixed = jax.lax.stop_gradient((cos, sin))
    return jaxkern.qkv_rope(qkv, *fixed, kv_heads=KV_HEADS)


def take_out_torch(torch, qkv, cos, sin):
    turned, value = qkv[..., :-KV_HEADS, :], qkv[..., -KV_HEADS:, :]
    query, key = turned[..., :-KV_HEADS, :], turned[..., -KV_HEADS:, :]
    turn = functools.partial(rotated, torch)
    return turn(query, cos, sin), turn(key, cos, sin), value.contiguous()


BENCHMARK = Benchmark(
    "qkv_rope",
    take_out,
    [
        case("llama_1b_16384", 16384, 48, 128, 64),
        case("llama_1b_2048", 2048, 48, 128, 64),
    ],
    torch_peers={"torch.compile": torch_compiled(take_out_torch)},
    floats=(0,),
)


def main(arguments):
    return run(BENCHMARK, arguments)
