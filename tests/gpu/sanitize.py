"""`python -m tests.gpu.sanitize`: every kernel under NVIDIA's compute-sanitizer.

Runs the fewest calls that reach all kernels of the CUDA table on the GPU, under
memcheck and racecheck, and says of each whether it was clean; `--only softmax` those
whose name has that text. It exits with 1 if one was not.
"""

import argparse
import os
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
CALLS = 6  # of one process, which takes some ten seconds to start
NOT_CLEAN = 9  # exit status of a call with findings
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
    is_clean = ran.returncode == 0 and "SUMMARY: 0 " in ran.stdout
    return "" if is_clean else f"{ran.stdout[-4000:]}\n{ran.stderr[-2000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="append", help="a call to run, as it is")
    parser.add_argument("--only", default="", help="calls whose name has this text")
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if args.run:
        run_calls(args.run)
        return 0
    begun = time.monotonic()
    names = [name for name in FEWEST if args.only in name]
    parts = -(-len(names) // CALLS)
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
    for text in filter(None, said.values()):
        console.print(text, markup=False)
    dirty = sum(map(bool, said.values()))
    console.print(
        f"{len(names)} calls, {dirty} of {len(jobs)} runs not clean, "
        f"{time.monotonic() - begun:.0f} s"
    )
    return int(bool(dirty))


if __name__ == "__main__":
    sys.exit(main())
