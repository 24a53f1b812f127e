"""Group normalisation of images, bf16: XLA, torch.compile and ours."""

import functools

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import Benchmark, Case, run, torch_compiled

GROUPS, EPS = 32, 1e-5


def case(name: str, *shape: int) -> Case:
    """An image batch [b, channels, height, width]."""

    def arrays(key):
        keys = jax.random.split(key, 3)
        shapes = shape, shape[1:2], shape[1:2]
        return tuple(
            jax.random.normal(k, s, jnp.bfloat16)
            for k, s in zip(keys, shapes, strict=True)
        )

    size = 2.0
    for n in shape:
        size *= n
    return Case(name, arrays, (2 * size, 3 * size))


def by_torch(torch, x, weight, bias):
    return torch.nn.functional.group_norm(x, GROUPS, weight, bias, EPS)


BENCHMARK = Benchmark(
    "group_norm",
    functools.partial(jaxkern.group_norm, groups=GROUPS, eps=EPS),
    [
        case("unet_64x64", 16, 320, 64, 64),
        case("unet_32x32", 16, 640, 32, 32),
        case("unet_8x8", 16, 1280, 8, 8),
        case("vae_128x128", 8, 256, 128, 128),
        case("vae_512x512", 1, 128, 512, 512),
    ],
    torch_peers={"torch.compile": torch_compiled(by_torch)},
)


def main(arguments):
    return run(BENCHMARK, arguments)
