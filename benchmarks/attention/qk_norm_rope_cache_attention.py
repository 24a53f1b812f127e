"""A decode step between two products of a layer, bf16: one launch, two ops, XLA.

    python -m benchmarks qk_norm_rope_cache_attention [--batch 1 4] [--length 512 3900]

The loop is that of `qk_norm_rope_cache`: the time of one layer inside an executable of
many layers, each with a cache of its own, of which `--length` tokens are there. Two ops
are `qk_norm_rope_cache` and `attention`.
"""

import argparse
import functools

import jax
from rich.console import Console
from rich.table import Table

import jaxkern
from benchmarks._report import versions
from benchmarks._time import copy_rate
from benchmarks.kv_cache import qk_norm_rope_cache as steps


def fused(length, query, key, value, fixed, caches, positions):
    return jaxkern.qk_norm_rope_cache_attention(
        query, key, value, *fixed, *caches, positions + length
    )


def two_ops(length, query, key, value, fixed, caches, positions):
    positions = positions + length
    query, *caches = steps.fused(query, key, value, fixed, caches, positions)
    options = dict(kv_lengths=positions + 1, q_offset=positions, causal=True)
    return jaxkern.attention(query, *caches, **options), *caches


BY = {
    "one launch": (fused, "auto"),
    "two ops": (two_ops, "auto"),
    "XLA": (two_ops, "xla"),
}


def main(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks qk_norm_rope_cache_attention"
    )
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--length", type=int, nargs="*", default=[512, 1500, 3900])
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
        return 2
    title = "qk_norm_rope_cache_attention: microseconds of one layer's step"
    table = Table(title=title)
    for column in ("length", "batch", *BY, "bytes at the copy rate"):
        table.add_column(column, justify="right")
    for length in options.length:
        # slots for these, for what the loop adds, and some that stay empty
        steps.SLOTS = length + 128
        for batch in options.batch:
            cells = [
                f"{microseconds(f, backend, batch, length):.2f}"
                for f, backend in BY.values()
            ]
            read = batch * length * 4.0 * steps.K * steps.H
            floor = (read + steps.bytes_moved(batch, None)) / copy_rate() * 1e6
            table.add_row(str(length), str(batch), *cells, f"{floor:.2f}")
    Console(width=120).print(table)
    print(versions())
    return 0


def microseconds(f, backend, batch, length):
    step = functools.partial(f, length)
    return steps.microseconds(step, backend, batch, 1, None)[0]
