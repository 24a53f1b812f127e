"""with_oom_fallback: only out of memory falls back, nothing is lost, all is counted."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import rms_norm
from jaxkern.runtime import (
    MemoryLimitExceeded,
    allocated_bytes,
    memory_limit,
    stats,
    with_oom_fallback,
)
from jaxkern.runtime.testing.testing import inject_faults
from jaxkern.runtime.trace import events

X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)


def scaled(x, scale):
    return {"y": rms_norm(x) * scale, "sum": x.sum(-1)}


def fallbacks(name, cause="RESOURCE_EXHAUSTED"):
    return stats().oom_fallbacks.get((name, cause), 0)


def test_to_the_host_and_back_to_the_device_of_the_inputs():
    home = jax.devices()[3]
    x, told = jax.device_put(X, home), []
    f = with_oom_fallback(scaled)
    plain, before = f(x, 2.0), fallbacks("scaled")
    with events.subscribe(told.append, kinds=("fallback",)):
        with inject_faults("execute") as plan:
            out = f(x, 2.0)
            f(x, 2.0)  # fits again
    assert plan.raised == 1 and plan.hits == 2
    for name in plain:
        np.testing.assert_array_equal(out[name], plain[name])
        assert out[name].devices() == {home} == plain[name].devices()
    assert fallbacks("scaled") == before + 1
    (event,) = told
    assert event.name == "scaled" and "ran to cpu after: RESOURCE" in event.reason


@pytest.mark.smoke
def test_d34_each_op_that_falls_back_is_counted_and_other_errors_are_raised():
    f = with_oom_fallback(scaled, name="d34")
    g = with_oom_fallback(lambda x: x + 1, name="without_norm")
    with inject_faults("rms_norm", times=None) as plan:
        f(X, 1.0)
        g(X)
        f(X, 1.0)
    assert plan.raised == 2
    assert (fallbacks("d34"), fallbacks("without_norm")) == (2, 0)
    internal = jax.errors.JaxRuntimeError("INTERNAL: RESOURCE_EXHAUSTED is only quoted")
    for error in (internal, ValueError("no"), MemoryError("of the host")):
        with inject_faults("execute", error=error), pytest.raises(type(error)) as e:
            f(X, 1.0)
        assert e.value is error
    assert fallbacks("d34") == 2


@pytest.mark.smoke
def test_a_real_allocation_that_fails():
    """The device has no 2**50 bytes: neither way fits, both are named."""

    def huge(x):
        return jnp.zeros(2**48, jnp.float32) + x

    f = with_oom_fallback(huge)
    x = jnp.ones(())
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as e:
        f(x)
    assert "to cpu: RESOURCE_EXHAUSTED" in "".join(e.value.__notes__)
    assert fallbacks("huge") == 1 and x + 1 == 2


@pytest.mark.smoke
def test_a_donated_input_is_never_lost():
    step = jax.jit(lambda cache, x: cache.at[0].set(x), donate_argnums=0)
    f = with_oom_fallback(step, name="step")
    cache = jnp.zeros((4, 3))
    with inject_faults("execute"):
        out = f(cache, jnp.ones(3))
    assert not cache.is_deleted() and float(cache.sum()) == 0
    np.testing.assert_array_equal(out.sum(-1), [3, 0, 0, 0])
    f(out, jnp.ones(3))  # without a failure neither
    assert not out.is_deleted()


@pytest.mark.parametrize("n", [pytest.param(6, marks=pytest.mark.full), 5, 1])
def test_in_parts_until_they_fit(n):
    """Fails whole and in halves: quarters fit; the scale is taken whole."""
    x = jnp.asarray(X[:n])
    sizes = []

    def seen(x, scale):
        sizes.append(x.shape[0])  # traced once for each size
        return scaled(x, scale)

    f = with_oom_fallback(seen, to=None, then=("chunk",), axis=(0, None), name="seen")
    scale = jnp.linspace(1, 2, 8)
    if n == 1:
        with (
            inject_faults("execute", times=2),
            pytest.raises(RuntimeError, match="inj"),
        ):
            f(x, scale)
        return
    with inject_faults("execute", times=2) as plan:
        out = f(x, scale)
    assert plan.hits == 2 + -(-n // 2) and set(sizes) == {n, -(-n // 2), 2, n % 2 or 2}
    truth = scaled(x, scale)
    for name in truth:
        np.testing.assert_allclose(out[name], truth[name], rtol=1e-6)
        assert out[name].devices() == x.devices()


def test_a_later_axis_and_a_result_that_cannot_be_joined():
    def f(tree, shift):
        return (tree["x"] - shift).T

    axis = ({"x": 1, "bias": None}, None)
    cut = with_oom_fallback(f, None, ["chunk"], axis=axis, name="cut")
    tree = {"x": jnp.asarray(X), "bias": None}
    with inject_faults("execute"):
        np.testing.assert_array_equal(cut(tree, 1.0), (X - 1).T)
    total = with_oom_fallback(lambda x: x.sum(), None, ["chunk"], axis=0, name="total")
    with inject_faults("execute"), pytest.raises(TypeError, match="cannot be joined"):
        total(X)
    both = with_oom_fallback(lambda x, y: x, None, ["chunk"], axis=0, name="both")
    with inject_faults("execute"), pytest.raises(TypeError, match=r"sizes \[6, 8\]"):
        both(X, X.T)


def test_offload_leaves_the_results_in_host_memory():
    f = with_oom_fallback(scaled, to=None, then=("offload",), axis=(0, None))
    on_host = with_oom_fallback(scaled, to=None, then=("offload",))
    for g in (f, on_host):
        with inject_faults("execute"):
            out = g(jnp.asarray(X), 2.0)["y"]
        assert out.sharding.memory_kind == "pinned_host"
        assert out.devices() == {jax.devices()[0]}
        np.testing.assert_allclose(out, scaled(X, 2.0)["y"], rtol=1e-6)


def test_sharded_results_keep_their_sharding():
    mesh = jax.make_mesh((2,), ("m",))
    x = jax.device_put(X, NamedSharding(mesh, P("m")))
    f = with_oom_fallback(lambda x: x * 2, name="sharded")
    plain = f(x)
    with inject_faults("execute"):
        out = f(x)
    assert out.sharding == plain.sharding and out.sharding.num_devices == 2
    np.testing.assert_array_equal(out, 2 * X)


def test_under_a_memory_limit_the_host_is_free(quiet_memory):
    f = with_oom_fallback(lambda x: jnp.outer(x, x), name="outer")
    x = jnp.arange(32.0)
    with memory_limit(allocated_bytes() + 100):
        out = f(x)
    np.testing.assert_array_equal(out, np.outer(x, x))
    assert fallbacks("outer", "MemoryLimitExceeded") == 1
    parts = with_oom_fallback(
        lambda x: x[:, None] * jnp.ones((1, 64)), None, ["chunk"], axis=0, name="parts"
    )
    del out
    with memory_limit(allocated_bytes() + 32 * 64 * 4 // 3):  # quarters fit
        np.testing.assert_array_equal(parts(x)[:, 5], x)
    with memory_limit(0), pytest.raises(MemoryLimitExceeded) as e:
        parts(x)
    assert e.value.requested >= 32 * 64 * 4  # the first error is raised
    assert "chunk: parts: needs" in "".join(e.value.__notes__)


def test_gradients_are_wrapped_from_outside():
    f = with_oom_fallback(lambda x: jnp.sum(rms_norm(x) ** 3), name="loss")
    x = jnp.asarray(X)
    for inside in (jax.grad(f), jax.jit(f), jax.vmap(f)):
        with pytest.raises(TypeError, match=r"with_oom_fallback\(jax.grad\(f\)\)"):
            inside(x)
    gradient = jax.grad(f.__wrapped__)
    g = with_oom_fallback(gradient, name="gradient")
    with inject_faults("rms_norm") as plan:  # its fwd and bwd are of the op
        np.testing.assert_allclose(g(x), gradient(x), rtol=1e-5, atol=1e-6)
    assert plan.raised == 1


def test_an_error_of_the_fallback_is_raised():
    with inject_faults("execute"):
        f = with_oom_fallback(lambda x: x, to="no_such_platform")
        with pytest.raises(RuntimeError, match="no_such_platform"):
            f(jnp.ones(3))


def test_options_are_checked():
    for options, match in [
        (dict(then=("host",)), '"chunk" and "offload"'),
        (dict(then=("chunk",)), "needs `axis`"),
        (dict(to=None), "names a way"),
    ]:
        with pytest.raises(ValueError, match=match):
            with_oom_fallback(scaled, **options)


def test_threads_count_every_fallback():
    f = with_oom_fallback(functools.partial(jnp.add, 1), name="threads")
    results = []

    def work(k):
        for _ in range(5):
            results.append(float(f(jnp.float32(k))) == k + 1)

    with inject_faults("execute", times=None):
        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert results == [True] * 20 and fallbacks("threads") == 20


@pytest.mark.parametrize("then", ["chunk", "offload"])
def test_keys_are_joined_as_numbers_are(then):
    """NumPy, which joins the parts, has no keys; no test returned any."""

    def f(keys, x):
        return jax.vmap(jax.random.split)(keys), x + jax.vmap(jax.random.uniform)(keys)

    args = jax.random.split(jax.random.key(0), 5), jnp.ones(5)
    guarded = with_oom_fallback(f, to=None, then=(then,), axis=0)
    with inject_faults("execute"):
        keys, y = guarded(*args)
    expected, total = f(*args)
    assert keys.dtype == expected.dtype and keys.shape == (5, 2)
    np.testing.assert_array_equal(*map(jax.random.key_data, (keys, expected)))
    np.testing.assert_allclose(y, total, rtol=1e-6)
