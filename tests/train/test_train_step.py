"""`train_step` against plain JAX and optax, and what it promises beside the numbers."""

import dataclasses
import functools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.interpreters import partial_eval
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern.lowering.explain import every_equation
from jaxkern.models.llama import LlamaWeights
from jaxkern.testing.sharding_checks import collectives
from jaxkern.train import AdamW, next_token_loss, train_step, whole_weights
from jaxkern.train.train_step import COMPILER_OPTIONS, options_for
from tests.train.tiny_llama import (
    CONFIG,
    batches,
    loss_of_one_layer,
    plain_loss,
    weights_of,
)

LOSS = loss_of_one_layer()
STEPS = 50
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-3}
OPTIMIZERS = {
    "float32": AdamW(1e-3),
    "bfloat16": optax.adamw(1e-3),
}


def weights():
    return weights_of(layers=1)


def run(step, state, tokens):
    losses = []
    for batch in tokens:
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
    return state, np.array(losses)


def plain_run(dtype, tokens):
    """Losses of a step without jaxkern."""
    optimizer, params = optax.adamw(1e-3), weights()

    @jax.jit
    def step(params, kept, batch):
        narrow = jax.tree.map(lambda w: w.astype(dtype), params)
        loss, grads = jax.value_and_grad(plain_loss)(narrow, batch)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, kept = optimizer.update(grads, kept, params)
        return optax.apply_updates(params, updates), kept, loss

    kept, losses = optimizer.init(params), []
    for batch in tokens:
        params, kept, loss = step(params, kept, batch)
        losses.append(loss)
    return np.array(losses)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_fifty_steps_follow_plain_jax_and_run_twice_bit_for_bit(dtype):
    tokens = batches(STEPS)
    step = train_step(LOSS, OPTIMIZERS[dtype], compute_dtype=dtype)
    state, losses = run(step, step.init(weights()), tokens)
    expected = plain_run(dtype, tokens)
    assert losses[0] - losses[-1] > 0.3, "it did not learn"
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE[dtype])
    again, same = run(step, step.init(weights()), tokens)
    np.testing.assert_array_equal(losses, same)
    jax.tree.map(np.testing.assert_array_equal, state, again)
    narrow = jax.tree.leaves(state.copy)
    assert len(narrow) == (0 if dtype == "float32" else len(jax.tree.leaves(weights())))
    for copy, p in zip(
        narrow, jax.tree.leaves(state.params), strict=dtype != "float32"
    ):
        np.testing.assert_array_equal(copy, p.astype(dtype))


def squared(w, batch):
    """A loss with a weight, small enough to compile at once."""
    x, counts = batch
    errors = counts * (x @ w["a"].astype(x.dtype)) ** 2
    total = jnp.sum(counts)
    return jnp.sum(errors) / jnp.maximum(total, 1), total


PARAMS = {"a": jnp.arange(1.0, 4.0)}
X = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
COUNTS = np.array([1, 1, 0, 1, 1, 0, 0, 1], np.float32)  # parts differ in weight


def one_step(batch, **options):
    step = train_step(squared, AdamW(0.1), compute_dtype=jnp.float32, **options)
    return step(step.init(PARAMS), batch)


def test_parts_of_a_batch_are_the_batch():
    """Weighted by what each counts: a mean of means would be another number."""
    whole, expected = one_step((X, COUNTS))
    parts, found = one_step((X, COUNTS), accumulate=4)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-6)
    np.testing.assert_allclose(found.grad_norm, expected.grad_norm, rtol=1e-6)
    np.testing.assert_allclose(parts.params["a"], whole.params["a"], rtol=1e-6)
    np.testing.assert_allclose(parts.optimizer.m["a"], whole.optimizer.m["a"], 1e-5)
    rows = [COUNTS[i::4].sum() for i in range(4)]
    assert len(set(rows)) > 1 and min(rows) == 0, "the parts do not differ"


def test_clipping_is_that_of_optax():
    plain, metrics = one_step((X, COUNTS))
    norm = float(metrics.grad_norm)
    state, clipped = one_step((X, COUNTS), clip_norm=norm / 2)
    assert float(clipped.grad_norm) == norm  # of the gradient as it was
    np.testing.assert_allclose(
        state.optimizer.m["a"], plain.optimizer.m["a"] / 2, rtol=1e-6
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "optimizer", [AdamW(0.1), optax.adam(0.1)], ids=["op", "optax"]
)
def test_a_gradient_that_is_not_finite_changes_nothing(optimizer, bad):
    step = train_step(squared, optimizer, clip_norm=1.0)
    state, _ = step(step.init(PARAMS), (X, COUNTS))
    before = jax.tree.map(np.asarray, state)
    broken = X.copy()
    broken[0, 0] = bad
    after, metrics = step(state, (broken, COUNTS))
    assert bool(metrics.skipped) and int(after.skipped) == 1 and int(after.steps) == 1
    expected = before._replace(skipped=np.int32(1))
    jax.tree.map(np.testing.assert_array_equal, after, expected)
    last, metrics = step(after, (X, COUNTS))
    assert not metrics.skipped and int(last.steps) == 2
    assert (last.params["a"] != before.params["a"]).all()


def test_the_state_is_donated_and_what_was_given_is_not():
    step = train_step(squared, AdamW(0.1))
    given = {"a": jnp.arange(1.0, 4.0)}
    state = step.init(given)
    step(state, (X, COUNTS))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not given["a"].is_deleted()


def cut(mesh, axis_of_rows):
    """Every array of two dims by its rows or columns over the devices."""

    def place(w):
        spec = P() if w.ndim < 2 else P(*axis_of_rows)
        return jax.device_put(w, NamedSharding(mesh, spec))

    return place


LAYOUTS = {  # of the matrices; of the rows of a batch
    "data": ((), P("x")),
    "fsdp": (("x", None), P("x")),
    "fsdp, whole weights": (("x", None), P("x")),
    "tensor": ((None, "x"), P()),
}


@functools.cache
def on_one_device():
    step = train_step(LOSS, AdamW(1e-3), compute_dtype=jnp.float32)
    return run(step, step.init(weights()), batches(3))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("data", marks=pytest.mark.full),
        pytest.param("fsdp", marks=pytest.mark.full),
        "fsdp, whole weights",
        "tensor",
    ],
)
def test_eight_devices_are_one(layout):
    of_weights, of_rows = LAYOUTS[layout]
    mesh = Mesh(np.array(jax.devices()[:8]), "x")
    loss = whole_weights(LOSS, mesh) if "whole" in layout else LOSS
    step = train_step(loss, AdamW(1e-3), compute_dtype=jnp.float32)
    state = step.init(jax.tree.map(cut(mesh, of_weights), weights()))
    cuts = jax.tree.map(lambda x: x.sharding, state)
    tokens = [jax.device_put(b, NamedSharding(mesh, of_rows)) for b in batches(3)]
    state, losses = run(step, state, tokens)
    expected, expected_losses = on_one_device()
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)
    assert jax.tree.map(lambda x: x.sharding, state) == cuts, "the state moved"
    assert len(step.compiled) == 1


def test_whole_weights_refuses_axes_that_are_not_automatic():
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Explicit,), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="whole_weights: `mesh` must have automatic"):
        whole_weights(LOSS, mesh)


def test_fsdp_moves_each_weight_once_and_no_rows():
    mesh = Mesh(np.array(jax.devices()[:2]), "x")
    place = cut(mesh, ("x", None))
    step = train_step(whole_weights(LOSS, mesh), AdamW(1e-3), compute_dtype="float32")
    state = step.init(jax.tree.map(place, weights()))
    tokens = jax.device_put(batches(1)[0], NamedSharding(mesh, P("x")))
    cuts = jax.tree.map(lambda x: x.sharding, state)
    update = jax.jit(step.update, out_shardings=(cuts, None))
    found = Counter(collectives(update.lower(state, tokens).compile()))
    matrices = sum(w.ndim == 2 for w in jax.tree.leaves(weights()))
    assert set(found) == {"all-gather", "all-reduce"}
    assert found["all-gather"] <= matrices


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"compute_dtype": jnp.int8},
            "`compute_dtype` must be a float .* int8",
        ),
        ({"accumulate": 0}, "`accumulate` must be >= 1, got 0"),
        ({"clip_norm": 0.0}, "`clip_norm` must be positive, got 0.0"),
        ({"optimizer": 0.1}, "`optimizer` an AdamW or .*, got function and float"),
    ],
    ids=str,
)
def test_a_wrong_option_is_named(wrong, message):
    options = {"optimizer": AdamW(0.1)} | wrong
    with pytest.raises((TypeError, ValueError), match=f"^train_step: .*{message}"):
        train_step(squared, **options)


def test_wrong_operands_are_named():
    step = train_step(squared, AdamW(0.1), accumulate=3)
    with pytest.raises(TypeError, match=r"array of floats, got int32 at \['a'\]"):
        step.init({"a": jnp.arange(3)})
    with pytest.raises(ValueError, match=r"divide into 3 parts, got shape \(8, 3\)"):
        step(step.init(PARAMS), (X, COUNTS))
    vector = train_step(lambda w, x: x @ w["a"], AdamW(0.1))
    with pytest.raises(ValueError, match=r"must return one number.*\(8,\)"):
        vector(vector.init(PARAMS), X)


def adapted(w, batch):
    """A packed product with an adapter, and integers that choose columns."""
    x, y = batch
    found = jaxkern.linear(x, w["base"]) + (x @ w["a"].T) @ w["b"].T
    return jnp.mean((found - y)[:, w["columns"]] ** 2)


def with_packed_base():
    keys = jax.random.split(jax.random.key(0), 4)
    base = jax.random.normal(keys[0], (4, 32))
    weights = {
        "base": jaxkern.requantize(base, "affine", bits=8, group_size=32),
        "a": jax.random.normal(keys[1], (2, 32)) / 8,
        "b": jnp.zeros((4, 2)),
        "columns": jnp.array([0, 1, 3]),
    }
    x, y = jax.random.normal(keys[2], (8, 32)), jax.random.normal(keys[3], (8, 4))
    return weights, (x, y)


ADAPTERS = {"base": False, "a": True, "b": True, "columns": False}


def only_ab(w):
    return {name: name in "ab" for name in w}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "optimizer", [AdamW(0.1), optax.adam(0.1)], ids=["op", "optax"]
)
def test_what_is_not_trained_stays_and_the_rest_is_as_if_it_were_alone(
    accumulate, optimizer
):
    weights, batch = with_packed_base()
    options = dict(accumulate=accumulate, clip_norm=0.5)
    step = train_step(adapted, optimizer, trained=ADAPTERS, **options)
    state = step.init(weights)
    alone = train_step(lambda w, b: adapted(weights | w, b), optimizer, **options)
    expected = alone.init({name: weights[name] for name in "ab"})
    kept = [id(x) for x in jax.tree.leaves(state.params["base"])]
    for _ in range(3):
        state, metrics = step(state, batch)
        expected, same = alone(expected, batch)
        np.testing.assert_array_equal(metrics.loss, same.loss)
        np.testing.assert_array_equal(metrics.grad_norm, same.grad_norm)
    for name in "ab":
        np.testing.assert_array_equal(state.params[name], expected.params[name])
    assert [id(x) for x in jax.tree.leaves(state.params["base"])] == kept
    assert state.params["columns"] is not None and state.copy["base"].scales is None
    moments, alone_too = map(jax.tree.leaves, (state.optimizer, expected.optimizer))
    assert [m.shape for m in moments] == [m.shape for m in alone_too]
    assert jax.tree.structure(state.params) == jax.tree.structure(weights)


def test_what_is_not_trained_is_chosen_by_a_function_or_a_module_of_bools():
    weights, batch = with_packed_base()
    whole = jax.tree.map(lambda _: False, weights) | {"a": True, "b": True}
    losses = []
    for trained in (ADAPTERS, only_ab, whole):
        step = train_step(adapted, AdamW(0.1), trained=trained)
        state, _ = step(step.init(weights), batch)
        losses.append(jax.jit(step.update)(state, batch)[1].loss)
    assert len({float(x) for x in losses}) == 1
    assert weights["columns"].tolist() == [0, 1, 3]

    class Product(eqx.Module):
        w: jax.Array
        scale: jax.Array

        def __call__(self, x):
            return self.scale * (self.w @ x)

    model = Product(jnp.ones((2, 3)), jnp.array(2.0))
    mask = eqx.tree_at(lambda m: m.w, jax.tree.map(lambda _: False, model), True)
    step = train_step(lambda m, x: m(x).sum(), optax.sgd(0.5), trained=mask)
    state, _ = step(step.init(model), jnp.ones(3))
    np.testing.assert_allclose(state.params.w, jnp.zeros((2, 3)))
    assert state.params.scale == 2


def test_what_is_not_trained_lies_where_the_rest_does():
    weights, (x, y) = with_packed_base()
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    cut = {"a": P(None, "x"), "b": P("x")}
    placed = weights | {
        name: jax.device_put(weights[name], NamedSharding(mesh, spec))
        for name, spec in cut.items()
    }
    step = train_step(adapted, AdamW(0.1), trained=only_ab, compute_dtype="float32")
    expected, _ = step(step.init(weights), (x, y))
    state = step.init(placed)
    rows = jax.device_put((x, y), NamedSharding(mesh, P("x")))
    state, _ = step(state, rows)
    state, metrics = step(state, rows)
    assert np.isfinite(metrics.loss) and len(step.compiled) == 2
    assert state.params["base"].scales.sharding.is_fully_replicated
    again, _ = step(expected, (x, y))
    np.testing.assert_allclose(state.params["b"], again.params["b"], atol=1e-5)


@pytest.mark.parametrize(
    "trained, message",
    [
        ({"a": True}, "`trained` must be the tree of `params` or the beginning"),
        ({**ADAPTERS, "a": 1}, r"must be True or False .*got int at \['a'\]"),
        ({**ADAPTERS, "columns": True}, r"got int32 at \['columns'\]. Mark it False"),
        (False, "`trained` chooses no leaf"),
    ],
    ids=str,
)
def test_a_wrong_choice_is_named(trained, message):
    weights, _ = with_packed_base()
    with pytest.raises((TypeError, ValueError), match=f"^train_step: .*{message}"):
        train_step(adapted, AdamW(0.1), trained=trained).init(weights)
    text = train_step(adapted, AdamW(0.1), trained=only_ab)
    with pytest.raises(TypeError, match=r"must be an array, got str at \['name'\]"):
        text.init(weights | {"name": "x"})


def test_the_package_names_it_when_asked():
    assert jaxkern.train.train_step is train_step
    with pytest.raises(AttributeError, match="no attribute 'trains'"):
        _ = jaxkern.trains  # pyright: ignore
    assert LlamaWeights._fields[-1] == "rope_factors"  # which the loss refuses


@pytest.mark.parametrize(
    ("remat", "attentions"), [("none", 1), ("products", 1), ("full", 2)]
)
def test_a_step_converts_no_weight_and_makes_no_wide_product(remat, attentions):
    """Losses were right with products of float32 cotangents, weights that were rounded
    in a pass of their own, and attention twice: only a clock could tell."""
    w = weights()
    loss = next_token_loss(dataclasses.replace(CONFIG, layers=1), remat=remat)
    step = train_step(loss, AdamW(1e-3), clip_norm=1.0)
    traced = jax.make_jaxpr(step.update)(step.init(w), batches(1)[0]).jaxpr
    used, _ = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    found = [*every_equation(used)]
    names = [e.primitive.name for e in found]
    products = [e for e in found if e.primitive.name in ("linear", "dot_general")]
    again = {"none": 0, "products": 0, "full": 3}[remat]  # all but the last, down
    assert len(products) == 3 * (4 + 1) + again
    operands = {v.aval.dtype.name for e in products for v in e.invars}
    assert operands == {"bfloat16"}
    matrices = {x.shape for x in jax.tree.leaves(w) if x.ndim == 2}
    rounded = [
        e.outvars[0].aval
        for e in found
        if e.primitive.name == "convert_element_type"
        and e.outvars[0].aval.dtype == jnp.bfloat16
    ]
    assert not [a for a in rounded if a.shape in matrices]
    assert names.count("attention_fwd") + names.count("attention") == attentions
    assert names.count("adamw_copied_tree") == 1 and "adamw_tree" not in names


def test_narrow_gradients_and_copies_are_those_of_optax():
    """Clipped; AdamW reads narrow gradients and writes the copies itself."""
    w = {"a": jnp.linspace(-1, 1, 12).reshape(3, 4), "b": jnp.ones(4, jnp.bfloat16)}
    x = np.random.default_rng(3).standard_normal((5, 3)).astype(np.float32)

    def loss(w, x):
        return jnp.sum((x.astype(w["a"].dtype) @ w["a"] + w["b"]) ** 2)

    found = {}
    optimizers = {"op": AdamW(0.1, eps=0.3), "optax": optax.adamw(0.1, eps=0.3)}
    for name, optimizer in optimizers.items():
        step = train_step(loss, optimizer, clip_norm=0.5)
        state, losses = run(step, step.init(w), [x])
        assert state.copy["b"] is None and state.copy["a"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(
            state.copy["a"], state.params["a"].astype("bfloat16")
        )
        found[name] = state.params, losses
    for a, b in zip(*map(jax.tree.leaves, found.values()), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-5)


def test_a_step_is_compiled_once():
    """A run compiled it twice: for a state that is bound to no device, and for what the
    first step returned. Losses are the same then, and no test counted."""
    step = train_step(lambda w, x: jnp.mean((x @ w) ** 2), AdamW(0.1))
    state = step.init(jnp.ones(3))
    assert state.params.committed
    for _ in range(3):
        state, _ = step(state, np.ones((2, 3), np.float32))
    (compiled,) = step.compiled.values()
    assert compiled._cache_size() == 1  # pyright: ignore


def test_a_step_on_gpus_is_compiled_with_options_of_their_own():
    here = jnp.zeros(1).sharding
    assert options_for([here, here]) is None

    def on(*platforms):
        devices = [SimpleNamespace(platform=p) for p in platforms]
        return [SimpleNamespace(device_set=devices)]

    gpus: list[Any] = on("gpu", "gpu")
    assert options_for(gpus) == COMPILER_OPTIONS
    assert options_for([*gpus, here]) is None
    # the names are XLA's: another one would raise here
    step = jax.jit(lambda x: x + 1, compiler_options=COMPILER_OPTIONS)
    assert step(jnp.zeros(2)).tolist() == [1, 1]
