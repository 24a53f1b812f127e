"""inject_faults fails where and when it says; reference is the formula in float64."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import quantize_fp8, quantized_matmul, rms_norm
from jaxkern.primitives.norm.rms_norm import rms_norm_p
from jaxkern.runtime import limited, with_oom_fallback
from jaxkern.runtime.testing.testing import inject_faults, reference
from jaxkern.runtime.trace.fault_points import armed, hit

X = jnp.asarray(np.random.default_rng(1).standard_normal((3, 8)), jnp.float32)


def outcomes(call, n):
    """Did each of n calls fail?"""
    failed = []
    for _ in range(n):
        try:
            call()
            failed.append(False)
        except (RuntimeError, KeyError):
            failed.append(True)
    return failed


@pytest.mark.parametrize(
    "after, times, expected",
    [(0, 1, [1, 0, 0, 0]), (2, 1, [0, 0, 1, 0]), (1, 2, [0, 1, 1, 0]),
     (1, None, [0, 1, 1, 1]), (0, 0, [0, 0, 0, 0])],
)  # fmt: skip
def test_after_and_times(after, times, expected):
    with inject_faults("upload", after, times, error=KeyError("u")) as plan:
        assert outcomes(lambda: hit("upload"), 4) == expected
        hit("execute")  # another point
    assert (plan.hits, plan.raised) == (4, sum(expected))
    hit("upload")
    assert armed == ()


def test_compile_fails_once_for_a_signature():
    f = limited(lambda x: x * 1.5)
    with inject_faults("compile") as plan:
        assert outcomes(lambda: f(X), 3) == [True, False, False]
        assert outcomes(lambda: f(X[0]), 1) == [False]
    assert plan.hits == 3  # the failed signature, it again, the second one


@pytest.mark.smoke
def test_an_op_fails_eagerly_and_in_guarded_programs_only():
    eager, jitted = rms_norm_p.impl, jax.jit(rms_norm)
    guarded = limited(lambda x: jax.grad(lambda x: rms_norm(x).sum())(x))
    truth = jitted(X)
    with inject_faults("rms_norm", times=None) as outer:
        with inject_faults("rms_norm", after=100):
            assert outcomes(lambda: rms_norm(X), 1) == [True]
        assert outcomes(lambda: rms_norm(X), 1) == [True]
        assert outcomes(lambda: guarded(X), 1) == [True]
        assert outcomes(lambda: jitted(X), 1) == [False]
        assert jax.make_jaxpr(rms_norm)(X).jaxpr.eqns[0].primitive is rms_norm_p
    assert outer.raised == 3 and rms_norm_p.impl is eager
    np.testing.assert_array_equal(rms_norm(X), truth)


def test_threads_reach_one_plan():
    with inject_faults("execute", after=50, times=7) as plan:
        failed = []

        def work():
            failed.extend(outcomes(lambda: hit("execute"), 25))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert sum(failed) == 7 == plan.raised and plan.hits == 100


def test_free_when_off():
    """The same jaxpr, and the call goes to jit: its own check is never entered."""
    f = limited(lambda x: rms_norm(x))
    g = jax.jit(lambda x: rms_norm(x))
    assert str(jax.make_jaxpr(f)(X)) == str(jax.make_jaxpr(g)(X))
    with inject_faults("execute"):
        inside = str(jax.make_jaxpr(f)(X))
    assert inside == str(jax.make_jaxpr(g)(X))
    checks = []
    guarded = with_oom_fallback(lambda x: x + 1)
    for function in (f, guarded):
        cells = dict(
            zip(function.__code__.co_freevars, function.__closure__, strict=True)
        )
        planned = (
            cells["planned"].cell_contents
            if "planned" in cells
            else cells["fallback"].cell_contents.planned
        )
        planned.check = lambda *a: checks.append(a)
        function(X)
        assert checks == []
        with inject_faults("execute"):
            function(X)
        assert len(checks) == 1
        checks.clear()


def test_wrong_points_are_refused():
    with pytest.raises(ValueError, match="alloc, compile, execute, upload or the name"):
        with inject_faults("matmull"):
            pass
    with pytest.raises(ValueError, match="after=-1"):
        with inject_faults("alloc", after=-1):
            pass
    with pytest.raises(ValueError, match="no op of jaxkern is called 'rms'"):
        reference("rms")


def test_reference_is_the_formula_in_float64():
    x, weight = np.float32([[1, 2, 3, 5]]), jnp.float16([1, -2, 3, 1])
    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.mean(wide**2) + 1e-6) * np.float64([1, -2, 3, 1])
    for op in ("rms_norm", rms_norm, lambda x, w: rms_norm(x, w)):
        y = reference(op)(x, weight)
        assert isinstance(y, np.ndarray) and y.dtype == np.float64
        np.testing.assert_allclose(y, expected, rtol=1e-15)
    y = reference(rms_norm_p)(x, None, None, eps=1.0, offset=0.0)
    np.testing.assert_allclose(y, wide / np.sqrt(np.mean(wide**2) + 1), rtol=1e-15)


def test_reference_of_pairs_and_of_quantised_weights():
    y, total = reference("add_rms_norm")(X, 2 * X)
    assert y.dtype == total.dtype == np.float64
    np.testing.assert_array_equal(total, 3 * np.asarray(X, np.float64))
    np.testing.assert_allclose(y, reference(rms_norm)(total), rtol=1e-15)
    w = quantize_fp8(X)
    y = reference(quantized_matmul)(X, w)
    decoded = np.asarray(w.codes).view(jnp.float8_e4m3fn).astype(np.float64)
    truth = np.asarray(X, np.float64) @ (decoded * np.float64(w.scales)).T
    np.testing.assert_allclose(y, truth, rtol=1e-14)
