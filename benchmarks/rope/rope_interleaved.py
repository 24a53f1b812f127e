"""Rotation of neighbouring dims by a given table."""

import jax

import jaxkern
from benchmarks._gpu import Benchmark, run, torch_compiled
from benchmarks.rope.rope import case


def rotate(x, cos, sin):
    fixed = jax.lax.stop_gradient((cos, sin))
    return jaxkern.apply_rope(x, *fixed, pairing="interleaved")


def rotate_torch(torch, x, cos, sin):
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return (
        torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)
    )


BENCHMARK = Benchmark(
    "rope_interleaved",
    rotate,
    [
        case("llama3_8b_8192", 8192, 40, 128, 64),
        case("llama3_8b_65536", 65536, 40, 128, 64),
    ],
    torch_peers={"torch.compile": torch_compiled(rotate_torch)},
    floats=(0,),
)


def main(arguments):
    return run(BENCHMARK, arguments)
