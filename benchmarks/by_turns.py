"""The goals' figures of two checkouts, by turns on one GPU.

    python -m benchmarks by_turns OTHER_CHECKOUT [--only rms_norm attention] [--turns 2]

Each turn is a process with the kernels and benchmarks of one checkout, which measures
our operator alone in the cases that goals name. A figure is the least of its turns. The
table shows both, their ratio, and how far turns of one checkout lie apart: what is no
larger than that is noise.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

PASSES = ("forward", "backward", "both")


def measured(name: str) -> dict[str, dict[str, float]]:
    """{case: {pass: seconds}} of one benchmark, by the checkout of this process."""
    import jax

    from benchmarks import _gpu, goals

    [module_name] = {g.module for g in goals.GOALS if g.record == name}
    find = getattr(goals, "benchmark_of", None)
    find = find or (lambda n: importlib.import_module(f"benchmarks.{n}"))
    module = find(module_name)
    wanted = {g.case for g in goals.GOALS if g.record == name}
    if not hasattr(module, "BENCHMARK"):
        return measured_steps(module, wanted)
    benchmark = goals.benchmark_named(module, name)
    seconds = {}
    for case in benchmark.cases:
        if case.name not in wanted:
            continue
        keys = jax.random.split(jax.random.key(0), _gpu.num_sets(case))
        sets = jax.block_until_ready([jax.jit(case.arrays)(k) for k in keys])
        floats = _gpu.moving(benchmark, sets[0])
        seconds[case.name] = _gpu.measure_jax(benchmark.f, sets, floats)
        jax.clear_caches()
    return seconds


def measured_steps(adamw: ModuleType, wanted: set[str]) -> dict[str, dict[str, float]]:
    """Of the one benchmark whose cases are models: the leaves are updated in place."""
    cases = {f"{m}, {d}": (m, d) for m in adamw.MODELS for d in adamw.WIDTHS}
    return {
        name: {
            "forward": adamw.measure(adamw.MODELS[m], d, False)["jaxkern"]["forward"]
        }
        for name, (m, d) in cases.items()
        if name in wanted
    }


def turn(checkout: Path, name: str) -> dict[str, dict[str, float]]:
    path = os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--measure", name],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        print(f"{name} in {checkout}: {ran.stderr.strip()[-300:]}", flush=True)
        return {}
    return json.loads(ran.stdout.splitlines()[-1])


def compare(name: str, checkouts: tuple[Path, Path], turns: int) -> None:
    found = [[turn(c, name) for c in checkouts] for _ in range(turns)]
    both = [tuple(side) for side in zip(*found, strict=True)]
    keys = [set.intersection(*(set(run) for run in side)) for side in both]
    if not keys[0] & keys[1]:
        print(f"{name}: no case was measured in every turn of both.", flush=True)
    for case in sorted(keys[0] & keys[1]):
        for which in PASSES:
            sides = [[r[case][which] for r in s if which in r[case]] for s in both]
            if not all(sides):
                continue
            (here, other), apart = map(min, sides), max(max(s) / min(s) for s in sides)
            print(
                f"{name:28} {case:28} {which:9} {other * 1e6:9.1f} {here * 1e6:9.1f} "
                f"{here / other:7.3f} {apart - 1:8.1%}",
                flush=True,
            )


def main(arguments: list[str]) -> int:
    from benchmarks.goals import ALWAYS_BESIDE, BY_HAND, GOALS

    parser = argparse.ArgumentParser(prog="python -m benchmarks by_turns")
    parser.add_argument("other", type=Path, help="a checkout to compare with")
    parser.add_argument("--only", nargs="*", help="names of benchmarks")
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args(arguments)
    here = Path(__file__).resolve().parents[1]
    print(
        f"{'benchmark':28} {'case':28} {'pass':9} {'other us':>9} {'here us':>9} "
        f"{'ratio':>7} {'turns':>8}"
    )
    scripts = (*ALWAYS_BESIDE, *BY_HAND)  # print lines of their own
    for name in dict.fromkeys(g.record for g in GOALS if g.module not in scripts):
        if options.only is None or name in options.only:
            compare(name, (here, options.other.resolve()), options.turns)
    return 0


if __name__ == "__main__":  # a turn, with the checkout first on the path
    sys.path[0] = os.getcwd()
    print(json.dumps(measured(sys.argv[sys.argv.index("--measure") + 1])))
