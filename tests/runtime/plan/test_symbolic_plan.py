"""Sizes that come with the arguments: bounds, reuse, exact results."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import rms_norm, runtime

SPEC = jax.ShapeDtypeStruct(("n", 16), "float32")


def rows(n):
    return jnp.asarray(np.random.default_rng(n).normal(size=(n, 16)), jnp.float32)


@pytest.mark.smoke
def test_one_executable_per_size_in_use():
    traces = []

    def f(x):
        traces.append(x.shape)
        return rms_norm(x)

    plan = runtime.compile(f, SPEC, bounds={"n": (1, 8)})
    assert plan.variables == {"n": (1, 8)} and not plan.plans
    for n in (3, 8, 3, 3, 8):
        np.testing.assert_array_equal(plan(rows(n)), rms_norm(rows(n)))
    assert set(plan.plans) == {(3,), (8,)} and traces == [(3, 16), (8, 16)]
    assert plan.at(n=3) is plan.plans[3,]


def test_sizes_out_of_bounds_and_shapes_that_disagree():
    plan = runtime.compile(
        jnp.matmul,
        SPEC,
        jax.ShapeDtypeStruct((16, "n"), "float32"),
        bounds={"n": (2, 8)},
    )
    np.testing.assert_allclose(plan(rows(3), rows(3).T), rows(3) @ rows(3).T, rtol=1e-5)
    with pytest.raises(ValueError, match="n is 9, not between 2 and 8"):
        plan(rows(9), rows(9).T)
    with pytest.raises(ValueError, match="n is 1, not between"):
        plan.at(n=1)
    with pytest.raises(
        TypeError, match=r"array 1 has shape \(16, 4\), not \(16, 'n'\)"
    ):
        plan(rows(3), rows(4).T)
    with pytest.raises(TypeError, match="array 0 has shape"):
        plan(rows(3)[0], rows(3).T)
    with pytest.raises(TypeError, match="the arguments are"):
        plan(rows(3))
    with pytest.raises(ValueError, match=r"takes the sizes \['n'\], got \['m'\]"):
        plan.at(m=3)


def test_bounds_and_dims_must_agree():
    for bounds, message in [
        ({"m": (1, 8)}, r"the dims name \['n'\], `bounds` \['m'\]"),
        ({}, r"the dims name \['n'\], `bounds` \[\]"),
        ({"n": (4, 2)}, "the bounds of n are 4 and 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            runtime.compile(jnp.sin, SPEC, bounds=bounds)
    (n,) = jax.export.symbolic_shape("n")
    spec = jax.ShapeDtypeStruct((n, 16), "float32")
    plan = runtime.compile(jnp.sin, spec, bounds={"n": (1, 8)})
    np.testing.assert_allclose(plan(rows(2)), np.sin(rows(2)), rtol=1e-6)
    spec = jax.ShapeDtypeStruct((2 * n, 16), "float32")
    with pytest.raises(ValueError, match=r"'2\*n' must be one name or one number"):
        runtime.compile(jnp.sin, spec, bounds={"n": (1, 8)})


def test_threads_share_the_first_plan():
    plan = runtime.compile(jnp.sin, SPEC, bounds={"n": (1, 8)})
    found, start = [], threading.Barrier(4)

    def ask():
        start.wait()
        found.append(plan.at(n=5))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(one is found[0] for one in found)


@pytest.mark.parametrize("wrong", [1.5, True, "2", jnp.float32(2)])
def test_a_size_that_is_no_integer_is_named(wrong):
    """It lay within the bounds, which was all that was asked."""
    spec = jax.ShapeDtypeStruct(("n", 4), jnp.float32)
    plan = runtime.compile(jnp.sin, spec, bounds={"n": (1, 8)})
    with pytest.raises(TypeError, match="plan: n must be an integer, got"):
        plan.at(n=wrong)
    assert plan.at(n=np.int64(2)) is plan.at(n=2)
