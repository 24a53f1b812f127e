"""Layers that are traced once: how often, and that the program is the same."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxkern.models import llama as page
from jaxkern.models.cached_steps import decode, prefill
from jaxkern.models.traced_once import traced_once
from tests.lowering.test_chained import llama, spec

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


@pytest.mark.parametrize("t", [1, 8])
@pytest.mark.parametrize("windowed", [False, True])
def test_a_model_is_the_same_program(t, windowed, monkeypatch):
    config, weights, cache = llama()
    weights = weights._replace(layers=weights.layers * 2)
    config, cache = replace(config, layers=len(weights.layers)), cache * 2
    assert len(weights.layers) >= 4
    if windowed:  # every second layer sees few tokens, another does not rotate
        odd = tuple(i % 2 == 1 for i in range(config.layers))
        rotated = tuple(i != 2 for i in range(config.layers))
        config = replace(config, window=4, windowed=odd, rotated=rotated)

    def run(weights, ids, lengths, cache):
        if t == 1:
            return decode(config, weights, ids[:, 0], cache)
        return prefill(config, weights, ids, lengths, cache)

    def program():
        ids, lengths = spec(1, t, dtype="int32"), spec(1, dtype="int32")
        # another function each time, which JAX has not traced
        return jax.jit(lambda *xs: run(*xs)).lower(weights, ids, lengths, cache)

    traced = []
    layer = page.transformer_layer
    monkeypatch.setattr(
        page, "transformer_layer", lambda *xs, **o: traced.append(o) or layer(*xs, **o)
    )
    once = program().as_text()
    few = len(traced)
    monkeypatch.setattr(page, "traced_once", lambda layer: layer)
    assert program().as_text() == once
    assert few < len(traced) - few == config.layers
