"""`python -m tests.gpu.sanitize`: every kernel under NVIDIA's compute-sanitizer.

Runs a call of each kernel of the CUDA table on the GPU under memcheck and racecheck, as
few calls as reach all of them, and says for each tool which calls were not clean. With
`--only softmax` the calls whose name, op or kernel has that text. It exits with 1 if a
call is not clean or if a line of the table has no call here.
"""

import argparse
import functools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxkern import (
    attention,
    cross_entropy,
    explain,
    grouped_matmul,
    linear,
    sample,
    softmax,
)
from jaxkern.lowering.cuda import KERNELS
from tests.triton import test_every_kernel as compiled
from tests.triton.test_every_kernel import slopes, spec

TOOLS = ("memcheck", "racecheck")
TINY = 500  # elements: one block, where little can go wrong
NOT_CLEAN = 9  # exit status of a call with findings
RNG = np.random.default_rng(0)

Call = list[tuple[Callable, tuple]]
Kernel = tuple[str, str]  # what `explain` says that runs, and a kernel that it launches


def attend(t: int, s: int, rows: int) -> tuple[Callable, tuple]:
    q, k = spec(rows, t, 8, 128), spec(rows, s, 2, 128)
    return functools.partial(attention, causal=True), (q, k, k)


def losses(logits):
    labels = jnp.zeros(logits.shape[:-1], jnp.int32)
    return cross_entropy(logits, labels, reduction="mean")


def experts(x, w):
    return grouped_matmul(x, w, jnp.full(8, 128, jnp.int32))


LARGE: dict[str, tuple[Callable, tuple]] = {  # what runs Mosaic, or is no case's
    "softmax": slopes(softmax, spec(132, 131_072)),
    "cross_entropy": slopes(losses, spec(64, 128_256)),
    "linear": (linear, (spec(2, 1536), spec(96, 1536))),
    "grouped_matmul": slopes(experts, spec(1024, 512), spec(8, 512, 512)),
    "attention of one query": attend(1, 2048, 66),
    "attention of many": slopes(attend(0, 0, 1)[0], *attend(4096, 4096, 1)[1]),
    "sample": (
        functools.partial(sample, key=jax.random.key(0), top_p=0.9),
        (spec(32, 128_256),),
    ),
}


def every_call() -> dict[str, Callable[[], Call]]:
    calls: dict[str, Callable[[], Call]] = {
        name: lambda call=call: [call]
        for name, call in {**LARGE, **compiled.CALLS}.items()
    }
    for row in compiled.ROWS:
        p, case = row.values
        functions = functools.partial(compiled.functions_of, p, case)
        calls[str(row.id)] = lambda functions=functions: list(functions())
    return calls


def kernels_of(call: Call) -> set[Kernel]:
    return {
        (row.runs, launch.name.rstrip("0123456789"))
        for f, operands in call
        for row in explain(f, *operands, platform="cuda").rows
        for launch in row.launches
    }


def elements(call: Call) -> int:
    leaves = jax.tree.leaves([operands for _, operands in call])
    return sum(math.prod(x.shape) for x in leaves if hasattr(x, "shape"))


def fewest_calls(
    calls: dict[str, Callable[[], Call]], wanted: str
) -> dict[str, set[Kernel]]:
    """Calls and the kernels that each is for; small ones first, the smallest last."""
    made = {name: make() for name, make in calls.items()}
    found: dict[str, set[Kernel]] = {}
    seen: set[Kernel] = set()
    sizes = {name: elements(call) for name, call in made.items()}
    for name in sorted(made, key=lambda name: (sizes[name] < TINY, sizes[name])):
        new = {
            k for k in kernels_of(made[name]) if wanted in " ".join((name, *k))
        } - seen
        if new:
            found[name] = new
            seen |= new
    return found


def without_a_call(found: dict[str, set[Kernel]]) -> list[str]:
    ran = " ".join(runs for kernels in found.values() for runs, _ in kernels)
    return [k.module for k in KERNELS if f"{k.module}." not in ran]


def filled(x: Any) -> Any:
    """Random numbers in the place of a shape."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.asarray(np.abs(RNG.standard_normal(x.shape)), x.dtype)
    return jnp.asarray(RNG.integers(0, 2, x.shape), x.dtype)


def run_calls(names: Iterable[str]) -> None:
    calls = every_call()
    for name in names:
        for f, operands in calls[name]():
            jax.block_until_ready(jax.jit(f)(*jax.tree.map(filled, operands)))


def findings(tool: str, names: tuple[str, ...]) -> str:
    """What the tool printed of these calls, or an empty string if all are clean."""
    calls = [word for name in names for word in ("--run", name)]
    options = ["--tool", tool, "--error-exitcode", str(NOT_CLEAN)]
    flags = "--xla_gpu_autotune_level=0 " + os.environ.get("XLA_FLAGS", "")
    ran = subprocess.run(
        ["compute-sanitizer", *options, sys.executable, "-m", __spec__.name, *calls],
        env={
            **os.environ,
            "XLA_FLAGS": flags,
            "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        },
        capture_output=True,
        text=True,
    )
    is_clean = ran.returncode == 0 and "SUMMARY: 0 " in ran.stdout
    return "" if is_clean else f"{ran.stdout[-4000:]}\n{ran.stderr[-2000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="append", help="a call to run, as it is")
    parser.add_argument("--only", default="", help="calls or kernels with this text")
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if args.run:
        run_calls(args.run)
        return 0
    begun = time.monotonic()
    found = fewest_calls(every_call(), args.only)
    parts = max(1, args.jobs // len(args.tools))
    batches = [tuple(found)[i::parts] for i in range(min(parts, len(found)))]
    jobs = [(tool, names) for tool in args.tools for names in batches]
    with ThreadPoolExecutor(args.jobs) as pool:
        each = pool.map(lambda job: findings(*job), jobs)
        said = list(track(each, "under the sanitizer", total=len(jobs)))
    table = Table("call", "kernels", *args.tools)
    verdicts = {
        (tool, name): "see below" if text else "clean"
        for (tool, names), text in zip(jobs, said, strict=True)
        for name in names
    }
    for name, kernels in found.items():
        launched = ", ".join(sorted({kernel for _, kernel in kernels}))
        table.add_row(name, launched, *(verdicts[tool, name] for tool in args.tools))
    console = Console()
    console.print(table)
    for (tool, names), text in zip(jobs, said, strict=True):
        if text:
            console.print(f"{tool} of {', '.join(names)}:\n{text}", markup=False)
    missing = [] if args.only else without_a_call(found)
    for module in missing:
        console.print(f"{module} has no call here: add one to LARGE.")
    taken = time.monotonic() - begun
    console.print(
        f"{len(found)} calls, {sum(map(bool, said))} of {len(jobs)} not clean"
    )
    console.print(f"{taken:.0f} s")
    return int(any(said) or bool(missing))


if __name__ == "__main__":
    sys.exit(main())
