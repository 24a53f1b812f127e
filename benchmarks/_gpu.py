"""How an operator is measured on a GPU: errors first, then device time beside limits.

Every figure is the time of one call inside an executable that makes several calls on
different buffers, so neither Python nor the cache is measured. The executable is queued
behind a kernel that waits, and the device's own clock is read before and after it: a
launch takes the host up to 20 us, more than many kernels take. The two ceilings, a copy
and a matrix product, are measured in the same run.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jaxkern
from jaxkern.triton.triton_call import jit, tl, triton_call

CONSOLE = Console(width=150)
L2_BYTES = 60e6
REPEATS = 7


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of one operator.

    Attributes:
      name: as the table names it.
      arrays: draws the operands from a key; floats are random.
      bytes: (forward, backward) each operand read and result written once.
      flops: (forward, backward), where arithmetic and not memory is the limit.
    """

    name: str
    arrays: Callable[[jax.Array], tuple]
    bytes: tuple[float, float]
    flops: tuple[float, float] = (0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """An operator, its shapes and the implementations it is measured against.

    Attributes:
      name: of the operator.
      f: the operator on a case's operands.
      cases: shapes.
      torch_peers: `{name: make}`; `make(case, *tensors)` returns a callable of tensors
        or raises ImportError.
      sizes: what `tune` tries, `{kernel: {size: values}}`.
      differentiable: whether to measure the backward pass.
      floats: positions of the operands to differentiate in; all floats if None.
    """

    name: str
    f: Callable
    cases: Sequence[Case]
    torch_peers: dict[str, Callable] = dataclasses.field(default_factory=dict)
    jax_peers: dict[str, Callable] = dataclasses.field(default_factory=dict)
    sizes: dict[str, dict[str, Sequence]] = dataclasses.field(default_factory=dict)
    differentiable: bool = True
    floats: tuple[int, ...] | None = None


# Time.


@jit
def wait_kernel(nanoseconds_ptr, out_ptr, WARP: tl.constexpr):
    """Occupies the device until its clock is so much further."""
    t = tl.inline_asm_elementwise(
        """{ .reg .u64 t, end; .reg .pred p;
        mov.u64 t, %globaltimer; add.u64 end, t, $1;
        AGAIN: mov.u64 t, %globaltimer; setp.lt.u64 p, t, end; @p bra AGAIN;
        mov.u64 $0, t; }""",
        "=l,l",
        [tl.load(nanoseconds_ptr).to(tl.int64)],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )
    tl.store(out_ptr, t.to(tl.int32))


@jit
def clock_kernel(any_ptr, out_ptr, WARP: tl.constexpr):
    """Low and high half of the device's clock, in nanoseconds."""
    t = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;",
        "=l,r",
        [tl.load(any_ptr)],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )
    tl.store(out_ptr, t.to(tl.int32))
    tl.store(out_ptr + 1, (t >> 32).to(tl.int32))


@functools.cache
def compiled_clock() -> tuple[Callable, Callable]:
    """The two kernels above, of an array of nanoseconds."""

    def call(kernel, size):
        out = [jax.ShapeDtypeStruct((size,), jnp.int32)]
        f = functools.partial(
            triton_call, kernel, out=out, grid=(1,), num_warps=1, WARP=1
        )
        return jax.jit(f).lower(jnp.zeros(1, jnp.int32)).compile()

    return call(wait_kernel, 1), call(clock_kernel, 2)


def seconds_on_device(run: Callable[[], Any], host_seconds: float) -> float:
    """From before to after what `run` queues, though that takes the host a while."""
    wait, clock = compiled_clock()
    nanoseconds = jnp.full(1, 1e9 * min(1e-3 + 1.5 * host_seconds, 0.1), jnp.int32)
    wait(nanoseconds)
    before = clock(nanoseconds)
    out = run()
    after = clock(nanoseconds)
    begin, end = (
        int(np.asarray(halves).view(np.uint64)[0]) for [halves] in (before, after)
    )
    del out
    return (end - begin) * 1e-9


@functools.cache
def seconds_of_clock() -> float:
    """Between two readings with nothing between them."""
    return statistics.median(
        seconds_on_device(lambda: None, 0.0) for _ in range(3 * REPEATS)
    )


def device_seconds(f: Callable, sets: Sequence[tuple], budget: float = 0.25) -> float:
    """Seconds of one `f(*set)`, the mean over all sets in one executable; median.

    Where four calls already take a millisecond, the other sets are left out.
    """
    if len(sets) > 4:
        few = device_seconds(f, sets[:4], budget)
        if few > 0.25e-3:
            return few

    def every(sets):
        return [f(*s) for s in sets]

    run = jax.jit(every).lower(sets).compile()
    jax.block_until_ready(run(sets))
    begin = time.perf_counter()
    out = run(sets)
    host = time.perf_counter() - begin
    jax.block_until_ready(out)
    del out
    times = []
    while len(times) < REPEATS and time.perf_counter() - begin < budget * REPEATS:
        times.append(seconds_on_device(lambda: run(sets), host))
    return (statistics.median(times) - seconds_of_clock()) / len(sets)


def torch_seconds(f: Callable, sets: Sequence[tuple]) -> float:
    """Seconds of one `f(*set)` in torch, by events around a pass over all sets."""
    import torch

    host = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        for s in sets:
            f(*s)
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(2e9 * min(1e-3 + 1.5 * host, 0.1)))
        begin.record()
        for s in sets:
            f(*s)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / len(sets))
    return statistics.median(times)


def num_sets(case: Case) -> int:
    """So many that one executable runs a millisecond and more than fills the L2."""
    seconds = max(case.bytes[0] / 4e12, case.flops[0] / 7e14, 1e-6)
    return int(min(max(1e-3 // seconds, 3 * L2_BYTES // case.bytes[0] + 1, 4), 64))


@functools.cache
def copy_rate() -> float:
    """Bytes a second, read and written, of a large copy."""
    x = jnp.arange(2**28, dtype=jnp.float32)
    sets = [(x + i,) for i in range(4)]
    rates = [2 * x.nbytes / device_seconds(jnp.negative, sets)]
    if importlib.util.find_spec("torch"):
        import torch

        a, b = (torch.randn(2**28, device="cuda") for _ in range(2))
        rates.append(2 * x.nbytes / torch_seconds(lambda: b.copy_(a), [()] * 4))
    return max(rates)


@functools.cache
def matmul_rate() -> float:
    """Flops a second of an 8192^3 bf16 product of random data."""
    keys = jax.random.split(jax.random.key(0), 8)
    draw = jax.jit(lambda k: jax.random.normal(k, (8192, 8192), jnp.bfloat16))
    sets = [(draw(a), draw(b)) for a, b in keys.reshape(4, 2)]
    return 2 * 8192**3 / device_seconds(jnp.dot, sets)


# Errors.


def relative_error(out: Any, truth: Any) -> float:
    """The largest ||out - truth|| / ||truth|| over all results."""
    with jax.enable_x64(True):
        pairs = zip(jax.tree.leaves(out), jax.tree.leaves(truth), strict=True)
        return max(float(error_norm(jnp.asarray(y), t)) for y, t in pairs)


@jax.jit
def error_norm(y: jax.Array, truth: jax.Array) -> jax.Array:
    def norm(x):
        return jnp.sqrt(jnp.sum(x.astype(jnp.float64) ** 2))

    return norm(y.astype(jnp.float64) - truth) / norm(truth)


def in_float64(f: Callable, args: tuple) -> Any:
    """`f` of the same numbers in float64, by the reference."""
    with jax.enable_x64(True), jaxkern.backend("xla"):
        wide = jax.tree.map(
            lambda x: (
                x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
            ),
            args,
        )
        return jax.jit(f)(*wide)


# One measurement.


def forward_and_pull(f: Callable, floats: Sequence[int]) -> Callable:
    """`(*args) -> (y, pull)`, where `pull` can be passed to another executable."""

    def run(*args):
        def of_floats(*moving):
            full = list(args)
            for i, x in zip(floats, moving, strict=True):
                full[i] = x
            return f(*full)

        return jax.vjp(of_floats, *(args[i] for i in floats))

    return run


def moving(benchmark: Benchmark, args: Sequence) -> list[int]:
    """Positions of the operands to differentiate in."""
    if benchmark.floats is not None:
        return list(benchmark.floats)
    return [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]


def measure_jax(
    f: Callable, sets: list[tuple], floats: Sequence[int]
) -> dict[str, float]:
    found = {"forward": device_seconds(f, sets)}
    if floats:
        both = forward_and_pull(f, floats)
        pulls = []
        for s in sets:
            y, pull = jax.jit(both)(*s)
            dy = jax.tree.map(lambda v: jax.random.normal(KEY, v.shape, v.dtype), y)
            pulls.append((pull, dy))
        found["backward"] = device_seconds(lambda pull, dy: pull(dy), pulls)
    return found


KEY = jax.random.key(1)


def gradients(f: Callable, floats: Sequence[int], dy: Any, *args: jax.Array) -> Any:
    y, pull = forward_and_pull(f, floats)(*args)
    return pull(jax.tree.map(lambda v, c: c.astype(v.dtype), y, dy))


def measure_case(
    benchmark: Benchmark, case: Case, peers: bool, check: bool
) -> dict[str, dict[str, Any]]:
    """{implementation: {"forward": s, "backward": s, "error": e}}."""
    keys = jax.random.split(jax.random.key(0), num_sets(case))
    sets = [jax.jit(case.arrays)(k) for k in keys]
    floats = moving(benchmark, sets[0]) if benchmark.differentiable else []
    implementations: dict[str, Callable] = {
        "jaxkern": benchmark.f,
        "XLA": under_backend("xla", benchmark.f),
        **(benchmark.jax_peers if peers else {}),
    }
    rows: dict[str, dict[str, Any]] = {}
    truth = slopes = dy = None
    if check:
        truth = in_float64(benchmark.f, sets[0])
    if check and floats:
        dy = jax.tree.map(
            lambda v: jax.random.normal(KEY, v.shape, jnp.bfloat16), truth
        )
        slopes = in_float64(
            functools.partial(gradients, benchmark.f, floats, dy), sets[0]
        )
    for name, f in implementations.items():
        row: dict[str, Any] = {}
        try:
            if check:
                row["error"] = relative_error(jax.jit(f)(*sets[0]), truth)
                if floats:
                    slope = functools.partial(gradients, f, floats)
                    found = jax.jit(slope)(dy, *sets[0])
                    row["gradient error"] = relative_error(found, slopes)
            rows[name] = row | measure_jax(f, sets, floats)
        except Exception as error:  # a peer that fails is named, not hidden
            if name not in benchmark.jax_peers:
                raise
            rows[name] = {"failed": f"{type(error).__name__}: {error}"[:200]}
        jax.clear_caches()
    if peers:
        for name, make in benchmark.torch_peers.items():
            try:
                rows[name] = measure_torch(make, case, sets, floats, truth)
            except Exception as error:  # a peer that fails is named, not hidden
                rows[name] = {"failed": f"{type(error).__name__}: {error}"[:200]}
    return rows


def under_backend(name: str, f: Callable) -> Callable:
    def chosen(*args):
        with jaxkern.backend(name):
            return f(*args)

    return chosen


def torch_compiled(f: Callable) -> Callable:
    """A peer: `f(torch, *tensors)` through torch.compile, compiled for each case."""

    def make(case, *tensors):
        import torch

        torch._dynamo.reset()
        return torch.compile(lambda *xs: f(torch, *xs), dynamic=False)

    return make


def measure_torch(make, case, sets, floats, truth) -> dict[str, Any]:
    import torch

    tensors = [tuple(torch.from_dlpack(x) for x in s) for s in sets]
    tensors = [
        tuple(t.clone().requires_grad_(i in floats) for i, t in enumerate(s))
        for s in tensors
    ]
    f = make(case, *tensors[0])
    row: dict[str, Any] = {}
    with torch.no_grad():
        y = f(*tensors[0])
        if truth is not None:
            first = y[0] if isinstance(y, tuple) else y
            row["error"] = relative_error(
                jax.dlpack.from_dlpack(first.contiguous()), jax.tree.leaves(truth)[0]
            )
        row["forward"] = torch_seconds(f, tensors)
    if floats:
        graphs = []
        for s in tensors:
            y = f(*s)
            y = y[0] if isinstance(y, tuple) else y
            inputs = [t for t in s if t.requires_grad]
            graphs.append((y, inputs, torch.randn_like(y)))
        row["backward"] = torch_seconds(
            lambda y, inputs, dy: torch.autograd.grad(y, inputs, dy, retain_graph=True),
            graphs,
        )
    return row


# Reports.


def report(benchmark: Benchmark, results: dict[str, dict], limits: dict) -> Table:
    table = Table(title=f"{benchmark.name}: device time of one call")
    for column in ("case", "by", "error", "forward us", "% of limit"):
        table.add_column(column, justify="right" if column[-1] in "st" else "left")
    if benchmark.differentiable:
        for column in ("grad. error", "backward us", "% of limit", "sum us"):
            table.add_column(column, justify="right")
    for case in benchmark.cases:
        for name, row in results.get(case.name, {}).items():
            if "failed" in row:
                table.add_row(case.name, name, row["failed"])
                continue
            cells = [case.name, name, f"{row.get('error', float('nan')):.1e}"]
            cells += timed(case, 0, row["forward"], limits)
            if benchmark.differentiable:
                cells.append(f"{row.get('gradient error', float('nan')):.1e}")
                cells += timed(case, 1, row["backward"], limits)
                cells.append(f"{(row['forward'] + row['backward']) * 1e6:.1f}")
            table.add_row(*cells)
    return table


def timed(case: Case, which: int, seconds: float, limits: dict) -> list[str]:
    floor = max(
        case.bytes[which] / limits["copy"], case.flops[which] / limits["matmul"]
    )
    return [f"{seconds * 1e6:.1f}", f"{100 * floor / seconds:.1f}"]


def plot(benchmark: Benchmark, results: dict, limits: dict, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    passes = ["forward", "backward"] if benchmark.differentiable else ["forward"]
    figure, axes = plt.subplots(1, len(passes), figsize=(6 * len(passes), 4))
    for which, (name, ax) in enumerate(zip(passes, np.atleast_1d(axes), strict=True)):
        by = list(dict.fromkeys(n for rows in results.values() for n in rows))
        for k, implementation in enumerate(by):
            shares = [
                float(timed(case, which, row[name], limits)[1])
                if (row := results[case.name].get(implementation, {})).get(name)
                else 0.0
                for case in benchmark.cases
                if case.name in results
            ]
            ax.bar(np.arange(len(shares)) + k * 0.8 / len(by), shares, 0.8 / len(by))
        ax.set_xticks(np.arange(len(results)), list(results), rotation=20)
        ax.set_ylabel("% of the measured limit")
        ax.set_title(f"{benchmark.name} {name}")
        ax.legend(by)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def versions() -> dict[str, str]:
    found = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    for name in ("torch", "triton", "liger_kernel"):
        if importlib.util.find_spec(name):
            module = importlib.import_module(name)
            found[name] = str(getattr(module, "__version__", "?"))
    return found


def run(benchmark: Benchmark, arguments: Sequence[str]) -> int:
    """The command line of one operator's benchmark."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {benchmark.name}")
    parser.add_argument("--peers", action="store_true", help="also measure peers")
    parser.add_argument("--shapes", nargs="*", help="names of cases")
    parser.add_argument("--no-check", action="store_true", help="skip float64 errors")
    parser.add_argument("--out", type=Path, help="folder for the figures and the plot")
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
        return 2
    limits = {"copy": copy_rate(), "matmul": matmul_rate()}
    results = {}
    with Progress(console=CONSOLE, transient=True) as progress:
        chosen = [c for c in benchmark.cases if c.name in (options.shapes or [c.name])]
        for case in progress.track(chosen, description=benchmark.name):
            check = not options.no_check
            results[case.name] = measure_case(benchmark, case, options.peers, check)
    CONSOLE.print(report(benchmark, results, limits))
    CONSOLE.print(
        f"limits: copy {limits['copy'] / 1e12:.2f} TB/s, "
        f"matmul {limits['matmul'] / 1e12:.0f} TFLOP/s; {versions()}"
    )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        record = {"limits": limits, "versions": versions(), "results": results}
        (options.out / f"{benchmark.name}.json").write_text(
            json.dumps(record, indent=1)
        )
        if importlib.util.find_spec("matplotlib"):
            plot(benchmark, results, limits, options.out / f"{benchmark.name}.png")
    return 0


if __name__ == "__main__":
    sys.exit("run as `python -m benchmarks NAME`")
