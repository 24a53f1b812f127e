"""AdamW over the leaves of real models, donated: XLA, optax, torch (fused) and ours.

Each figure is one step of a loop inside one executable, whose state is updated in
place. The limit is 28 bytes a float32 parameter, 22 with bfloat16 parameters.
"""

import argparse
import functools
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

import jaxkern
from benchmarks._gpu import CONSOLE, REPEATS, copy_rate, versions

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1
STEPS = 60  # of one call: the host takes milliseconds for its 1200 arrays


def llama(layers: int, d: int, f: int, kv: int, v: int) -> list[tuple[int, ...]]:
    """Shapes of a model with 9 leaves a layer."""
    layer = [(d, d), (kv, d), (kv, d), (d, d), (f, d), (f, d), (d, f), (d,), (d,)]
    return [(v, d), (d,), *layer * layers]


MODELS = {
    "smollm2 135M, 272 leaves": llama(30, 576, 1536, 192, 49152),
    "1.1B, 200 leaves": llama(22, 2048, 5632, 256, 32000),
    "300 leaves of 65536": [(256, 256)] * 300,
    "300 leaves of 1e6": [(1000, 1000)] * 300,
}


@functools.cache
def normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def draw(shapes: list, dtype: str) -> tuple[list, list, list, list]:
    """Leaf by leaf: XLA takes minutes over one function that draws 600 of them."""
    params, grads = (
        [normal(seed, s, dtype) * (1 + k / 512) for k, s in enumerate(shapes)]
        for seed in (0, 1)
    )
    return params, grads, *([jnp.zeros(s) for s in shapes] for _ in range(2))


def ours(backend: str) -> Callable:
    def step(t, state, grads):
        with jaxkern.backend(backend):
            return jaxkern.adamw_update(
                state[0],
                grads,
                *state[1:],
                t,
                learning_rate=LEARNING_RATE,
                weight_decay=WEIGHT_DECAY,
            )

    return step


def by_optax() -> tuple[Callable, Callable]:
    import optax

    optimiser = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def step(t, state, grads):
        del t
        params, inner = state
        updates, inner = optimiser.update(grads, inner, params)
        return optax.apply_updates(params, updates), inner

    def start(params):
        def in_float32(x):
            floating = jnp.issubdtype(x.dtype, jnp.floating)
            return x.astype(jnp.float32) if floating else x

        return params, jax.tree.map(in_float32, optimiser.init(params))

    return step, start


def seconds(step: Callable, state: Any, grads: list) -> tuple[float, list]:
    """(seconds of one step, the parameters after the first STEPS steps)."""

    def steps(state, grads):
        return jax.lax.fori_loop(1, STEPS + 1, lambda t, s: step(t, s, grads), state)

    run = jax.jit(steps, donate_argnums=0).lower(state, grads).compile()
    state = run(state, grads)
    first = [x + 0 for x in state[0][:4]]
    times = []
    for _ in range(REPEATS):
        jax.block_until_ready(state)
        begin = time.perf_counter()
        state = run(state, grads)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - begin) / STEPS)
    return statistics.median(times), first


def torch_seconds(params: list, grads: list) -> float:
    import torch

    tensors = [torch.from_dlpack(x).clone().requires_grad_() for x in params]
    for t, g in zip(tensors, grads, strict=True):
        t.grad = torch.from_dlpack(g).clone()
    optimiser = torch.optim.AdamW(
        tensors, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )
    times = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(STEPS):
            optimiser.step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / STEPS)
    return statistics.median(times[1:])


def difference(found: list, expected: list) -> float:
    """The largest relative distance of the leaves that were kept."""
    return max(
        float(
            jnp.linalg.norm(jnp.ravel(y).astype(jnp.float32) - jnp.ravel(e))
            / jnp.linalg.norm(jnp.ravel(e).astype(jnp.float32))
        )
        for y, e in zip(found, expected, strict=True)
    )


def measure(
    shapes: list, dtype: str, peers: bool
) -> Iterator[tuple[str, float, float]]:
    """Of each implementation (name, seconds, distance from XLA's parameters)."""
    expected = None
    for name in ("XLA", "jaxkern", "optax"):
        if name == "optax" and not (peers and importlib.util.find_spec("optax")):
            continue
        params, grads, m, v = draw(shapes, dtype)
        if name == "optax":
            step, start = by_optax()
            state = start(params)
        else:
            step = ours("triton" if name == "jaxkern" else "xla")
            state = params, m, v
        time_, first = seconds(step, state, grads)
        expected = expected or first
        yield name, time_, difference(first, expected)
        del params, grads, m, v, state
        jax.clear_caches()
    if peers and importlib.util.find_spec("torch"):
        params, grads, _, _ = draw(shapes, dtype)
        yield "torch, fused", torch_seconds(params, grads), float("nan")


def main(arguments) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks adamw")
    parser.add_argument("--peers", action="store_true", help="also measure peers")
    parser.add_argument("--shapes", nargs="*", help="names of models, by their start")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
        return 2
    for model, shapes in MODELS.items():
        if options.shapes and not model.startswith(tuple(options.shapes)):
            continue
        table = Table(title=f"adamw, {model}: device time of a step in place")
        for column in ("dtype", "by", "from XLA", "us", "% of copy rate"):
            table.add_column(column, justify="right" if column in ("us",) else "left")
        size = sum(map(math.prod, shapes))
        for dtype in options.dtypes:
            width = 28 if dtype == "float32" else 22
            for name, time_, distance in measure(shapes, dtype, options.peers):
                share = 100 * width * size / copy_rate() / time_
                cells = f"{distance:.1e}", f"{time_ * 1e6:.1f}", f"{share:.1f}"
                table.add_row(dtype, name, *cells)
        CONSOLE.print(table)
    CONSOLE.print(f"copy {copy_rate() / 1e12:.2f} TB/s; {versions()}")
    return 0
