"""Parameters of modules are operands; tests/docs/test_examples.py tries every function.

Operands were arrays in all other tests, so a weight that was one only by
`__jax_array__` was refused, or taken for a quantised one, unseen.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxkern
from jaxkern import (
    attention,
    dequantize,
    interleave,
    linear,
    quantize_gguf,
    requantize,
    rms_norm,
    swiglu,
)
from jaxkern.interop import flax, jax_nn, tokamax
from jaxkern.interop.flax import trainable
from jaxkern.primitives.activation.softcap import softcap_p
from jaxkern.train import AdamW, train_step
from tests.docs.test_examples import Held


class Block(nnx.Module):
    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 2)
        self.norm = nnx.Param(jnp.ones(8))
        self.up = nnx.Param(jax.random.normal(keys[0], (32, 8)))
        self.down = nnx.Param(jax.random.normal(keys[1], (8, 16)))

    def __call__(self, x):
        return linear(swiglu(linear(rms_norm(x, self.norm), self.up)), self.down)


@pytest.mark.parametrize("held", [nnx.Param, Held])
def test_what_holds_an_array_is_an_operand(held):
    x, w = jnp.arange(8.0).reshape(1, 2, 2, 2), jnp.array([[1.0, 2.0], [3.0, 4.0]])

    def results(wrap, x, w):
        qkv = (wrap(x),) * 3
        return attention(*qkv), linear(wrap(x), wrap(w), bias=wrap(w[0]))

    run = jax.jit(results, static_argnums=0)
    jax.tree.map(np.testing.assert_array_equal, run(held, x, w), run(jnp.asarray, x, w))


def test_a_module_of_nnx_differentiates_and_trains_under_jit():
    block, x = Block(), jnp.arange(16.0).reshape(2, 8) / 8

    @nnx.jit
    def loss(block, x):
        return (block(x) ** 2).mean()

    slopes = nnx.grad(loss)(block, x)

    def plain(norm, up, down):
        return (linear(swiglu(linear(rms_norm(x, norm), up)), down) ** 2).mean()

    weights = block.norm[...], block.up[...], block.down[...]
    expected = jax.grad(plain, (0, 1, 2))(*weights)
    for name, slope in zip(("norm", "up", "down"), expected, strict=True):
        np.testing.assert_allclose(slopes[name][...], slope, rtol=1e-5, atol=1e-6)


def test_quantised_weights_in_a_module():
    w = jnp.asarray(np.random.default_rng(0).standard_normal((4, 32)), jnp.float32)
    packed, x = nnx.Param(quantize_gguf(w, "Q8_0")), jnp.ones((1, 32))
    found = jax.jit(lambda x: linear(x, packed))(x)
    np.testing.assert_allclose(found, x @ w.T, rtol=0.05, atol=0.1)


@pytest.mark.parametrize(
    "to, options",
    [
        ("Q4_0", {}),
        ("affine", {"bits": 4, "group_size": 32}),
        ("int", {"bits": 8}),
        ("nf4", {}),
        ("fp8", {}),
        ("mxfp4", {}),
    ],
)
def test_a_variable_gives_back_the_packed_weights_it_holds(to, options):
    w = jax.random.normal(jax.random.key(0), (16, 128))
    packed = requantize(w, to, **options)
    for held in (packed, interleave(packed) if to == "Q4_0" else packed):
        found = nnx.Variable(held)[...]
        assert jax.tree.structure(found) == jax.tree.structure(held)
        jax.tree.map(np.testing.assert_array_equal, found, held)


def test_packed_weights_that_are_no_param_are_not_differentiated():
    block, x = Block(), jnp.arange(16.0).reshape(2, 8) / 8
    w = jax.random.normal(jax.random.key(0), (8, 32))
    block.packed = nnx.Variable(quantize_gguf(w, "Q8_0"))

    def loss(block, x):
        return (linear(linear(block(x), block.up), block.packed) ** 2).mean()

    def plain(norm, x):
        y = linear(swiglu(linear(rms_norm(x, norm), block.up)), block.down)
        return (linear(linear(y, block.up), dequantize(block.packed[...])) ** 2).mean()

    slopes = nnx.jit(nnx.grad(loss))(block, x)
    assert "packed" not in slopes and "up" in slopes
    expected = jax.grad(plain)(block.norm[...], x)
    np.testing.assert_allclose(slopes["norm"][...], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("to, options", [("Q8_0", {}), ("affine", {"group_size": 32})])
def test_packed_weights_in_a_param_are_left_out_by_the_filter(to, options):
    block, x = Block(), jnp.arange(16.0).reshape(2, 8) / 8
    w = jax.random.normal(jax.random.key(0), (8, 32))
    block.packed = nnx.Param(requantize(w, to, **options))
    block.order = nnx.Param(jnp.arange(8))

    def loss(block, x):
        y = linear(linear(block(x), block.up), block.packed)
        return (y[:, block.order[...]] ** 2).mean()

    plain = nnx.clone(block)
    plain.packed = nnx.Variable(block.packed[...])
    plain.order = nnx.Variable(block.order[...])
    expected = nnx.grad(loss)(plain, x)
    of_trained = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, trainable))

    @nnx.jit
    def step(block, optimizer, x):
        value, slopes = of_trained(block, x)
        optimizer.update(block, slopes)
        return value, slopes

    optimizer = nnx.Optimizer(block, optax.adam(1e-2), wrt=trainable)
    first, slopes = step(block, optimizer, x)
    assert jax.tree.structure(slopes) == jax.tree.structure(expected)
    for d, e in zip(*map(jax.tree.leaves, (slopes, expected)), strict=True):
        np.testing.assert_allclose(d, e, rtol=1e-4, atol=1e-6)
    second, _ = step(block, optimizer, x)
    assert second < first
    jax.tree.map(
        np.testing.assert_array_equal, block.packed[...], requantize(w, to, **options)
    )


@pytest.mark.parametrize("layer", [nnx.Linear(8, 4, rngs=nnx.Rngs(0)), [[1.0] * 8]])
def test_a_layer_in_the_place_of_its_weight_is_refused(layer):
    with pytest.raises(TypeError, match=r"linear: `w` must be (an )?array"):
        linear(jnp.ones((1, 8)), layer)


def test_a_state_of_nnx_is_what_train_step_trains():
    block, x = Block(), jnp.arange(16.0).reshape(2, 8) / 8
    block.seen = nnx.Variable(jnp.array(0))
    graph, params, rest = nnx.split(block, nnx.Param, ...)

    def loss(params, x):
        return (nnx.merge(graph, params, rest)(x) ** 2).mean()

    step = train_step(loss, AdamW(1e-2), compute_dtype="float32")
    state = step.init(params)
    losses = []
    for _ in range(3):
        state, metrics = step(state, x)
        losses.append(float(metrics.loss))
    assert losses == sorted(losses, reverse=True) and losses[2] < 0.95 * losses[0]
    np.testing.assert_allclose(losses[0], loss(params, x), rtol=1e-6)
    with pytest.raises(TypeError, match=r"int32 at .*seen.*Mark it False in `trained`"):
        step.init(block)


def test_no_array_behind_it_is_refused_by_name():
    with pytest.raises(TypeError, match="rms_norm: `weight` must be an array"):
        jaxkern.rms_norm(jnp.ones((2, 8)), Held("ones"))


def test_the_functions_of_other_libraries_take_them_too():
    x, w, sizes = jnp.ones((1, 3, 2, 8)), jnp.ones((2, 8, 4)), jnp.array([1, 2])
    held = map(Held, (x[0, :, 0], w, sizes))
    np.testing.assert_allclose(jax_nn.ragged_dot(*held), 8.0)
    for module in (flax, jax_nn, tokamax):
        found = module.dot_product_attention(Held(x), Held(x), value=Held(x))
        np.testing.assert_allclose(found, 1.0, rtol=1e-6)
    gate, up = Held(w[0]), Held(w[1])
    found = tokamax.gated_linear_unit(Held(x[0, :, 0]), (gate, up))
    np.testing.assert_allclose(found, 64.0)


def test_a_primitive_and_the_leaves_of_a_tree():
    x = jnp.array([1.0, 50.0])
    np.testing.assert_array_equal(softcap_p(Held(x), cap=30.0), softcap_p(x, cap=30.0))
    zeros = {"w": jnp.zeros(2)}
    new, *_ = jaxkern.adamw_update(
        *({"w": Held(x)}, {"w": jnp.ones(2)}, zeros, zeros, 1),
        learning_rate=0.1,
        weight_decay=0.0,
    )
    np.testing.assert_allclose(new["w"], x - 0.1, rtol=1e-5)
