"""`python -m tests.gpu.sanitize`: every kernel under NVIDIA's compute-sanitizer.

Runs the fewest calls that reach all kernels of the CUDA table on the GPU, under
memcheck and racecheck, and says of each whether it was clean; `--only softmax route`
those whose name has one of the texts. It exits with 1 if one was not.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from tests.triton.test_fewest_calls import FEWEST, every_call

TOOLS = ("memcheck", "racecheck")
NOT_CLEAN = 9  # exit status of a call with findings
# Lanes of a Triton reduction have sums that differ in the last bit and several write
# theirs to one place: https://github.com/triton-lang/triton/issues/7264. Such a hazard
# is of one instruction with itself.
RACE = re.compile(
    r"Race reported between (\w+ access at \S+) in \S+\n=+ +and (\w+ access at \S+) in"
)
RNG = np.random.default_rng(0)


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
    said = f"{ran.stdout[-4000:]}\n{ran.stderr[-2000:]}"
    races = RACE.findall(ran.stdout)
    only_sums = races and all(one == other for one, other in races)
    if only_sums and "Traceback" not in ran.stderr:
        return ""
    is_clean = ran.returncode == 0 and "SUMMARY: 0 " in ran.stdout
    return "" if is_clean else said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="append", help="a call to run, as it is")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="texts in names of calls"
    )
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--calls", type=int, default=6, help="of one process")
    args = parser.parse_args()
    if args.run:
        run_calls(args.run)
        return 0
    begun = time.monotonic()
    names = [name for name in FEWEST if any(text in name for text in args.only)]
    parts = -(-len(names) // args.calls)
    jobs = [(tool, tuple(names[i::parts])) for tool in args.tools for i in range(parts)]
    said: dict[tuple[str, tuple[str, ...]], str] = {}
    console = Console()
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(findings, *job): job for job in jobs}
        for done in track(as_completed(running), total=len(jobs), console=console):
            tool, calls = job = running[done]
            said[job] = done.result()
            verdict = "not clean" if said[job] else "clean"
            console.print(f"{tool}: {verdict}: {', '.join(calls)}", markup=False)
            console.print(said[job], markup=False, end="")
    dirty = sum(map(bool, said.values()))
    console.print(
        f"{len(names)} calls, {dirty} of {len(jobs)} runs not clean, "
        f"{time.monotonic() - begun:.0f} s"
    )
    return int(bool(dirty))


if __name__ == "__main__":
    sys.exit(main())
