"""Which kernels the cases of a benchmark should run on this device.

    python -m benchmarks tune softmax --shapes 8192x4096 --table tuned.json

`jaxkern.testing.autotune` measures the op alone and with its gradients; the table is
what `jaxkern.tuned` reads.
"""

import argparse
import functools
from pathlib import Path

import jax

from benchmarks._find import benchmark
from benchmarks._gpu import moving, num_sets
from benchmarks._truth import KEY, both_passes
from jaxkern.testing import autotune


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks tune", description=__doc__)
    parser.add_argument("name", help="of the benchmark of an operator")
    parser.add_argument("--shapes", nargs="*", help="names of cases")
    parser.add_argument("--table", type=Path, help="default: that of jaxkern.tuned")
    options = parser.parse_args(arguments)
    measured = benchmark(options.name).BENCHMARK
    known = [case.name for case in measured.cases]
    wanted = options.shapes or known
    if unknown := [name for name in wanted if name not in known]:
        print(f"{', '.join(unknown)}: no such case, but {', '.join(known)}.")
        return 2
    for case in (case for case in measured.cases if case.name in wanted):
        args = case.arrays(KEY)
        tuned = functools.partial(autotune, path=options.table, rotate=num_sets(case))
        print(tuned(measured.f, *args))
        if floats := moving(measured, args):
            y = jax.eval_shape(measured.f, *args)
            dy = jax.tree.map(lambda v: jax.random.normal(KEY, v.shape, v.dtype), y)
            both = functools.partial(both_passes, measured.f, floats)
            print(tuned(both, dy, *args))
    return 0
