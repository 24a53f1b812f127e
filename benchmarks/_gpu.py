"""How an operator is measured on a GPU: errors first, then device time beside limits.

The two ceilings, a copy and a matrix product, are measured in the same run. `_time.py`
says what a time is.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.progress import Progress

import jaxkern
from benchmarks._records import write_run
from benchmarks._report import (
    BYTES_ONLY,
    CONSOLE,
    PASSES,
    begun,
    limits_line,
    plot,
    table,
)
from benchmarks._time import (
    JaxProgram,
    Program,
    TorchProgram,
    copy_rate,
    device_alone,
    matmul_rate,
    moved,
    seconds_in_turn,
)
from benchmarks._truth import (
    KEY,
    Truth,
    both_passes,
    forward_and_pull,
    relative_error,
    run_alone,
)

L2_BYTES = 60e6


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of one operator.

    Attributes:
      name: as the table names it.
      arrays: draws the operands from a key; floats are random.
      bytes: (forward, backward) each operand read and result written once.
      flops: (forward, backward), where arithmetic and not memory is the limit.
      reference: whether XLA runs it: not where that compiles for minutes or does not
        fit the device.
      checked: a smaller case to take the errors from, where float64 or the reference
        does not fit.
    """

    name: str
    arrays: Callable[[jax.Array], tuple]
    bytes: tuple[float, float]
    flops: tuple[float, float] = (0.0, 0.0)
    reference: bool = True
    checked: "Case | None" = None


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """An operator, its shapes and the implementations it is measured against.

    Attributes:
      name: of the operator.
      f: the operator on a case's operands.
      cases: shapes.
      torch_peers: `{name: make}`; `make(case, *tensors)` returns a callable of tensors
        or raises ImportError.
      jax_peers: `{name: f}`.
      differentiable: whether to measure the backward pass.
      floats: positions of the operands to differentiate in; all floats if None.
      together: whether to measure both passes in one executable as well.
      bytes_only: whether to measure what only moves the bytes of each pass as well.
      temporaries: whether to tell the memory that both passes take beside operands and
        results.
    """

    name: str
    f: Callable
    cases: Sequence[Case]
    torch_peers: dict[str, Callable] = dataclasses.field(default_factory=dict)
    jax_peers: dict[str, Callable] = dataclasses.field(default_factory=dict)
    differentiable: bool = True
    floats: tuple[int, ...] | None = None
    together: bool = False
    bytes_only: bool = False
    temporaries: bool = False


def num_sets(case: Case) -> int:
    """So many that one executable runs half a millisecond, or one if its operands are
    small, and overfills the L2."""
    seconds = max(case.bytes[0] / 4e12, case.flops[0] / 7e14, 1e-6)
    least = 4 if case.bytes[0] < 1e9 else 2
    span = 1e-3 if case.bytes[0] < 1e8 else 5e-4
    return int(min(max(span // seconds, 3 * L2_BYTES // case.bytes[0] + 1, least), 64))


def moving(benchmark: Benchmark, args: Sequence) -> list[int]:
    """Positions of the operands to differentiate in."""
    if not benchmark.differentiable:
        return []
    if benchmark.floats is not None:
        return list(benchmark.floats)
    return [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]


def jax_programs(
    f: Callable, sets: Sequence[tuple], floats: Sequence[int], together: bool = False
) -> dict[str, Program]:
    """The forward pass, the backward pass of its residuals, both if asked for."""
    programs: dict[str, Program] = {"forward": JaxProgram.of(f, sets)}
    if floats:
        begin = jax.jit(forward_and_pull(f, floats)).lower(*sets[0]).compile()
        pulls = []
        with device_alone():
            for s in sets:
                y, pull = begin(*s)
                dy = jax.tree.map(lambda v: jax.random.normal(KEY, v.shape, v.dtype), y)
                pulls.append((pull, dy))
            jax.block_until_ready(pulls)
        programs["backward"] = JaxProgram.of(lambda pull, dy: pull(dy), pulls)
        if together:
            cotangents = [(dy, *s) for s, (_, dy) in zip(sets, pulls, strict=True)]
            both = functools.partial(both_passes, f, floats)
            programs["both"] = JaxProgram.of(both, cotangents)
    with device_alone():
        for program in programs.values():
            program.warm()
    return programs


def megabytes(f: Callable, args: tuple, floats: Sequence[int]) -> float | None:
    """Of the temporaries of both passes in one executable, where XLA tells."""
    cotangent = jax.eval_shape(f, *args)
    both = jax.jit(functools.partial(both_passes, f, floats))
    told = both.lower(cotangent, *args).compile().memory_analysis()
    return told and round(told.temp_size_in_bytes / 1e6, 1)


def measure_jax(
    f: Callable, sets: Sequence[tuple], floats: Sequence[int]
) -> dict[str, float]:
    programs = jax_programs(f, sets, floats)
    with device_alone():
        return seconds_in_turn(programs)


def torch_programs(
    make: Callable, case: Case, sets: Sequence[tuple], floats: Sequence[int]
) -> dict[str, Program]:
    import torch

    def inferred(*tensors):
        with torch.no_grad():
            return f(*tensors)

    with device_alone():
        tensors = [in_torch(s, floats) for s in sets]
    f = make(case, *tensors[0])
    f(*tensors[0])  # compiles
    with device_alone():
        programs: dict[str, Program] = {"forward": TorchProgram(inferred, tensors)}
        programs["forward"].warm()
        if floats:
            graphs = []
            for s in tensors:
                y = first(f(*s))
                inputs = [t for t in s if t.requires_grad]
                graphs.append((y, inputs, torch.randn_like(y)))

            def pull(y, inputs, dy):
                return torch.autograd.grad(y, inputs, dy, retain_graph=True)

            programs["backward"] = TorchProgram(pull, graphs)
            programs["backward"].warm()
    return programs


def bytes_only(case: Case) -> dict[str, Program]:
    """A copy of the bytes of the forward pass; for the backward pass a sum of two."""
    programs: dict[str, Program] = {}
    with device_alone():
        for which, count, size in zip(PASSES, (2, 3), case.bytes, strict=True):
            shape = (int(size) // (2 * count),)
            keys = jax.random.split(KEY, (num_sets(case), count - 1))
            draw = jax.vmap(lambda k, n=shape: jax.random.normal(k, n, jnp.bfloat16))
            programs[which] = JaxProgram.of(moved, [tuple(draw(k)) for k in keys])
            programs[which].warm()
    return programs


def torch_error(make: Callable, case: Case, truth: Truth) -> dict[str, float]:
    tensors = in_torch(truth.args, ())
    y = first(make(case.checked or case, *tensors)(*tensors)).detach().contiguous()
    expected = jax.tree.leaves(truth.values)[0]
    return {"error": relative_error(jax.dlpack.from_dlpack(y), expected)}


def in_torch(args: tuple, floats: Sequence[int]) -> tuple:
    import torch

    tensors = (torch.from_dlpack(x).clone() for x in args)
    return tuple(t.requires_grad_(i in floats) for i, t in enumerate(tensors))


def first(y: Any) -> Any:
    return y[0] if isinstance(y, tuple) else y


def measure_case(
    benchmark: Benchmark, case: Case, peers: bool, check: bool
) -> dict[str, dict[str, Any]]:
    """{implementation: {"forward": s, "backward": s, "error": e}}."""
    keys = jax.random.split(jax.random.key(0), num_sets(case))
    with device_alone():
        sets = jax.block_until_ready([jax.jit(case.arrays)(k) for k in keys])
    floats = moving(benchmark, sets[0])
    by_jax: dict[str, Callable] = {"jaxkern": benchmark.f}
    if case.reference:
        by_jax["XLA"] = under_backend("xla", benchmark.f)
    if peers:
        by_jax |= benchmark.jax_peers
    # without a smaller case nor a reference there is no truth
    check = check and (case.reference or case.checked is not None)
    truth = None
    if check:
        args = run_alone((case.checked or case).arrays, jax.random.key(0))
        truth = Truth.of(benchmark.f, args, floats)

    def of_jax(f):
        errors = truth.errors(f, floats) if truth else {}
        if benchmark.temporaries:
            errors |= {"temporaries": megabytes(f, sets[0], floats)}
        return errors, jax_programs(f, sets, floats, benchmark.together)

    def of_torch(make):
        errors = torch_error(make, case, truth) if truth else {}
        return errors, torch_programs(make, case, sets, floats)

    tasks = [functools.partial(of_jax, f) for f in by_jax.values()]
    names = list(by_jax)
    if peers:
        makes = benchmark.torch_peers
        tasks += [functools.partial(of_torch, make) for make in makes.values()]
        names += makes
    rows: dict[str, dict[str, Any]] = {}
    programs: dict[tuple[str, str], Program] = {}
    for name, task in zip(names, tasks, strict=True):
        try:
            rows[name], found = task()
        except Exception as error:  # a peer that fails is named, not hidden
            if name == "jaxkern":
                raise
            rows[name] = {"failed": f"{type(error).__name__}: {error}"[:200]}
        else:
            programs |= {(name, which): program for which, program in found.items()}
        jax.clear_caches()
    if peers and benchmark.bytes_only:
        rows[BYTES_ONLY] = {}
        moved = bytes_only(case)
        programs |= {(BYTES_ONLY, which): program for which, program in moved.items()}
    with device_alone():
        for (name, which), seconds in seconds_in_turn(programs).items():
            rows[name][which] = seconds
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
    chosen = [c for c in benchmark.cases if c.name in (options.shapes or [c.name])]
    if not chosen:
        return 0
    record = begun(benchmark.name, {"copy": copy_rate(), "matmul": matmul_rate()})
    record["cases"] = {c.name: {"bytes": c.bytes, "flops": c.flops} for c in chosen}
    with Progress(console=CONSOLE, transient=True) as progress:
        for case in progress.track(chosen, description=benchmark.name):
            check = not options.no_check
            record["results"][case.name] = measure_case(
                benchmark, case, options.peers, check
            )
            if options.out:  # after each: a run that is cut short leaves the others
                write_run(record, options.out)
    CONSOLE.print(table(record))
    CONSOLE.print(limits_line(record))
    if options.out:
        plot(record, options.out / f"{benchmark.name}.png")
    return 0


if __name__ == "__main__":
    sys.exit("run as `python -m benchmarks NAME`")
