"""Layers that are traced once: how often, and that the program is the same."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxkern.models import decoder as decoder_page
from jaxkern.models import llama as llama_page
from jaxkern.models.cached_steps import decode, prefill
from jaxkern.models.decoder import empty_cache
from jaxkern.models.mixers.parallel import Parallel
from jaxkern.models.traced_once import traced_once
from tests.lowering.test_chained import llama, spec
from tests.models.test_decoder import CONFIG, MIXERS, random_weights

pytestmark = pytest.mark.smoke


def counted():
    """A layer, and how many rows it was given each time that Python ran it."""
    rows = []

    def layer(weight, x, bias=None):
        rows.append(x.shape[0])
        y = x * weight
        return y if bias is None else y + bias

    return layer, rows


def test_alike_layers_are_traced_once():
    layer, rows = counted()
    weights, x = jnp.arange(1.0, 4.0), jnp.ones(2)

    def f(weights, x, one):
        for weight in weights:
            x = one(weight, x)
        return one(weights[0], one(weights[1], x, x))

    once = jax.make_jaxpr(partial(f, one=traced_once(layer)))(weights, x)
    assert rows == [2, 2]  # the second has a bias
    each = jax.make_jaxpr(partial(f, one=layer))(weights, x)
    assert [str(eqn) for eqn in once.eqns] == [str(eqn) for eqn in each.eqns]
    assert len(rows) == 2 + 5


def test_outside_of_a_trace_it_runs_as_it_is():
    layer, rows = counted()
    one = traced_once(layer)
    assert one(jnp.float32(2), one(jnp.float32(3), jnp.ones(2))).tolist() == [6, 6]
    assert rows == [2, 2]
    assert jax.grad(lambda x: one(x, one(x, x)).sum())(jnp.ones(2)).tolist() == [3, 3]


def window_config(config):
    """Every second layer sees few tokens, another does not rotate."""
    odd = tuple(i % 2 == 1 for i in range(config.layers))
    rotated = tuple(i != 2 for i in range(config.layers))
    return replace(config, window=4, windowed=odd, rotated=rotated)


def llama_of_four():
    config, weights, cache = llama()
    weights = weights._replace(layers=weights.layers * 2)
    return replace(config, layers=4), weights, cache * 2


def windowed_llama():
    config, *rest = llama_of_four()
    return window_config(config), *rest


def mixed_twice():
    """A layer of nearly every kind, and all of them once more.

    Mamba-2's factors are a constant, which two layers then share.
    """
    kept = [i for i, mixer in enumerate(MIXERS) if not isinstance(mixer, Parallel)]
    mixers = tuple(MIXERS[i] for i in kept)
    blocks = tuple(CONFIG.feed_forwards[i] for i in kept)
    config = replace(CONFIG, mixers=2 * mixers, feed_forwards=2 * blocks)
    weights = jax.eval_shape(lambda: random_weights(jnp.float32, config))
    return config, weights, jax.eval_shape(lambda: empty_cache(config, 1, 64))


@pytest.mark.parametrize("t", [1, 8])
@pytest.mark.parametrize(
    ("page", "model", "kinds"),
    [
        (llama_page, llama_of_four, 1),
        (llama_page, windowed_llama, 3),
        (decoder_page, mixed_twice, len(MIXERS) - 1),
    ],
)
def test_a_model_is_the_same_program(page, model, kinds, t, monkeypatch):
    config, weights, cache = model()
    traced = []

    def traced_with(once):
        def counted(layer):
            return once(lambda *operands: traced.append(layer) or layer(*operands))

        return counted

    def program(once):
        monkeypatch.setattr(page, "traced_once", traced_with(once))

        def run(weights, ids, lengths, cache):
            if t == 1:
                return decode(config, weights, ids[:, 0], cache)
            return prefill(config, weights, ids, lengths, cache)

        ids, lengths = spec(1, t, dtype="int32"), spec(1, dtype="int32")
        return jax.jit(run).lower(weights, ids, lengths, cache).as_text()

    copied = program(traced_once)
    assert len(traced) == kinds
    assert program(lambda layer: layer) == copied
    assert len(traced) == kinds + len(weights.layers)
