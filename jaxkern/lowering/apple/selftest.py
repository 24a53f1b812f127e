"""Runs every op on an Apple GPU, compares with the CPU and writes a report.

    python -m jaxkern.lowering.apple.selftest [--platform mps] [--report FILE]

For whoever has a Mac: attach the report to a bug report, also if all is well. The ops
were lowered and op-checked; numerics verified on CPU; not executed on Apple hardware.
"""

import argparse
import dataclasses
import importlib.metadata
import platform as machine
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.lowering.apple.findings import check
from jaxkern.lowering.apple.plugins import PLATFORMS
from jaxkern.lowering.apple.samples import samples

TOLERANCE = {2: 2e-2, 4: 1e-4}  # of the norm, by the bytes of a float
DISTRIBUTIONS = (
    "jaxkern-ops jax jaxlib jax-mps jax-metallib metaljax jax-graft jax-metal mlx"
).split()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one call.

    Attributes:
      name: of the sample, with " gradient" for its gradient.
      error: largest relative error of a result; None where nothing could be compared.
      trouble: why it counts as failed, or "".
      fused: fused calls in the module of the platform, None where there is no table.
    """

    name: str
    error: float | None
    trouble: str
    fused: int | None

    def __str__(self) -> str:
        verdict = "FAILED" if self.trouble else "ok"
        error = "-" if self.error is None else f"{self.error:.1e}"
        fused = "" if not self.fused else f"  {self.fused} fused"
        return f"{verdict:6} {error:>8}  {self.name}{fused}  {self.trouble}".rstrip()


def run(platform: str) -> list[Outcome]:
    """Every sample and its gradient on the first device of a platform."""
    device, cpu = jax.devices(platform)[0], jax.devices("cpu")[0]
    outcomes = []
    for name, (f, args) in samples().items():
        outcomes.append(compare(name, f, args, device, cpu))
        if has_gradient(f, args):
            outcomes.append(compare(f"{name} gradient", gradient(f), args, device, cpu))
    return outcomes


def compare(name: str, f: Callable, args: tuple, device: Any, cpu: Any) -> Outcome:
    """One call on both devices; an exception of the device is an outcome too."""

    def on(target: Any) -> list[np.ndarray]:
        # a closed-over array belongs to the function: it must be traced anew
        jitted = jax.jit(lambda *args: f(*args))
        with jax.default_device(target):
            return [np.asarray(y) for y in jax.tree.leaves(jitted(*args))]

    fused = None
    try:
        if device.platform in PLATFORMS:
            fused = check(f, *args, platform=device.platform).fused
        args = jax.tree.map(lambda a: jax.device_put(a, device), args)
        actual = on(device)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Outcome(name, None, text[:300], fused)
    args = jax.tree.map(lambda a: jax.device_put(a, cpu), args)
    return judge(name, actual, on(cpu), fused)


def judge(
    name: str,
    actual: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    fused: int | None = None,
) -> Outcome:
    worst = 0.0
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if a.shape != e.shape or a.dtype != e.dtype:
            found = f"result {i} is {a.dtype}{a.shape}, not {e.dtype}{e.shape}"
            return Outcome(name, None, found, fused)
        if not jnp.issubdtype(e.dtype, jnp.floating):
            if (a != e).any():
                return Outcome(name, None, f"result {i}: other integers", fused)
            continue
        tolerance = TOLERANCE[e.dtype.itemsize]
        a, e = a.astype(np.float64), e.astype(np.float64)
        finite = np.isfinite(e)
        if not np.array_equal(a[~finite], e[~finite], equal_nan=True):
            return Outcome(name, None, f"result {i}: other infinities or NaN", fused)
        scale = np.linalg.norm(e[finite])
        error = float(np.linalg.norm(a[finite] - e[finite]) / max(scale, 1e-30))
        error = error if np.isfinite(error) else np.inf
        worst = max(worst, error)
        if error > tolerance and np.any(a != e):
            return Outcome(name, error, f"result {i} differs", fused)
    return Outcome(name, worst, "", fused)


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def has_gradient(f: Callable, args: tuple) -> bool:
    """Are there floats to differentiate by, and floats to differentiate?"""
    inputs = [x for x in args if is_float(x)]
    return bool(inputs) and any(
        map(is_float, jax.tree.leaves(jax.eval_shape(f, *args)))
    )


def gradient(f: Callable) -> Callable:
    """Of a sum that weighs every float result differently, by every float argument."""

    def loss(floats: list, args: tuple) -> jax.Array:
        given = iter(floats)
        out = f(*(next(given) if is_float(x) else x for x in args))
        total = jnp.zeros((), jnp.float32)
        for y in filter(is_float, jax.tree.leaves(out)):
            weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
            kept = jnp.where(jnp.isfinite(y), y, 0).astype(jnp.float32)
            total = total + jnp.sum(weights * jnp.sin(kept))
        return total

    return lambda *args: jax.grad(loss)([x for x in args if is_float(x)], args)


def report(platform: str, outcomes: Sequence[Outcome]) -> str:
    """The text to attach: what is installed, what failed, every outcome."""
    lines = [f"jaxkern self-test on platform {platform}", ""]
    lines.append(f"machine: {machine.platform()}, {machine.machine()}")
    lines.append(f"python: {machine.python_version()}")
    lines.append(f"device: {jax.devices(platform)[0]}")
    for name in DISTRIBUTIONS:
        try:
            lines.append(f"{name}: {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    failed = [o for o in outcomes if o.trouble]
    lines += ["", f"{len(outcomes)} calls, {len(failed)} failed", ""]
    lines += ["verdict   error  call"]
    lines += [str(o) for o in (*failed, *(o for o in outcomes if not o.trouble))]
    return "\n".join(lines) + "\n"


def available() -> str:
    """The first Apple platform that JAX finds here.

    Raises:
      RuntimeError: there is none.
    """
    for name in PLATFORMS:
        try:
            jax.devices(name)
        except RuntimeError:
            continue
        return name
    raise RuntimeError(
        "no Apple platform: install a plugin on a Mac with pip install "
        "'jax-mps>=0.11.1,<0.12', or test the test with --platform cpu."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the self-test; returns 1 if a call failed, 2 if there is no device."""
    parser = argparse.ArgumentParser(prog="python -m jaxkern.lowering.apple.selftest")
    parser.add_argument("--platform", help="default: the first Apple platform found")
    parser.add_argument(
        "--report", type=Path, default=Path("jaxkern-apple-report.txt"), metavar="FILE"
    )
    options = parser.parse_args(arguments)
    try:
        platform = options.platform or available()
        jax.devices(platform)
    except RuntimeError as error:
        print(f"selftest: {error}", file=sys.stderr)
        return 2
    outcomes = run(platform)
    options.report.write_text(report(platform, outcomes))
    failed = sum(bool(o.trouble) for o in outcomes)
    print(f"{len(outcomes)} calls, {failed} failed: {options.report}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
