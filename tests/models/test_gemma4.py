"""Gemma 4 where a GPU is: its fused ops are the same model, and a step is one chain."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.drawn_models import drawn_model
from jaxkern.gpu import triton_call as bridge
from jaxkern.models import load
from jaxkern.models.cached_steps import decode
from jaxkern.models.gemma4 import empty_cache
from jaxkern.models.sampling import LIKELIEST
from tests.lowering.test_chained import equations, named, spec

FOLDER = Path(__file__).parents[1] / "golden/transformers_dense/gemma4"
TOKEN = jnp.array([5])


def test_fused_ops_are_the_same_model():
    """Weights of 16 bits: gates in products, norms of heads with the cache."""
    plain, weights = load(FOLDER, "bf16")
    plain = replace(plain, dtype="float32")
    fused, cache = replace(plain, fused=True), empty_cache(plain, 1, 16)
    text = str(jax.make_jaxpr(decode, static_argnums=0)(fused, weights, TOKEN, cache))
    names = "dense_swiglu", "qk_norm_rope_cache", "head_norm_rope"
    assert all(name in text for name in names) and "geglu" not in text
    truth, found = (three_steps(config, weights, cache) for config in (plain, fused))
    for one, other in zip(found, truth, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-5)


def three_steps(config, weights, cache):
    """All logits, and what the caches hold."""
    step, logits = jax.jit(decode, static_argnums=0), []
    for i in range(3):
        y, cache = step(config, weights, TOKEN + i, cache)
        logits.append(y)
    return *logits, *jax.tree.leaves(cache)


@pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
def test_a_decode_step_is_one_chain(monkeypatch):
    """Of a published size: ten launches a layer and those of attention."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    configs = []

    def arrays():
        config, weights = drawn_model("gemma-4-E2B", "bf16", 10)
        configs.append(config)
        return weights, empty_cache(config, 1, 640, jnp.bfloat16)

    weights, cache = jax.eval_shape(arrays)

    def step(weights, token, cache):
        logits, cache = decode(configs[0], weights, token, cache)
        return LIKELIEST.likeliest(logits), cache

    eqns = equations(step, weights, spec(1, dtype="int32"), cache)
    layers, last = named(eqns, "launch_chain")  # a cap of the logits between them
    assert not named(eqns, "triton_call")
    counts = Counter(step.launch.name for step in layers.params["steps"])
    own, shared = len(cache), 10 - len(cache)
    far = len([c for c in cache if c.keys.shape[-1] == 512])
    assert counts.pop("lane_products_kernel") == 10  # behind attention
    assert counts.pop("few_products_kernel") == 6 * 10 + 2 - 10
    assert counts.pop("one_row_kernel") == 3 * 10 + 1
    assert counts.pop("qk_norm_rope_fwd_kernel") == shared
    assert counts.pop("qk_norm_rope_cache_attention_kernel") == own - far
    assert counts.pop("qk_norm_rope_cache_kernel") == far
    assert counts.pop("decode_attention_kernel") == counts.pop("merge_kernel")
    assert counts.total() == 1  # the last norm
    names = [step.launch.name for step in last.params["steps"]]
    assert names == ["argmax_kernel", "best_part_kernel"]
