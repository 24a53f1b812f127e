"""From `Generator(...)` on a GPU to its first token, by where the seconds go.

    python -m benchmarks compile_time [--model 8B] [--weights Q4_K_M] [--prompt 512]

Two starts, each in a process of its own: the first finds no kernel and no executable on
disk, the second what the first has left. Models and weights are those of
`gpu_generate`; drawing them is not counted. `--folder` keeps what is on disk for later
starts. Steps that run beside each other are all shown, so they add up to more than the
whole.
"""

import argparse
import collections
import os
import subprocess
import sys
import tempfile
import time

import jax

from benchmarks.gpu_generate import named
from jaxkern.gpu.launch import triton
from jaxkern.models.generate import Generator
from jaxkern.runtime import enable_compilation_cache
from jaxkern.runtime.trace.events import FOUND_UNTRACED

PARTS = {  # of jax.monitoring
    "/jax/core/compile/jaxpr_trace_duration": "traced",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowered",
    "/jax/core/compile/backend_compile_duration": "compiled by XLA, or loaded",
    FOUND_UNTRACED: "found on disk before it was traced",
}
FUNCTIONS = "read_prompts", "write_chunk"


def measure(name: str, weights: str, prompt: int) -> str:
    """One start, a line for each of its parts."""
    config, arrays = named(name, weights)
    jax.block_until_ready(arrays)
    spent: collections.Counter[str] = collections.Counter()

    def listen(event: str, seconds: float, **about: object) -> None:
        function = str(about.get("fun_name", ""))
        if event in PARTS and any(known in function for known in FUNCTIONS):
            spent[f"{function} {PARTS[event]}"] += seconds

    def listen_to_triton(*, cache_hit: bool, times, **_: object) -> None:
        spent["Triton in this process"] += times.total / 1e6
        kernels["found on disk" if cache_hit else "compiled here"] += 1

    kernels: collections.Counter[str] = collections.Counter()
    jax.monitoring.register_event_duration_secs_listener(listen)
    triton.knobs.compilation.listener = listen_to_triton
    begin = time.perf_counter()
    generator = Generator(
        config, arrays, batch=1, prompt_slots=prompt, max_tokens=129, chunk=16
    )
    ready = time.perf_counter()
    next(iter(generator.stream([[1] * prompt])))
    first_token = time.perf_counter()
    lines = [
        f"{first_token - begin:.2f} s to the first token",
        f"{ready - begin:.2f} s until `Generator` was made, so",
        f"{first_token - ready:.2f} s behind that",
        *(f"{seconds:.2f} s {part}" for part, seconds in spent.items()),
        f"kernels: {dict(kernels)}",
    ]
    return "\n  ".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks compile_time", description=__doc__
    )
    parser.add_argument("--model", default="8B")
    parser.add_argument("--weights", default="Q4_K_M")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--folder", help="one start with the caches in this folder")
    options = parser.parse_args(arguments)
    if options.folder:
        if jax.default_backend() != "gpu":
            print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
            return 2
        enable_compilation_cache(options.folder)
        print(measure(options.model, options.weights, options.prompt), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        kernels = {**os.environ, "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, "-m", "benchmarks", "compile_time", *arguments]
        for start in ("first", "second"):
            print(f"{start} start: ", end="", flush=True)
            one = [*command, "--folder", f"{folder}/executables"]
            if code := subprocess.run(one, env=kernels, check=False).returncode:
                return code
    return 0
