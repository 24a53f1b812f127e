"""`jaxkern apple check`: what an Apple plugin would refuse in a model or an op."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.lowering.apple import Report, check
from jaxkern.lowering.apple.samples import samples
from jaxkern.lowering.apple.selftest import gradient, has_gradient
from jaxkern.models.architecture import ModelConfig, page_of
from jaxkern.models.cached_steps import decode
from jaxkern.models.decode_loop import write_chunk
from jaxkern.models.generate import Sampling, read_prompts
from jaxkern.models.loader import load
from jaxkern.models.weight_reader import Policy
from jaxkern.primitives.kernel_primitive import REGISTRY


def reports_of(
    target: str | None, platform: str, weights: Policy = "packed"
) -> Iterator[tuple[str, Report]]:
    """A report for each function of a GGUF model, or of an op, or of every op.

    Args:
      target: path of a GGUF file, name of a primitive, or None for all of them.
      platform: "mps", "metal", "mtl" or "METAL".
      weights: how those of a model are kept; "affine" is what jax-mps multiplies with.

    Raises:
      ValueError: `target` is neither, or there are no such weights.
    """
    if target is not None and Path(target).suffix == ".gguf":
        calls = model_calls(*load(target, weights))
    else:
        calls = op_calls(target)
    for name, (f, args) in calls.items():
        yield name, check(f, *args, platform=platform)


def op_calls(name: str | None) -> dict[str, tuple[Callable, tuple]]:
    """The samples of an op, or all of them, with their gradients."""
    if name is not None and name not in REGISTRY:
        raise ValueError(
            f"apple check: {name!r} is no .gguf file and no op. Ops: "
            f"{', '.join(REGISTRY)}."
        )
    found = {}
    for sample, (f, args) in samples(name).items():
        found[sample] = (f, args)
        if has_gradient(f, args):
            found[f"{sample} gradient"] = (gradient(f), args)
    return found


def model_calls(
    config: ModelConfig, weights: Any, *, slots: int = 64, steps: int = 16
) -> dict[str, tuple[Callable, tuple]]:
    """Prefill, one decoded token and the decode loop of a model, with arguments.

    Only shapes and dtypes of `weights` are used.
    """
    weights, cache = jax.eval_shape(
        lambda w: (w, page_of(config).empty_cache(config, 1, slots)), weights
    )
    options: dict[str, Any] = {"sampling": Sampling(), "stop_ids": (0,)}
    read = functools.partial(read_prompts, config, slots=slots, **options)
    write = functools.partial(write_chunk, config, steps=steps, **options)

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    prompt = (weights, ints(1, slots - steps), ints(1), ints())
    _, state = jax.eval_shape(read, *prompt)
    return {
        "prefill": (read, prompt),
        "one token": (functools.partial(decode, config), (weights, ints(1), cache)),
        "decode loop": (write, (weights, state)),
    }
