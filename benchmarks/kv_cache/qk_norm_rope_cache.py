"""Norm, rotation and cache write of a decode step, bf16: one launch, the parts, XLA.

The caches are donated, as in a loop of steps: a call moves the new vectors alone. The
time is that of one layer inside an executable of many layers, each with a cache of its
own; beside it the same of the library's separate ops. The neighbours measure their own
steps in the same loop.
"""

import argparse
import functools
import itertools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jaxkern
from benchmarks._report import versions
from benchmarks._time import copy_rate
from jaxkern import Float8Codec, IntCodec, QuantizedVectors, TurboQuantCodec

LAYERS, STEPS, REPEATS = 8, 50, 5
SLOTS, N, K, H = 1024, 32, 8, 128  # Qwen3 8B
PAGE = 64  # a cache is a whole number of them
CODECS = {
    "bf16": None,
    "int8": IntCodec(8),
    "int4 g32": IntCodec(4, group=32),
    "float8": Float8Codec(),
    "turboquant 4": TurboQuantCodec(4),
}


def fused(query, key, value, fixed, caches, positions):
    op = jaxkern.qk_norm_rope_quantized_cache
    if not isinstance(caches[0], QuantizedVectors):
        op = jaxkern.qk_norm_rope_cache
    return op(query, key, value, *fixed, *caches, positions)


def separate(query, key, value, fixed, caches, positions):
    weights, tables = fixed
    query, key = jaxkern.qk_norm_rope(query, key, *weights, *tables)
    write = jaxkern.update_quantized_kv_cache
    if not isinstance(caches[0], QuantizedVectors):
        write = jaxkern.update_kv_cache
    pairs = zip(caches, (key, value), strict=True)
    return query, *(write(cache, x, positions) for cache, x in pairs)


def steps(f, backend, state, fixed, heads):
    """Each layer's query goes to the next one; keys and values count anew each time."""

    def step(state, _):
        query, layers, positions = state
        # else XLA would rotate the keys once, before the loop
        now, positions = jax.lax.optimization_barrier((heads, positions))
        after = []
        with jaxkern.backend(backend):
            for (key, value), caches in zip(now, layers, strict=True):
                query, *caches = f(query, key, value, fixed, caches, positions)
                after.append(tuple(caches))
        return (query, tuple(after), positions + 1), None

    return jax.lax.scan(step, state, length=STEPS)[0]


def operands(batch, tokens, codec):
    def draw(seed, heads):
        shape = (batch, tokens, heads, H)
        return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)

    def cache():
        shape = (batch, SLOTS + -(-tokens // PAGE) * PAGE, K, H)
        if codec is None:
            return jnp.zeros(shape, jnp.bfloat16)
        return QuantizedVectors.zeros(shape, codec)

    positions = jnp.arange(batch) % 64
    weights = jnp.ones(H, jnp.bfloat16), jnp.ones(H, jnp.bfloat16)
    at = positions[:, None] + jnp.arange(tokens)
    fixed = weights, jaxkern.rope_cos_sin(at, H)
    heads = tuple((draw(2 * i, K), draw(2 * i + 1, K)) for i in range(LAYERS))
    layers = tuple((cache(), cache()) for _ in range(LAYERS))
    return (draw(99, N), layers, positions), fixed, heads


def microseconds(f, backend, batch, tokens, codec):
    """Of one layer, the best of several runs, and the bytes that XLA needs beside."""
    state, fixed, heads = operands(batch, tokens, codec)
    run = jax.jit(functools.partial(steps, f, backend), donate_argnums=0)
    run = run.lower(state, fixed, heads).compile()
    extra = run.memory_analysis().temp_size_in_bytes
    state = jax.block_until_ready(run(state, fixed, heads))
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        state = jax.block_until_ready(run(state, fixed, heads))
        best = min(best, time.perf_counter() - begin)
    return best * 1e6 / STEPS / LAYERS, extra


def row_bytes(codec):
    """Of one vector in the cache."""
    return 2.0 * H if codec is None else H * codec.bits / 8 + 4 * H / (codec.group or H)


def bytes_moved(tokens, codec):
    """Queries read and written, keys and values read and their rows written."""
    return tokens * (H * (2 * N * 2.0 + 4.0) + 2 * K * (2.0 * H + row_bytes(codec)))


def ways(fused, separate):
    return {
        "one launch": (fused, "triton"),
        "separate ops": (separate, "auto"),
        "XLA": (separate, "xla"),
    }


BY = ways(fused, separate)


def main(arguments):
    return measure("qk_norm_rope_cache", BY, list(CODECS), bytes_moved, arguments)


def measure(name, by, codecs, moved: Callable, arguments):
    """The command line; `by` is {column: (step, backend)}, `moved` the bytes."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 32, 128])
    parser.add_argument("--tokens", type=int, default=1, help="of each sequence")
    parser.add_argument("--codecs", nargs="*", choices=codecs, default=codecs)
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
        return 2
    table = Table(title=f"{name}: microseconds of one layer's step")
    for column in ("cache", "batch", *by, "bytes at the copy rate"):
        table.add_column(column, justify="right")
    for chosen, batch in itertools.product(options.codecs, options.batch):
        codec, tokens = CODECS[chosen], options.tokens
        cells = []
        for f, backend in by.values():
            found, extra = microseconds(f, backend, batch, tokens, codec)
            beside = f" +{extra >> 20} MB" if extra >> 20 else ""
            cells.append(f"{found:.2f}{beside}")
        floor = moved(batch * tokens, codec) / copy_rate() * 1e6
        table.add_row(chosen, str(batch), *cells, f"{floor:.2f}")
    Console(width=120).print(table)
    print(versions())
    return 0
