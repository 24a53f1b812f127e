"""`python -m benchmarks tune OP...`: measures block sizes, writes the device's table.

Each kernel is tried with every combination of its sizes at every shape of its
benchmark, or at those that are named. What beats the kernel's own rule by more than the
noise is written, by the row's power of 2 and dtype, to
`jaxkern/lowering/tuned/<device>.json` or to --out.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.progress import Progress

import jaxkern
from benchmarks._find import benchmark as benchmark_of
from benchmarks._gpu import CONSOLE, Benchmark, Case, measure_jax, moving, num_sets
from jaxkern.gpu import device as block_sizes

NOISE = 0.02
TABLES = Path(jaxkern.__file__).parent / "lowering" / "tuned"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tune")
    parser.add_argument("ops", nargs="+", help="names of benchmarks")
    parser.add_argument("--out", type=Path, default=TABLES, help="folder of the tables")
    parser.add_argument("--shapes", nargs="*", help="names of cases")
    parser.add_argument("--kernels", nargs="*", help="names in the benchmark's sizes")
    options = parser.parse_args(arguments)
    device = block_sizes.cuda_device()
    if device is None:
        print(f"{parser.prog}: needs a CUDA GPU.")
        return 2
    name = block_sizes.table_name(device.device_kind)
    table = dict(block_sizes.table(name))
    for op in options.ops:
        benchmark = benchmark_of(op).BENCHMARK
        trials = [
            (case, kernel)
            for case, kernel in itertools.product(benchmark.cases, benchmark.sizes)
            if case.name in (options.shapes or [case.name])
            and kernel in (options.kernels or [kernel])
        ]
        for kernel, found in tune(benchmark, trials).items():
            table[kernel] = table.get(kernel, {}) | found
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{name}.json"
    file.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    CONSOLE.print(f"wrote {file}")
    return 0


def tune(
    benchmark: Benchmark, trials: Sequence[tuple[Case, str]]
) -> dict[str, dict[str, dict[str, Any]]]:
    """{kernel: {key: sizes}} where measured sizes beat the rule."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    with Progress(console=CONSOLE, transient=True) as progress:
        for case, kernel in progress.track(trials, description=benchmark.name):
            keys = jax.random.split(jax.random.key(0), num_sets(case))
            sets = [jax.jit(case.arrays)(k) for k in keys]
            backward = "_bwd" in kernel
            floats = moving(benchmark, sets[0]) if backward else []
            which = "backward" if backward else "forward"

            def seconds(f: Callable, sets=sets, floats=floats, which=which) -> float:
                return measure_jax(f, sets, floats)[which]

            rule = seconds(fresh(benchmark.f))
            times = []
            for values in itertools.product(*benchmark.sizes[kernel].values()):
                sizes = dict(zip(benchmark.sizes[kernel], values, strict=True))
                block_sizes.tried[kernel] = sizes
                try:
                    times.append((seconds(fresh(benchmark.f)), sizes))
                except jax.errors.JaxRuntimeError:  # does not fit the device
                    continue
                finally:
                    block_sizes.tried.clear()
                    jax.clear_caches()
            best, sizes = min(times, key=lambda t: t[0])
            CONSOLE.print(
                f"{kernel} at {case.name}: rule {rule * 1e6:.1f} us, "
                f"best {best * 1e6:.1f} us {sizes}"
            )
            if best < (1 - NOISE) * rule:
                x = sets[0][0]
                key = block_sizes.key(x.shape[-1], x.dtype)
                found.setdefault(kernel, {})[key] = sizes
    return found


def fresh(f: Callable) -> Callable:
    """The same function under a new identity: nothing of it is cached."""
    return lambda *args: f(*args)
