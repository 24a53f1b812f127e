"""adamw_update and adam_update: optax's steps, the place of eps, mixed dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkern import adam_update, adamw_update
from jaxkern.testing.checks import bf16, case, f32, i32, uniform

OPTIONS = dict(b1=0.9, b2=0.6, eps=0.3, eps_root=0.2, weight_decay=0.1)
LEAF = dict(param=f32(8, 5), grad=f32(8, 5), m=f32(8, 5), v=uniform(8, 5, low=0.5))
CASES = {
    "adamw": [
        case(
            "plain",
            **LEAF,
            learning_rate=uniform(),
            step=i32(low=1, high=9),
            **OPTIONS,
        ),
        case(
            "bf16_params",
            full=True,
            param=bf16(2, 3),
            grad=bf16(2, 3),
            m=f32(2, 3),
            v=uniform(2, 3, low=0.5),
            learning_rate=uniform(),
            step=i32(low=1, high=9),
            **OPTIONS,
        ),
    ],
    "adamw_copied": [
        case(
            "plain",
            **LEAF,
            copy=f32(8, 5),
            learning_rate=uniform(),
            step=i32(low=1, high=9),
            grad_scale=uniform(low=0.5),
            **OPTIONS,
        ),
    ],
}


def tree(seed):
    rng = np.random.default_rng(seed)
    return {
        "w": jnp.asarray(rng.standard_normal((3, 4))),
        "layers": [jnp.asarray(rng.standard_normal(5)), jnp.asarray(rng.normal())],
    }


def run(update, optimiser, steps=4):
    """Parameters after some steps, ours and optax's, in float64."""
    with jax.enable_x64(True):
        ours = theirs = tree(0)
        m = v = jax.tree.map(jnp.zeros_like, ours)
        state = optimiser.init(theirs)
        update = jax.jit(update)
        for step in range(1, steps + 1):
            grads = tree(step)
            ours, m, v = update(ours, grads, m, v, step)
            updates, state = optimiser.update(grads, state, theirs)
            theirs = optax.apply_updates(theirs, updates)
        return ours, theirs


def assert_trees_near(actual, expected, rtol):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=rtol)


def test_adamw_equals_optax():
    options = dict(b1=0.8, b2=0.95, eps=1e-2, eps_root=1e-3, weight_decay=0.3)

    def update(*arrays):
        return adamw_update(*arrays, learning_rate=0.1, **options)

    assert_trees_near(*run(update, optax.adamw(0.1, **options)), rtol=1e-12)


def test_the_defaults_are_those_of_optax():
    for ours, theirs in ((adamw_update, optax.adamw), (adam_update, optax.adam)):

        def update(*arrays, ours=ours):
            return ours(*arrays, learning_rate=1e-3)

        assert_trees_near(*run(update, theirs(1e-3)), rtol=1e-12)


def test_formula_of_the_first_step():
    """In float32, where 1 - 0.999**1 taken literally is wrong in the fifth digit."""
    g, p = 0.3, 2.0
    new, m, v = adam_update(p, g, 0.0, 0.0, 1, learning_rate=0.1, eps=0.5)
    np.testing.assert_allclose(m, 0.1 * g, rtol=1e-6)
    np.testing.assert_allclose(v, 0.001 * g * g, rtol=1e-6)
    np.testing.assert_allclose(new, p - 0.1 * g / (g + 0.5), rtol=2e-7)


def test_eps_is_outside_the_root():
    new, _, _ = adam_update(0.0, 4.0, 0.0, 0.0, 1, learning_rate=1.0, eps=4.0)
    np.testing.assert_allclose(new, -4 / (4 + 4), rtol=1e-6)


def test_learning_rate_and_step_may_be_traced():
    params, grads = tree(0), tree(1)
    zeros = jax.tree.map(jnp.zeros_like, params)

    @jax.jit
    def update(learning_rate, step):
        return adamw_update(
            params, grads, zeros, zeros, step, learning_rate=learning_rate
        )

    for learning_rate, step in ((0.1, 1), (0.2, 7)):
        expected = adamw_update(
            params, grads, zeros, zeros, step, learning_rate=learning_rate
        )
        assert_trees_near(update(learning_rate, step), expected, rtol=1e-5)
    assert update._cache_size() == 1


def test_bfloat16_parameters_with_float32_moments():
    p, g = (jnp.asarray(x, jnp.bfloat16) for x in ([1.0, -3.0], [0.5, 0.25]))
    zeros = jnp.zeros(2)
    new, m, v = adamw_update(p, g, zeros, zeros, 1, learning_rate=0.01)
    assert (new.dtype, m.dtype, v.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    p32, g32 = p.astype(jnp.float32), g.astype(jnp.float32)
    exact, m32, v32 = adamw_update(p32, g32, zeros, zeros, 1, learning_rate=0.01)
    np.testing.assert_array_equal(new, exact.astype(jnp.bfloat16))
    np.testing.assert_array_equal(m, m32)
    np.testing.assert_array_equal(v, v32)


def test_the_derivative_is_finite_where_no_gradient_was_seen():
    def moved(g):
        return adam_update(1.0, g, 0.0, 0.0, 1, learning_rate=0.1, eps=1.0)[0]

    assert moved(0.0) == 1
    np.testing.assert_allclose(jax.grad(moved)(0.0), -0.1, rtol=1e-6)


def test_every_error_says_what_to_do():
    p = jnp.ones(3)
    with pytest.raises(ValueError, match=r"`b2` must lie in \[0, 1\), got 1.0"):
        adamw_update(p, p, p, p, 1, learning_rate=1.0, b2=1.0)
    with pytest.raises(ValueError, match=r"`eps` must be positive"):
        adamw_update(p, p, p, p, 1, learning_rate=1.0, eps=0.0)
    with pytest.raises(ValueError, match=r"`m` must be a pytree like `params`"):
        adamw_update([p], [p], [p, p], [p], 1, learning_rate=1.0)
    with pytest.raises(TypeError, match=r"`step` must have a dtype of kind Integer"):
        adamw_update(p, p, p, p, 1.0, learning_rate=1.0)
    with pytest.raises(TypeError, match=r"the leading dims are \(3,\) in `param`"):
        adamw_update(p, jnp.ones(2), p, p, 1, learning_rate=1.0)


def test_a_step_that_is_a_number_survives_checkpoint():
    def loss(p):
        new, *_ = adamw_update([p], [p], [p], [p * p], 3, learning_rate=0.1)
        return jnp.sum(new[0])

    p = jnp.arange(1.0, 4.0)
    kept = jax.jit(jax.grad(loss))(p)
    again = jax.jit(jax.grad(jax.checkpoint(loss)))(p)
    np.testing.assert_allclose(again, kept, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_copy_is_the_new_parameters_and_gradients_are_scaled(dtype):
    """Before, a step rounded them in a pass of its own, and scaled in another."""
    params, grads, m = tree(0), tree(1), tree(2)
    v = jax.tree.map(jnp.square, tree(3))
    narrow = jax.tree.map(lambda g: g.astype(dtype), grads)
    old = jax.tree.map(lambda p: jnp.full(p.shape, jnp.nan, dtype), params)

    @jax.jit
    def update(grads, scale, copy):
        state = (params, grads, m, v, 3)
        options = dict(learning_rate=0.1, grad_scale=scale, copy=copy)
        return adamw_update(*state, **options)

    found = update(narrow, 0.25, old)
    plain = update(
        jax.tree.map(lambda g: 0.25 * g.astype("float32"), narrow), None, None
    )
    assert len(found) == 4 and len(plain) == 3
    for a, b in zip(*map(jax.tree.leaves, (found[:3], plain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (found[3], found[0])), strict=True):
        assert a.dtype == dtype
        np.testing.assert_array_equal(a, b.astype(dtype))
    scaled = update(narrow, 0.25, None)
    for a, b in zip(*map(jax.tree.leaves, (scaled, plain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
