"""llama.cpp on the models of `gpu_generate` in published sizes: its own llama-bench.

    python -m benchmarks gpu_llama_cpp --llama-bench PATH --folder DIR
        [--model gpt-oss-20b] [--weights mxfp4] [--prompt 512] [--new 128]

Each model is written to the folder as a GGUF file of the same sizes and formats as
those of `gpu_generate`, measured, and removed: the largest takes 70 GB in bf16, 21 in
Q4_K. Prefill is of a prompt into an empty cache, decode behind as many tokens; flash
attention, the mean of three. Only `--layers` of a model runs on a CPU for a look.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.drawn_gguf import write_drawn_gguf
from benchmarks.drawn_models import PUBLISHED, published

REPEATS = 3


def llama_bench(tool: str, path: Path, prompt: int, new: int) -> list[dict[str, Any]]:
    """What llama-bench says of each of its tests.

    Raises:
      RuntimeError: it fails, with its last words.
    """
    sizes = {"-p": prompt, "-n": new, "-d": f"0,{prompt}", "-fa": 1, "-r": REPEATS}
    options = [str(x) for pair in sizes.items() for x in pair]
    command = [tool, "-m", str(path), *options, "-o", "json"]
    run = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}: {run.stderr.strip()[-500:]}")
    return json.loads(run.stdout)


def line_of(tests: list[dict[str, Any]], prompt: int) -> str:
    """Tokens a second as `gpu_generate` says them."""
    [prefill] = [t for t in tests if t["n_prompt"] and not t["n_depth"]]
    [decode] = [t for t in tests if t["n_gen"] and t["n_depth"] == prompt]
    return (
        f"decode {decode['avg_ts']:.1f} tokens/s (+- {decode['stddev_ts']:.1f}), "
        f"prefill {prefill['avg_ts']:.0f} (+- {prefill['stddev_ts']:.0f}), "
        f"{decode['model_size'] / 1e9:.1f} GB, {decode['backends']}, "
        f"{decode['gpu_info'] or decode['cpu_info']}"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks gpu_llama_cpp", description=__doc__
    )
    parser.add_argument("--llama-bench", required=True, help="the program")
    parser.add_argument("--folder", required=True, type=Path, help="with room")
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--weights", default="mxfp4")
    parser.add_argument("--layers", type=int, help="of the model, for a look")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    options = parser.parse_args(arguments)
    for name in options.model.split(","):
        if name not in PUBLISHED:
            print(f"{parser.prog}: no model {name}, but {', '.join(PUBLISHED)}.")
            return 2
        for weights in options.weights.split(","):
            path = options.folder / f"{name}-{weights}.gguf"
            write_drawn_gguf(path, published(name, options.layers), weights)
            try:
                tests = llama_bench(
                    options.llama_bench, path, options.prompt, options.new
                )
            finally:
                path.unlink()
            print(f"{name} {weights}: {line_of(tests, options.prompt)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
