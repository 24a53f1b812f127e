"""Products with packed rows: one launch for few activations, decoded weights for many.

    python -m benchmarks interleaved_matmul [--qtype Q4_K] [--rows 1] [--shape 8x512]

Microseconds by the device's clock, the operands of each call its own; beside them XLA
with weights of bfloat16, and what the bytes take at the rate of a copy. With --out DIR
they are kept for `pages --add`.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks._records import OURS, Figure
from benchmarks._rows import Rows, figure
from benchmarks._time import (
    JaxProgram,
    Program,
    copy_rate,
    device_alone,
    seconds_in_turn,
)
from jaxkern import InterleavedTensor, quantized_matmul
from jaxkern.primitives.quant.tile_formats import TILE_FORMATS

SHAPES = "28672x8192,14336x4096,4096x4096,4096x14336"
ROTATED = 2.5e8  # bytes: more than the L2 cache holds


def packed(qtype: str, f: int, d: int) -> list[InterleavedTensor]:
    """Random bytes, as many weights as are rotated."""
    form = TILE_FORMATS[qtype]
    tile_bytes = 16 * d // form.elements * form.bytes
    count = max(2, int(ROTATED // (f // 16 * tile_bytes)) + 1)
    shape = (f // 16, tile_bytes)
    keys = jax.random.split(jax.random.key(0), count)
    return [InterleavedTensor(jax.random.bits(k, shape, "uint8"), qtype) for k in keys]


def dense(f: int, d: int) -> list[jax.Array]:
    count = max(2, int(ROTATED // (2 * f * d)) + 1)
    keys = jax.random.split(jax.random.key(1), count)
    return [jax.random.normal(k, (f, d), jnp.bfloat16) for k in keys]


def options_of(name: str, about: str | None, arguments: list[str]):
    """Shapes, types and numbers of activations; None without a GPU, in words."""
    parser = argparse.ArgumentParser(prog=f"benchmarks {name}", description=about)
    parser.add_argument("--qtype", default="Q4_K,Q6_K,Q8_0")
    parser.add_argument("--rows", default="1,16,64,4096")
    parser.add_argument("--shape", default=SHAPES)
    add_kept(parser)
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
        return None
    return options


def add_kept(parser: argparse.ArgumentParser) -> None:
    """The options of a benchmark whose figures become rows of a record."""
    about = 'cases of records alone: "Q4_K 28672x8192, 16 rows"'
    parser.add_argument("--shapes", nargs="*", help=about)
    parser.add_argument("--out", type=Path, help="folder for the figures")


Product = tuple[str, int, int, int]
"""kind of weights, f, d and the number of activations"""


def products(options: argparse.Namespace, kinds: str) -> Iterator[Product]:
    """Those that --shapes names; else of all shapes, kinds and numbers."""
    if not options.shapes:
        rows = [*map(int, options.rows.split(","))]
        shapes = [[*map(int, s.split("x"))] for s in options.shape.split(",")]
        for (f, d), kind, m in itertools.product(shapes, kinds.split(","), rows):
            yield kind, f, d, m
        return
    for name in options.shapes:
        case, _, which = name.rpartition(", ")
        kind, _, shape = case.rpartition(" ")
        f, d = map(int, shape.split("x"))
        yield kind, f, d, int(which.split()[0])


def activations(rows: int, d: int) -> jax.Array:
    return jax.random.normal(jax.random.key(2), (rows, d), jnp.bfloat16)


def cases(options: argparse.Namespace) -> Iterator[tuple[int, int, int, jax.Array]]:
    """(f, d, number of activations, activations)"""
    for _, f, d, rows in products(options, ""):
        yield f, d, rows, activations(rows, d)


def compare(
    title: str,
    calls: Mapping[str, tuple[Callable, Sequence[tuple]]],
    num_bytes: int,
    peers: dict[str, Program] | None = None,
) -> dict[str, float]:
    """Prints the time of each function over its operands, in turn, and of peers."""
    with device_alone():
        programs: dict[str, Program] = {
            name: JaxProgram.of(f, given) for name, (f, given) in calls.items()
        }
        programs |= peers or {}
        for program in programs.values():
            program.warm()
        seconds = seconds_in_turn(programs)
    found = ", ".join(f"{name} {1e6 * seconds[name]:.1f} us" for name in programs)
    limit = 1e6 * num_bytes / copy_rate()
    print(f"{title}: {found}, its bytes {limit:.1f}", flush=True)
    return seconds


def keep(
    kept: Rows,
    product: Product,
    names: dict[str, str],
    seconds: dict[str, float],
    num_bytes: int,
) -> None:
    """A row of a product; `names` are the record's for those that are printed."""
    kind, f, d, rows = product
    flops = 2.0 * rows * f * d
    by: dict[str, Figure] = {}
    for name, s in seconds.items():
        known = names.get(name, name)
        ours = known.startswith(OURS)
        by[known] = figure(s, num_bytes, flops) if ours else round(1e6 * s, 2)
    which = f"{rows} row{'s' * (rows > 1)}"
    limit = round(1e6 * num_bytes / copy_rate(), 1)
    kept.add(f"{kind} {f}x{d}".strip(), which, by, bytes=limit)


def main(arguments: list[str]) -> int:
    options = options_of("interleaved_matmul", __doc__, arguments)
    if options is None:
        return 2
    kept = Rows("interleaved_matmul", "packed rows", "us", options.out)
    for product in products(options, options.qtype):
        qtype, f, d, rows = product
        x, packs = activations(rows, d), packed(qtype, f, d)
        calls = {
            "ours": (quantized_matmul, [(x, w) for w in packs]),
            "bfloat16 by XLA": (jnp.inner, [(x, w) for w in dense(f, d)]),
        }
        size = packs[0].nbytes
        seconds = compare(f"{qtype} {f}x{d} M={rows}", calls, size)
        keep(kept, product, {"ours": OURS}, seconds, size)
    return 0
