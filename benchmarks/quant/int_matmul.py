"""Products with integers of 4 and 8 bits: ours, the reference, XLA with bfloat16.

"side by side" are the same weights as `interleave` puts them, where it has the format.
Where humming-kernels is installed, its layer of as many bits and groups stands beside
them; its weights are in the layout that it made of them at load.

    python -m benchmarks int_matmul [--kind "int4 by 128"] [--rows 1] [--shape 8x512]

Microseconds by the device's clock, the operands of each call its own, and what the
bytes take at the rate of a copy.
"""

import argparse
import functools
import importlib.util
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._records import OURS
from benchmarks._rows import Rows
from benchmarks._time import Program, TorchProgram
from benchmarks.quant.interleaved_matmul import (
    ROTATED,
    activations,
    add_kept,
    compare,
    dense,
    keep,
    products,
)
from jaxkern import quantize_int, quantized_matmul
from jaxkern.models.packed_parts import in_tiles
from jaxkern.primitives.quant.interleaved_tensor import ROWS
from jaxkern.primitives.quant.tile_blocks import tile_format

SHAPES = "8192x8192,28672x8192"
KINDS = {
    "int4 by 128": functools.partial(quantize_int, bits=4, group_size=128),
    "uint4 by 128": functools.partial(
        quantize_int, bits=4, group_size=128, zero_point=True
    ),
    "int8 by row": functools.partial(quantize_int, bits=8),
}


def drawn(quantize: Callable, f: int, d: int) -> list[Any]:
    """As many weights as are rotated."""

    @jax.jit
    def draw(key):
        return quantize(jax.random.normal(key, (f, d), jnp.bfloat16))

    first = draw(jax.random.key(0))
    count = max(2, int(ROTATED // first.nbytes) + 1)
    return [first, *(draw(jax.random.key(i)) for i in range(1, count))]


HUMMING = {"int4 by 128": {"dtype": "int4", "group_size": 128}}


def humming_layers(kind: str, f: int, d: int, count: int) -> list[Any]:
    """As many layers of random weights, where the package is installed and has them."""
    if kind not in HUMMING or importlib.util.find_spec("humming") is None:
        return []
    import torch
    from humming.layer import HummingLayer

    layers = []
    for _ in range(count):
        layer = HummingLayer(f, d, dict(HUMMING[kind]), torch_dtype=torch.bfloat16)
        layer = layer.cuda()
        layer.load_from_unquantized(torch.randn((f, d), dtype=torch.bfloat16).cuda())
        layer.transform()
        layers.append(layer)
    return layers


def by_humming(layers: list[Any], rows: int) -> dict[str, Program]:
    if not layers:
        return {}
    import torch

    x = torch.randn((rows, layers[0].shape_k), dtype=torch.bfloat16).cuda()

    def product(layer):
        with torch.inference_mode():
            return layer(x)

    return {"humming": TorchProgram(product, [(layer,) for layer in layers])}


def by_reference(x, w):
    with jaxkern.backend("xla"):
        return quantized_matmul(x, w)


def run(
    name: str, about: str | None, kinds: Mapping[str, Callable], arguments: list[str]
) -> int:
    """The lines of each kind, shape and number of activations."""
    parser = argparse.ArgumentParser(prog=f"benchmarks {name}", description=about)
    parser.add_argument("--kind", default=",".join(kinds))
    parser.add_argument("--rows", default="1,4,16,64,4096")
    parser.add_argument("--shape", default=SHAPES)
    add_kept(parser)
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
        return 2
    kept = Rows(name, "products beside bfloat16", "us", options.out)
    found = products(options, options.kind)
    for (kind, f, d), same in itertools.groupby(found, key=lambda one: one[:3]):
        plain, weights = dense(f, d), drawn(kinds[kind], f, d)
        tiled = tile_format(weights[0]) is not None and f % ROWS == 0
        tiles = [in_tiles(w) for w in weights] if tiled else []
        layers = humming_layers(kind, f, d, len(weights))
        # what a model's loader makes is ours
        names = {"ours": OURS}
        if tiles:
            names = {"side by side": OURS, "ours": f"{OURS}, row by row"}
        for product in same:
            rows = product[3]
            x, size = activations(rows, d), weights[0].nbytes
            calls = {
                "ours": (quantized_matmul, [(x, w) for w in weights]),
                "side by side": (quantized_matmul, [(x, w) for w in tiles]),
                "reference": (by_reference, [(x, w) for w in weights[:2]]),
                "bfloat16 by XLA": (jnp.inner, [(x, w) for w in plain]),
            }
            calls = {name: call for name, call in calls.items() if call[1]}
            title, peers = f"{kind} {f}x{d} M={rows}", by_humming(layers, rows)
            seconds = compare(title, calls, size, peers)
            keep(kept, product, names, seconds, size)
    return 0


def main(arguments: list[str]) -> int:
    return run("int_matmul", __doc__, KINDS, arguments)
