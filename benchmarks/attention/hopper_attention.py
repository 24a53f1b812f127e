"""`python -m benchmarks hopper_attention`: sizes of the Hopper kernel, in TFLOP/s.

Every variant at every shape, with its error against the Triton kernel, in one run.
"""

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

import jaxkern
from benchmarks._gpu import CONSOLE, Case
from benchmarks._time import device_seconds
from benchmarks._truth import relative_error
from benchmarks.attention.attention import case
from jaxkern.gpu.device import cuda_device
from jaxkern.pallas.attention.attention.problem import TRIED

CASES = {
    "b4_s4096_d128": case(4, 4096, 32, 8, 128),
    "b1_s16384_d128": case(1, 16384, 32, 8, 128),
    "b4_s1024_d128": case(4, 1024, 32, 8, 128),
    "b4_s4096_d64": case(4, 4096, 32, 8, 64),
    "b4_s4096_d256": case(4, 4096, 16, 8, 256),
}


def variants(h: int) -> list[dict[str, int]]:
    """What fits the registers: 232 a thread for 2 consumers, 160 for 3."""
    shapes = {
        64: [(2, 128, 4), (3, 128, 3), (3, 64, 4), (3, 96, 3)],
        128: [(2, 128, 2), (2, 96, 3), (2, 160, 2), (3, 64, 3)],
        256: [(2, 64, 2), (2, 48, 2)],
    }[h]
    found = [
        dict(CONSUMERS=n, BLOCK_K=k, STAGES=stages, OVERLAP=1, TURNS=1, PERSISTENT=1)
        for n, k, stages in shapes
    ]
    for change in ("OVERLAP", "TURNS", "PERSISTENT"):
        found.append(found[0] | {change: 0})
    return found


def attend(backend: str, causal: bool, q: Any, k: Any, v: Any) -> Any:
    with jaxkern.backend(backend, strict=True):
        return jaxkern.attention(q, k, v, causal=causal)


def row(
    name: str, shape: Case, causal: bool, sets: list, expected: Any, backend: str
) -> tuple[str, ...]:
    """Time, TFLOP/s and error of what is tried now, or why it does not run."""

    def f(*x):
        return attend(backend, causal, *x)

    title = " ".join(f"{n.lower()}={v}" for n, v in TRIED.items()) or backend
    case_name = f"{name} {'causal' if causal else 'all'}"
    try:
        error = relative_error(jax.jit(f)(*sets[0]), expected)
        seconds = device_seconds(f, sets)
    except Exception as reason:  # a variant that does not compile is a result too
        return case_name, title, "", "", str(reason).splitlines()[0][:100]
    flops = shape.flops[0]
    if not causal:  # the case counts the pairs of a triangle
        t = sets[0][0].shape[1]
        flops *= 2 * t / (t + 1)
    return (
        case_name,
        title,
        f"{seconds * 1e6:.1f}",
        f"{flops / seconds * 1e-12:.0f}",
        f"{error:.1e}",
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks hopper_attention")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    options = parser.parse_args(arguments)
    if cuda_device() is None:
        print(f"{parser.prog}: needs a CUDA GPU.")
        return 2
    for name, causal in itertools.product(options.cases, (True, False)):
        shape = CASES[name]
        keys = jax.random.split(jax.random.key(0), 4)
        sets = [jax.jit(shape.arrays)(key) for key in keys]
        expected = jax.jit(lambda *x, c=causal: attend("triton", c, *x))(*sets[0])
        expected = expected.astype(jnp.float32)
        table = Table("case", "variant", "us", "TFLOP/s", "error or reason")
        table.add_row(*row(name, shape, causal, sets, expected, "triton"))
        for sizes in variants(sets[0][0].shape[-1]):
            TRIED.update(sizes)
            table.add_row(*row(name, shape, causal, sets, expected, "mosaic_gpu"))
            TRIED.clear()
            jax.clear_caches()
        CONSOLE.print(table)
    return 0
