"""AdamW over the leaves of real models, donated: XLA, optax, torch (fused) and ours.

Each figure is one step of a loop inside one executable, whose state is updated in
place. The limit is 28 bytes a float32 parameter, 22 with bfloat16 parameters.
"""

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._records import write_run
from benchmarks._report import (
    CONSOLE,
    begun,
    limits_line,
    plot,
    table,
)
from benchmarks._time import Program, copy_rate, device_alone, seconds_in_turn

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1
STEPS = 60  # of one call: the host takes milliseconds for its 1200 arrays
WIDTHS = {"float32": 28, "bfloat16": 22}  # bytes a parameter, by its dtype


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


@dataclasses.dataclass
class Steps:
    """STEPS steps in one executable, whose state is updated in place."""

    run: Callable
    state: Any
    grads: list

    @classmethod
    def of(cls, step: Callable, state: Any, grads: list) -> "Steps":
        def steps(state, grads):
            return jax.lax.fori_loop(
                1, STEPS + 1, lambda t, s: step(t, s, grads), state
            )

        run = jax.jit(steps, donate_argnums=0).lower(state, grads).compile()
        return cls(run, state, grads)

    def warm(self) -> None:
        self.state = jax.block_until_ready(self.run(self.state, self.grads))

    def seconds(self) -> float:
        begin = time.perf_counter()
        self.warm()
        return (time.perf_counter() - begin) / STEPS


class TorchSteps:
    """The same through torch.optim, each step one call."""

    def __init__(self, params: list, grads: list) -> None:
        import torch

        tensors = [torch.from_dlpack(x).clone().requires_grad_() for x in params]
        for t, g in zip(tensors, grads, strict=True):
            t.grad = torch.from_dlpack(g).clone()
        self.optimiser = torch.optim.AdamW(
            tensors, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
        )

    def warm(self) -> None:
        self.seconds()

    def seconds(self) -> float:
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(STEPS):
            self.optimiser.step()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e-3 / STEPS


def difference(found: list, expected: list) -> float:
    """The largest relative distance of the leaves that were kept."""
    return max(
        float(
            jnp.linalg.norm(jnp.ravel(y).astype(jnp.float32) - jnp.ravel(e))
            / jnp.linalg.norm(jnp.ravel(e).astype(jnp.float32))
        )
        for y, e in zip(found, expected, strict=True)
    )


def programs(
    shapes: list, dtype: str, peers: bool
) -> tuple[dict[str, Program], dict[str, float]]:
    """All warmed, and the distance of parameters from XLA's after STEPS steps."""
    found: dict[str, Program] = {}
    distance: dict[str, float] = {}
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
        found[name] = steps = Steps.of(step, state, grads)
        with device_alone():
            steps.warm()
        first = [x + 0 for x in steps.state[0][:4]]
        expected = expected or first
        distance[name] = difference(first, expected)
        jax.clear_caches()
    if peers and importlib.util.find_spec("torch"):
        params, grads, _, _ = draw(shapes, dtype)
        found["torch, fused"] = TorchSteps(params, grads)
        with device_alone():
            found["torch, fused"].warm()
    return found, distance


def measure(shapes: list, dtype: str, peers: bool) -> dict[str, dict[str, float]]:
    found, distance = programs(shapes, dtype, peers)
    with device_alone():
        times = seconds_in_turn(found)
    return {
        name: {"forward": t} | ({"error": distance[name]} if name in distance else {})
        for name, t in times.items()
    }


def main(arguments) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks adamw")
    parser.add_argument("--peers", action="store_true", help="also measure peers")
    parser.add_argument("--shapes", nargs="*", help="names of cases, by their start")
    parser.add_argument("--out", type=Path, help="folder for the figures and the plot")
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
        return 2
    record = begun("adamw", {"copy": copy_rate()})
    for model, dtype in itertools.product(MODELS, WIDTHS):
        case = f"{model}, {dtype}"
        if case.startswith(tuple(options.shapes or [case])):
            size = WIDTHS[dtype] * sum(map(math.prod, MODELS[model]))
            record["cases"][case] = {"bytes": (size, 0)}
            record["results"][case] = measure(MODELS[model], dtype, options.peers)
    CONSOLE.print(table(record))
    CONSOLE.print("error: the distance from XLA's parameters. " + limits_line(record))
    if options.out:
        write_run(record, options.out)
        plot(record, options.out / "adamw.png")
    return 0
