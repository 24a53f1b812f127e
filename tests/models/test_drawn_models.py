"""Models of the benchmarks in published sizes, traced: nothing is drawn or computed."""

import functools

import jax
import jax.numpy as jnp
import pytest

from benchmarks.drawn_models import PUBLISHED, drawn_model
from jaxkern.models.architecture import page_of
from jaxkern.models.cached_steps import decode, prefill

LAYERS = {"gemma-4-E2B": 10, "Qwen3.6-35B-A3B": 4}  # every kind of layer
KINDS = {"gpt-oss-20b": "mxfp4"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_traces(name):
    configs = []

    def weights_of():
        config, weights = drawn_model(
            name, KINDS.get(name, "Q4_K"), LAYERS.get(name, 2)
        )
        configs.append(config)
        return weights

    weights = jax.eval_shape(weights_of)
    (config,) = configs
    assert config.dtype == "bfloat16"
    page = page_of(config)
    cache = jax.eval_shape(lambda: page.empty_cache(config, 1, 32, jnp.bfloat16))
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    logits, cache = jax.eval_shape(
        functools.partial(prefill, config), weights, ints((1, 8)), ints((1,)), cache
    )
    assert logits.shape == (1, PUBLISHED[name]["vocab_size"])
    logits, _ = jax.eval_shape(
        functools.partial(decode, config), weights, ints((1,)), cache
    )
    assert logits.dtype == jnp.float32
