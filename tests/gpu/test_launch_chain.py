"""A model's decode step in one call of the device, against launches one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.drawn_models import drawn_model
from jaxkern.gpu import launch_chain
from jaxkern.lowering.chained import chained
from jaxkern.models import decoder, gemma4
from jaxkern.models.cached_steps import decode, with_lengths
from tests.lowering.test_chained import llama
from tests.models.test_expert_slots import two_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu" or launch_chain.missing() is not None,
        reason="no GPU that begins launches early, or no library",
    ),
]


def filled(x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros(x.shape, x.dtype)
    key = jax.random.key(x.size)
    return (jax.random.normal(key, x.shape) / 16).astype(x.dtype)


def filled_llama(slots):
    config, *arrays = llama(layers=4, slots=slots)
    return config, *jax.tree.map(filled, arrays)


def filled_gemma4(slots):
    """Layers with a window and without, and those that read an earlier one's keys."""
    return filled_model("gemma-4-E2B", 10, gemma4.empty_cache, slots)


def filled_qwen3_6(slots):
    """Three gated delta nets and an attention with gates, experts behind each."""
    return filled_model("Qwen3.6-35B-A3B", 4, decoder.empty_cache, slots)


def filled_model(name, layers, empty_cache, slots):
    configs = []

    def arrays():
        config, weights = drawn_model(name, "bf16", layers)
        configs.append(config)
        return weights, empty_cache(config, 1, slots, jnp.bfloat16)

    found = jax.tree.map(filled, jax.eval_shape(arrays))
    return configs[0], *found


@pytest.mark.parametrize(
    "model, slots",
    [
        (filled_gemma4, 640),
        (filled_qwen3_6, 640),
        (filled_llama, 64),  # one share of the keys
        (filled_llama, 640),  # a cluster
        *((functools.partial(two_layers, kind), 64) for kind in ("bf16", "mxfp4")),
        (functools.partial(two_layers, "Q8_0"), 64),
    ],
)
def test_steps_in_a_chain_are_the_same_numbers(model, slots):
    """Kernels that began too early would read what the step before has left: a second
    and a third step, on caches in place, are compared with it."""
    own = model in (filled_llama, filled_gemma4, filled_qwen3_6)
    config, weights, cache = model(slots) if own else model()
    lengths = jnp.full_like(cache[0].lengths, slots // 2 + 1)
    cache = with_lengths(cache, lengths)

    def steps(step, cache):
        step, logits = jax.jit(step, donate_argnums=2), []
        for token in range(8):
            y, cache = step(weights, jnp.full(1, 100 * token), cache)
            logits.append(np.asarray(y))
        return np.stack(logits)

    step = functools.partial(decode, config)
    text = jax.jit(chained(step)).lower(weights, jnp.zeros(1, jnp.int32), cache)
    assert "jaxkern_launch_chain" in text.as_text()
    apart = steps(step, jax.tree.map(jnp.copy, cache))
    for _ in range(20):
        found = steps(chained(step), jax.tree.map(jnp.copy, cache))
        np.testing.assert_array_equal(found, apart)
