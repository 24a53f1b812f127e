"""Losses of a small llama with products of 8-bit floats beside those of bfloat16.

    python -m benchmarks train_fp8 [--steps 300] [--seeds 2] [--out DIR]

About 20M parameters, bytes of the sources and pages of this repository, batches of 32 x
512, AdamW with warmup and a cosine. Both ways begin with the same weights and read the
same rows; a second seed draws others, which shows how far runs of one kind lie apart.
Writes losses.json and losses.png.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._report import machine, versions
from benchmarks.train_step import Shape, config_of, drawn, side_by_side
from jaxkern.train import next_token_loss, train_step

SHAPE = Shape(6, 512, 1408, 8, 64, vocabulary=256)
ROWS, LENGTH, RATE = 32, 512, 1e-3
SOURCES = "jaxkern/**/*.py", "docs/**/*.md", "tests/**/*.py"
KINDS = {"bfloat16": None, "fp8": "float8_e4m3fn"}
WINDOW = 20  # steps of which a mean is told


def corpus(root: Path) -> np.ndarray:
    paths = [path for pattern in SOURCES for path in sorted(root.glob(pattern))]
    return np.frombuffer(b"".join(p.read_bytes() for p in paths), np.uint8)


def batches(text: np.ndarray, steps: int, seed: int) -> np.ndarray:
    starts = np.random.default_rng(seed).integers(
        0, len(text) - LENGTH, (steps, ROWS, 1)
    )
    return text[starts + np.arange(LENGTH)].astype(np.int32)


def losses(
    product_dtype: Any, weights: Any, tokens: np.ndarray
) -> tuple[list[float], float]:
    """The loss of each step, and the seconds of a step behind the first one."""
    steps = len(tokens)
    rate = optax.warmup_cosine_decay_schedule(0, RATE, steps // 10, steps, RATE / 10)
    loss = next_token_loss(config_of(SHAPE), product_dtype=product_dtype)
    step = train_step(loss, optax.adamw(rate, weight_decay=0.1), clip_norm=1.0)
    state, found, begin = step.init(weights), [], 0.0
    for i, batch in enumerate(tokens):
        state, metrics = step(state, jnp.asarray(batch))
        found.append(metrics.loss)
        if i == 0:
            metrics.loss.block_until_ready()
            begin = time.perf_counter()
    values = [float(x) for x in found]
    seconds = (time.perf_counter() - begin) / max(steps - 1, 1)
    assert int(state.skipped) == 0, "a gradient was not finite"
    return values, seconds


def picture(runs: dict[str, list[float]], path: Path) -> None:
    """Nothing without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(10, 4), layout="tight")
    FigureCanvasAgg(figure)
    whole, apart = figure.subplots(1, 2)
    smooth = np.ones(WINDOW) / WINDOW
    for name, values in runs.items():
        style = "--" if name.startswith("fp8") else "-"
        whole.plot(np.convolve(values, smooth, "valid"), style, label=name)
        other = runs[name.replace("fp8", "bfloat16")]
        if other is not values:
            difference = np.convolve(np.subtract(values, other), smooth, "valid")
            apart.plot(difference, label=f"{name} - bfloat16")
    whole.set(xlabel="step", ylabel=f"loss, mean of {WINDOW} steps")
    apart.set(xlabel="step", ylabel="difference")
    for axis in (whole, apart):
        axis.legend()
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks train_fp8", description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
        return 2
    text = corpus(Path(__file__).parents[1])
    weights = side_by_side(drawn(SHAPE))
    print(f"{SHAPE.matrices / 1e6:.1f}M parameters, {len(text) / 1e6:.1f} MB of text")
    runs = {}
    for seed in range(options.seeds):
        tokens = batches(text, options.steps, seed)
        for kind, dtype in KINDS.items():
            name = f"{kind}, seed {seed}"
            runs[name], seconds = losses(dtype, weights, tokens)
            last = np.mean(runs[name][-WINDOW:])
            print(
                f"{name}: loss {runs[name][0]:.4f} to {last:.4f} (mean of the last "
                f"{WINDOW}), {1e3 * seconds:.1f} ms a step",
                flush=True,
            )
        pair = [runs[f"{kind}, seed {seed}"] for kind in KINDS]
        ratio = np.divide(pair[1], pair[0])
        print(f"seed {seed}: fp8 / bfloat16 {ratio.min():.4f} to {ratio.max():.4f}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        about = {"machine": machine(), "versions": versions(), "losses": runs}
        (options.out / "losses.json").write_text(json.dumps(about, indent=1) + "\n")
        picture(runs, options.out / "losses.png")
    return 0
