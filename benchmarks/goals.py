"""`python -m benchmarks goals [--out DIR | --read DIR]`: what was aimed at, what came.

Runs the benchmarks that the goals below name, with their peers, and says of each goal
what was measured and whether that meets it. With --read it takes the records that
`python -m benchmarks OP --peers --out DIR` left. docs/performance/goals.md shows it.
"""

import argparse
import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.table import Table

from benchmarks._find import benchmark as benchmark_of
from benchmarks._gpu import Benchmark, run
from benchmarks._records import write_run
from benchmarks._report import (
    BYTES_ONLY,
    CONSOLE,
    Record,
    share_of_limit,
)

JAXKERN = "jaxkern"
COMPILED = ("XLA", "torch.compile", "Liger")
COLUMNS = ("benchmark", "case", "figure", "goal", "measured", "met")
NOT_MEASURED = "not measured"
JAX_ATTENTION = ("cuDNN", "jla", "tokamax")


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound on one figure of one case.

    Attributes:
      module: of the benchmark.
      record: name of the benchmark in it.
      case: one of its cases.
      which: "forward", "backward", "both", "error" or "gradient error".
      times: at least so many times as fast as the best of `than`; of an error, at most
        so many times the largest of `than`.
      share: at least this share of the measured limit, in percent.
      us: at most so many microseconds.
      tflops: at least so many TFLOP/s.
      than: the implementations to compare with.
    """

    module: str
    record: str
    case: str
    which: str
    times: float | None = None
    share: float | None = None
    us: float | None = None
    tflops: float | None = None
    than: tuple[str, ...] = ()


def row_goals() -> Iterator[Goal]:
    for case in ("16384x4096", "8192x8192", "4096x16384", "131072x128"):
        norm = ("rms_norm", "rms_norm", case)
        yield Goal(*norm, "forward", times=1.0, than=COMPILED)
        yield Goal(*norm, "both", times=1.0, than=COMPILED)
        yield Goal(*norm, "forward", share=92)
        yield Goal(*norm, "backward", share=88)
    yield Goal("softmax", "softmax", "2048x131072", "forward", times=1.5, than=("XLA",))
    yield Goal("softmax", "softmax", "2048x131072", "both", times=1.5, than=("XLA",))
    loss = ("cross_entropy", "cross_entropy", "8192x128256")
    yield Goal(*loss, "both", times=1.5, than=("Liger",))
    trained = ("cross_entropy", "cross_entropy_trained", "8192x128256")
    yield Goal(*trained, "forward", times=1.5, than=("Liger",))
    for which in ("forward", "backward"):
        yield Goal("swiglu", "swiglu", "8192x14336", which, share=92)
        yield Goal("rope", "rope", "llama3_8b_8192", which, share=88)
        interleaved = ("rope_interleaved", "rope_interleaved", "llama3_8b_8192")
        yield Goal(*interleaved, which, share=88)
    for name in ("sample_all", "sample_top_p", "sample_min_p"):
        for scale in (1, 4):
            case = f"32x128256 float32 scale {scale}"
            yield Goal("sample", name, case, "forward", us=25)
    yield Goal("fwht", "fwht", "16384x8192 bfloat16", "forward", share=90)
    rule = ("gated_delta_rule", "gated_delta_rule")
    for case, forward, both in (
        ("2x8192, 16/16 heads", 280, 850),
        ("1x32768, 16/32 heads", 660, 2500),
        ("8x4096, 16/32 heads", 580, 2300),
    ):
        yield Goal(*rule, case, "forward", us=forward)
        yield Goal(*rule, case, "both", us=both)
    yield Goal(*rule, "8x4096, 8/32 heads", "forward", us=420)
    leaves = ("adamw", "adamw", "300 leaves of 1e6, float32")
    yield Goal(*leaves, "forward", times=1.1, than=("optax",))


def attention_goals() -> Iterator[Goal]:
    for case in ("b4_s4096_d128", "b1_s16384_d128"):
        causal = ("attention", "attention", case)
        yield Goal(*causal, "forward", times=1.0, than=("FA3",))
        yield Goal(*causal, "both", times=0.95, than=("FA3",))
        yield Goal(*causal, "forward", times=1.1, than=JAX_ATTENTION)
        yield Goal(*causal, "both", times=1.1, than=JAX_ATTENTION)
        for which in ("error", "gradient error"):
            yield Goal(*causal, which, times=1.2, than=("FA3", "cuDNN"))
    yield Goal("attention", "attention", "b4_s4096_d128", "forward", tflops=640)
    packed = ("attention", "attention_documents", "b1_s16384_d128_documents")
    yield Goal(*packed, "forward", times=2.0, than=("cuDNN, mask",))
    yield Goal(*packed, "both", times=2.0, than=("cuDNN, mask",))
    window = ("attention", "attention_window", "b1_s16384_d128")
    yield Goal(*window, "forward", times=1.2, than=("cuDNN",))
    yield Goal(*window, "both", times=1.2, than=("cuDNN",))
    batch = ("decode_attention", "decode_attention", "B32 S4096 H32 kv8 D128")
    yield Goal(*batch, "forward", times=1.05, than=("cuDNN",))
    yield Goal(*batch, "forward", share=90)
    for tokens, us in ((4096, 11), (16384, 23), (65536, 70)):
        one = ("decode_attention", "decode_attention", f"B1 S{tokens} H32 kv8 D128")
        yield Goal(*one, "forward", us=us)
    quantised = ("quantized_cache_attention", "quantized_cache_attention")
    for b in (1, 16):
        for codec, times in (("int8", 1.7), ("int4", 2.5), ("turbo4", 2.5)):
            case = f"{codec} B{b} S65536 H32 kv8 D128"
            than = ("jaxkern, bf16 cache",)
            yield Goal(*quantised, case, "forward", times=times, than=than)


def expert_goals() -> Iterator[Goal]:
    for dtype in ("float32", "bfloat16"):
        yield Goal("top_k", "top_k_6", f"16384x512 {dtype}", "forward", us=12)
    grouped = ("route", "route, sigmoid, bias and groups")
    yield Goal(*grouped, "8192 tokens of 256 experts", "forward", us=15)
    codes = ("grouped_matmul_fp8", "grouped_matmul_fp8, codes")
    yield Goal(*codes, "32768x4096x2048 in 64, equal", "forward", tflops=1100)
    one = "1 tokens of 2048, 8 of 256 experts of 512"
    yield Goal("moe_ffn", "moe_ffn_few", one, "forward", us=15.7)


GOALS = (*row_goals(), *attention_goals(), *expert_goals())


def figure(row: dict[str, Any], which: str) -> float | None:
    """Seconds of a pass or of both, or an error; None where there is none."""
    if which == "both" and "both" not in row:
        if "forward" not in row or "backward" not in row:
            return None
        return row["forward"] + row["backward"]
    return row.get(which)


def outcome(goal: Goal, record: Record) -> tuple[str, bool]:
    """What was measured, in words, and whether it meets the goal."""
    by = record["results"].get(goal.case, {})
    ours = figure(by.get(JAXKERN, {}), goal.which)
    if ours is None:
        return NOT_MEASURED, False
    is_error = goal.which.endswith("error")
    shown = f"{ours:.2e}" if is_error else f"{ours * 1e6:.1f} us"
    if goal.us is not None:
        return shown, ours * 1e6 <= goal.us
    if goal.tflops is not None:
        rate = record["cases"][goal.case]["flops"][0] / ours * 1e-12
        return f"{shown}: {rate:.0f} TFLOP/s", rate >= goal.tflops
    if goal.share is not None:
        share = 100 * share_of_limit(record, goal.case, goal.which, ours)
        shown = f"{shown}: {share:.1f} %"
        if moved := by.get(BYTES_ONLY, {}).get(goal.which):
            shown += f", {BYTES_ONLY} {moved * 1e6:.1f}"
        return shown, share >= goal.share
    theirs = {n: figure(by.get(n, {}), goal.which) for n in goal.than}
    present = {n: x for n, x in theirs.items() if x is not None}
    if not present or goal.times is None:
        return f"{shown}; none to compare with", False
    if is_error:
        name = max(present, key=lambda n: present[n])
        said = f"{shown}, {name} {present[name]:.2e}: {ours / present[name]:.2f}"
        return said, ours <= goal.times * present[name]
    name = min(present, key=lambda n: present[n])
    times = present[name] / ours
    return (
        f"{shown}, {name} {present[name] * 1e6:.1f}: {times:.3f}",
        times >= goal.times,
    )


def bound(goal: Goal) -> str:
    if goal.us is not None:
        return f"<= {goal.us:g} us"
    if goal.tflops is not None:
        return f">= {goal.tflops:g} TFLOP/s"
    if goal.share is not None:
        return f">= {goal.share:g} % of the limit"
    sign = "<=" if goal.which.endswith("error") else ">="
    return f"{sign} {goal.times:g} x {' or '.join(goal.than)}"


def judged(folder: Path) -> list[tuple[str, ...]]:
    """A line of each goal: benchmark, case, figure, bound, what came, met or not."""
    lines = []
    for goal in GOALS:
        file = folder / f"{goal.record}.json"
        record = json.loads(file.read_text()) if file.exists() else {"results": {}}
        came, met = outcome(goal, record)
        verdict = "yes" if met else "NO"
        lines.append((goal.record, goal.case, goal.which, bound(goal), came, verdict))
    return lines


def record_of(lines: Sequence[Sequence[str]], folder: Path) -> Record:
    """The verdicts for `pages --add`, with what the last run says of itself."""
    run = json.loads((folder / f"{GOALS[-1].record}.json").read_text())
    section = {
        "run": "goals",
        "date": run["date"],
        "columns": COLUMNS,
        "rows": lines,
    }
    said = {key: run[key] for key in ("machine", "date", "versions")}
    return said | {
        "name": "goals",
        "op": "goals",
        "family": "goals",
        "sections": [section],
    }


def commands(
    folder: Path, options: argparse.Namespace
) -> Iterator[tuple[Callable[[list[str]], int], list[str]]]:
    """Each benchmark that a goal names, and the arguments that run its cases."""
    for module_name, name in dict.fromkeys((g.module, g.record) for g in GOALS):
        if options.only and name not in options.only:
            continue
        module = benchmark_of(module_name)
        cases = dict.fromkeys(g.case for g in GOALS if g.record == name)
        cases = [case for case in cases if case in (options.shapes or [case])]
        command = ["--peers", "--out", str(folder), "--shapes", *cases]
        if hasattr(module, "BENCHMARK"):
            yield functools.partial(run, benchmark_named(module, name)), command
        else:
            yield module.main, command


def benchmark_named(module: ModuleType, name: str) -> Benchmark:
    found = getattr(module, "BENCHMARKS", [module.BENCHMARK])
    return next(b for b in found if b.name == name)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks goals")
    parser.add_argument("--out", type=Path, help="folder for the records and plots")
    parser.add_argument("--read", type=Path, help="folder of records to judge")
    parser.add_argument("--only", nargs="*", help="names of benchmarks to run")
    parser.add_argument("--shapes", nargs="*", help="names of cases to run")
    options = parser.parse_args(arguments)
    folder = options.read or options.out or Path(tempfile.mkdtemp())
    if not options.read:
        for benchmark, command in commands(folder, options):
            if failed := benchmark(command):
                return failed
    lines = judged(folder)
    table = Table(*COLUMNS, title="goals")
    for line in lines:
        table.add_row(*line)
    CONSOLE.print(table)
    if options.out and not any(came == NOT_MEASURED for *_, came, _ in lines):
        write_run(record_of(lines, folder), folder)
    met = sum(line[-1] == "yes" for line in lines)
    CONSOLE.print(f"{met} of {len(lines)} goals met; records in {folder}")
    return 0
