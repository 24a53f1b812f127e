"""One token of the gated delta rule: XLA and ours, states donated as in a decode loop.

An executable makes STEPS steps over several states in turn, which together overfill
the L2, and writes each where it was. A time is the device's, of one step of a state.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._gpu import L2_BYTES
from benchmarks._records import write_run
from benchmarks._report import CONSOLE, begun, limits_line, table
from benchmarks._time import (
    Program,
    copy_rate,
    device_alone,
    seconds_in_turn,
    seconds_of_clock,
    seconds_on_device,
)

STEPS, H = 4, 128
# name: sequences, key heads, value heads, dtype of the states
CASES = {
    "B32 H32 128x128 float32": (32, 32, 32, "float32"),
    "B1 H32 128x128 float32": (1, 32, 32, "float32"),
    "B1 k16 H32 128x128 float32": (1, 16, 32, "float32"),
    "B8 H32 128x128 float32": (8, 32, 32, "float32"),
    "B128 H32 128x128 float32": (128, 32, 32, "float32"),
    "B32 H32 128x128 bfloat16": (32, 32, 32, "bfloat16"),
}


def operands(
    b: int, k: int, n: int, dtype: str, channels: tuple[int, ...] = ()
) -> tuple[list, list]:
    """The token of each layer, bfloat16 but for the gates, and its state.

    `channels` are those of a head that have a decay each.
    """
    size = b * n * H * H * jnp.dtype(dtype).itemsize
    layers = max(4, min(64, int(3 * L2_BYTES / size) + 1))

    @jax.jit
    def draw(key):
        keys = jax.random.split(key, 6)
        query, rows = jax.random.normal(keys[0], (2, b, k, H), jnp.bfloat16)
        value = jax.random.normal(keys[1], (b, n, H), jnp.bfloat16)
        g = -jax.random.exponential(keys[2], (b, n, *channels))
        beta = jax.random.uniform(keys[3], (b, n))
        token = (query, jaxkern.l2_norm(rows), value, g, beta)
        return token, jax.random.normal(keys[4], (b, n, H, H), dtype)

    pairs = [draw(key) for key in jax.random.split(jax.random.key(0), layers)]
    tokens, states = zip(*pairs, strict=True)
    return list(tokens), list(states)


def steps(rule: Callable, backend: str, tokens: list, states: list):
    """All outputs and the new states; a layer's output goes into its next value."""
    outs = []
    with jaxkern.backend(backend):
        for _ in range(STEPS):
            for i, (*token, value, g, beta) in enumerate(tokens):
                out, states[i] = rule(*token, value, g, beta, states[i])
                tokens[i] = (*token, out, g, beta)
                outs.append(out)
    return outs, states


@dataclasses.dataclass
class Steps:
    """The steps in one executable, whose states are updated in place."""

    executable: Callable
    tokens: Any
    states: Any
    calls: int

    @classmethod
    def of(cls, made: Callable, tokens: list, states: list) -> "Steps":
        """`made(tokens, states)` gives all outputs and the new states."""
        states = jax.tree.map(lambda x: x + 0, states)

        def run(tokens, states):
            return made(list(tokens), list(states))

        jitted = jax.jit(run, donate_argnums=1).lower(tokens, states)
        return cls(jitted.compile(), tokens, states, STEPS * len(states))

    def run(self):
        out, self.states = self.executable(self.tokens, self.states)
        return out

    def warm(self) -> None:
        jax.block_until_ready(self.run())

    def seconds(self) -> float:
        took = seconds_on_device(self.run, 20e-6 * self.calls)
        return (took - seconds_of_clock()) / self.calls


def bytes_moved(b: int, k: int, n: int, dtype: str, channels: tuple[int, ...]) -> float:
    """The state read and written; the token beside it."""
    gates = 4.0 * b * n * (1 + math.prod(channels))
    tokens = 2.0 * H * (2 * b * k + 2 * b * n) + gates
    return 2.0 * b * n * H * H * jnp.dtype(dtype).itemsize + tokens


def main(arguments):
    return measure("gated_delta_step", jaxkern.gated_delta_step, (), arguments)


def measure(name: str, rule: Callable, channels: tuple[int, ...], arguments):
    """The command line of a step; `channels` as in `operands`."""

    def programs_of(case):
        tokens, states = operands(*CASES[case], channels)
        return {
            who: Steps.of(functools.partial(steps, rule, kernels), tokens, states)
            for who, kernels in (("jaxkern", "auto"), ("XLA", "xla"))
        }

    moved = {case: bytes_moved(*CASES[case], channels) for case in CASES}
    return compare(name, moved, programs_of, arguments)


def compare(
    name: str,
    moved: dict[str, float],
    programs_of: Callable[[str], dict[str, Steps]],
    arguments: list[str],
) -> int:
    """The command line over cases, of which each has `moved` so many bytes."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}")
    parser.add_argument("--shapes", nargs="*", choices=moved, default=list(moved))
    parser.add_argument("--out", type=Path, help="folder for the figures")
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
        return 2
    record = begun(name, {"copy": copy_rate()})
    for case in options.shapes:
        record["cases"][case] = {"bytes": (moved[case], 0.0), "flops": (0.0, 0.0)}
        programs: dict[str, Program] = {**programs_of(case)}
        with device_alone():
            for program in programs.values():
                program.warm()
            times = seconds_in_turn(programs)
        record["results"][case] = {k: {"forward": t} for k, t in times.items()}
        if options.out:
            write_run(record, options.out)
    CONSOLE.print(table(record))
    CONSOLE.print(limits_line(record))
    return 0
