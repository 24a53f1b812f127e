"""Decoding a whole llama by all GPUs of a host, each with a part of every matrix.

    python -m benchmarks decode_devices [--model 8B] [--prompt 512] [--new 128]

Random weights of bfloat16 in real shapes, batch 1. One GPU writes as `gpu_generate` has
it; n GPUs by `TensorParallel.next_tokens` in chunks of 16 tokens, queued one behind the
other, behind the prompt and in a cache of as many slots. The logits behind the prompt
are compared.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from benchmarks.gpu_generate import SHAPES, Shape, model
from jaxkern.models.cached_steps import prefill, with_lengths
from jaxkern.models.generate import Generator
from jaxkern.models.llama import LlamaConfig, LlamaWeights, empty_cache
from jaxkern.models.tensor_parallel import TensorParallel

CHUNK, ROUNDS = 16, 5
TOLERANCE = 0.05  # of the norm of the logits, whose weights are bfloat16


def one_gpu(
    config: LlamaConfig, weights: LlamaWeights, prompt: np.ndarray, new: int
) -> tuple[float, np.ndarray]:
    """Tokens a second, and the logits behind the prompt."""
    generator = Generator(
        *(config, weights),
        batch=1,
        prompt_slots=prompt.size,
        max_tokens=new + 1,
        chunk=CHUNK,
    )
    rates = []
    for _ in range(ROUNDS):
        for _ in generator.stream([prompt.tolist()]):
            pass
        rates.append(generator.timings.decode_steps / generator.timings.decode_seconds)
    cache = empty_cache(config, 1, prompt.size, config.dtype)
    run = jax.jit(prefill, static_argnums=0)
    logits, _ = run(config, weights, prompt[None], np.array([prompt.size]), cache)
    return statistics.median(rates[1:]), np.asarray(logits, np.float32)


def chunk_writer(parts: TensorParallel) -> Callable:
    """(weights, token, cache) -> the last token, the cache, the likeliest tokens."""

    @partial(jax.jit, donate_argnums=2)
    def write(weights: LlamaWeights, token: jax.Array, cache: Any):
        def step(carry, _):
            token, cache = carry
            token, cache = parts.next_tokens(weights, token, cache)
            return (token, with_lengths(cache, cache[0].lengths)), token

        (token, cache), tokens = lax.scan(step, (token, cache), length=CHUNK)
        return token, cache, tokens

    return write


def all_gpus(
    config: LlamaConfig, weights: LlamaWeights, prompt: np.ndarray, new: int
) -> tuple[float, np.ndarray]:
    """The same by the GPUs of a mesh."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), (AxisType.Auto,))
    parts = TensorParallel(config, mesh, "x")
    weights = parts.cut(weights)
    slots = prompt.size + new + 1  # as `one_gpu` has
    read, write = jax.jit(parts.prefill, donate_argnums=3), chunk_writer(parts)
    rates, behind = [], np.zeros(0)
    for _ in range(ROUNDS):
        cache = parts.empty_cache(1, slots, config.dtype)
        logits, cache = read(weights, prompt[None], np.array([prompt.size]), cache)
        behind = np.asarray(logits, np.float32)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        jax.block_until_ready((token, cache))
        begin = time.perf_counter()
        for _ in range(new // CHUNK):
            token, cache, _ = write(weights, token, cache)
        token.block_until_ready()
        rates.append(new // CHUNK * CHUNK / (time.perf_counter() - begin))
    return statistics.median(rates[1:]), behind


def measure(shape: Shape, length: int, new: int) -> str:
    config, weights = model(shape, "bf16")
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, shape.vocabulary, length).astype(np.int32)
    one, expected = one_gpu(config, weights, prompt, new)
    n, found = all_gpus(config, weights, prompt, new)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    if not error <= TOLERANCE:
        raise ValueError(f"decode_devices: logits differ by {error:.3f} of their norm")
    return (
        f"one GPU {one:.0f} tokens/s, {jax.device_count()} GPUs {n:.0f}, "
        f"{n / one:.2f} times; logits differ by {error:.4f}"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks decode_devices", description=__doc__
    )
    parser.add_argument("--model", default="8B")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        print(f"{parser.prog}: needs two GPUs, found {jax.devices()}.")
        return 2
    for name in options.model.split(","):
        line = measure(SHAPES[name], options.prompt, options.new)
        print(f"{name} bf16: {line}", flush=True)
    return 0
