"""Kernels of gated_delta_rule on a GPU, against the recurrence in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, explain, gated_delta_rule
from jaxkern.gpu.device import device_capability
from jaxkern.primitives.delta_rule.gated_delta_rule import gated_delta_rule_p
from jaxkern.triton.delta_rule.gated_delta_rule import fwd
from tests.gpu.delta_rule.both_passes import NAMES, both
from tests.gpu.delta_rule.both_passes import check as check_rule
from tests.gpu.delta_rule.both_passes import draw as draw_operands
from tests.gpu.truth import on_a_gpu, relative_errors

pytestmark = on_a_gpu


@pytest.fixture(autouse=True, params=[False, True], ids=["triton", "hopper"])
def walks(request, monkeypatch):
    """Each test with the walks that are chosen and with those of 9.0."""
    if request.param and device_capability() != 90:
        pytest.skip("compute capability 9.0")
    jax.clear_caches()  # the choice is no key of what was compiled
    monkeypatch.setattr(fwd, "HOPPER_WALKS", request.param)
    yield
    jax.clear_caches()


check = functools.partial(check_rule, gated_delta_rule)


def decays(rng, b, t, n, h):
    """Near 1 and far from it."""
    del h
    return rng.exponential(0.2, (b, t, n))


draw = functools.partial(draw_operands, decays)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "b, t, k, n, h, hv, state",
    [
        (2, 700, 2, 4, 128, 128, True),
        (1, 65, 1, 3, 64, 128, False),
        (1, 63, 2, 2, 256, 256, True),
        (3, 1, 1, 2, 128, 64, True),
        (1, 130, 1, 1, 48, 80, True),  # padded to 64 and 128
        (5, 200, 7, 28, 64, 64, True),  # more programs than multiprocessors
    ],
)
def test_values_and_gradients(b, t, k, n, h, hv, state, dtype):
    check(draw(b, t, k, n, h, hv, dtype, state))


def test_a_token_that_forgets_everything_and_one_that_writes_nothing():
    query, key, value, g, beta, state = draw(1, 200, 1, 2, 64, 64, "bfloat16")
    g = g.at[:, 100].set(-jnp.inf).at[0, 30, 1].set(-jnp.inf)
    g = g.at[0, 64, 0].set(-1e30)
    beta = beta.at[:, 50].set(0.0)
    found = dict(zip(NAMES, check([query, key, value, g, beta, state]), strict=True))
    np.testing.assert_array_equal(found["dg"][:, 100], 0.0)
    np.testing.assert_array_equal(found["dinitial"][0, 1] * 0, 0.0)
    changed = [x.at[:, :100].set(x[:, 100:]) for x in (query, key, value)]
    with backend("triton", strict=True):
        out, _ = gated_delta_rule(*[*changed, g, beta, state])
    np.testing.assert_array_equal(out[:, 100:], found["out"][:, 100:])


def test_strong_decay_and_equal_keys_lose_no_digits():
    query, key, value, g, beta, state = draw(1, 300, 1, 2, 128, 64, "bfloat16")
    check([query, key, value, 200 * g, beta, state])
    same = jnp.broadcast_to(key[:, :1], key.shape)
    check([query, same, value, 0.01 * g, 0 * beta + 1, state], slack=2.0)


def test_decays_and_strengths_of_16_bits_and_a_mapped_axis():
    operands = draw(2, 100, 1, 2, 64, 64, "bfloat16", state=False)
    operands[3:] = [x.astype(jnp.bfloat16) for x in operands[3:]]

    def of_one(*rows):
        out, state = gated_delta_rule(*[x[None] for x in rows])
        return out[0], state[0]

    with backend("triton", strict=True):
        out, state = jax.jit(gated_delta_rule)(*operands)
        again, its = jax.jit(jax.vmap(of_one))(*operands)
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(its, state)
    assert state.dtype == jnp.float32


def test_every_run_has_the_same_bits():
    operands = draw(2, 700, 2, 4, 128, 128, "bfloat16")
    dout, dstate = operands[2], operands[5]
    run = jax.jit(functools.partial(both, gated_delta_rule))
    first = run(dout, dstate, *operands)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, first, run(dout, dstate, *operands))


@pytest.mark.parametrize("b, t, k, n", [(1, 700, 2, 4), (2, 1030, 4, 4), (1, 65, 1, 8)])
def test_one_launch_has_the_bits_of_two(b, t, k, n, monkeypatch):
    *operands, state = draw(b, t, k, n, 128, 128, "bfloat16")
    if not fwd.in_one(operands[1], operands[2]):
        pytest.skip("this GPU or these walks have two launches")
    options = dict(scale=0.1, chunk_size=64)
    one = jax.jit(lambda *a: fwd.gated_delta_rule(*a, **options))(*operands, state)
    monkeypatch.setattr(fwd, "in_one", lambda key, value: False)
    two = jax.jit(lambda *a: fwd.gated_delta_rule(*a, **options))(*operands, state)
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_walks_in_pairs_have_the_bits_of_walks_one_by_one(monkeypatch):
    operands = draw(2, 300, 1, 2, 64, 80, "bfloat16")
    dout, dstate = operands[2], operands[5]

    def found(multiprocessors):
        monkeypatch.setattr(fwd, "num_sms", lambda: multiprocessors)
        run = jax.jit(lambda *a: both(gated_delta_rule, *a))  # traced anew
        return run(dout, dstate, *operands)

    jax.tree.map(np.testing.assert_array_equal, found(1), found(1000))


def test_tokens_that_write_next_to_nothing():
    """Their dbeta is not dr . d / beta, whose d has too few digits."""
    query, key, value, g, beta, state = draw(1, 200, 1, 2, 128, 80, "bfloat16")
    check([query, key, value, g, (0.03 * beta).at[:, ::7].set(0.0), state])


def test_second_derivatives_run_the_reference_and_say_so():
    operands = draw(1, 70, 1, 1, 64, 64, "bfloat16", state=False)

    def slope(*a):
        return jax.grad(lambda *x: gated_delta_rule(*x)[0].astype(float).sum(), 3)(*a)

    def curvature(*a):
        return jax.jvp(lambda g: slope(*a[:3], g, a[4]), (a[3],), (a[3],))[1]

    rows = explain(curvature, *operands, platform="cuda").rows
    assert any(row.runs.startswith("xla") for row in rows)
    found = jax.jit(curvature)(*operands)
    with jax.enable_x64(True), backend("xla"):
        truth = jax.jit(curvature)(*(x.astype(jnp.float64) for x in operands))
    [error] = relative_errors(found, truth, 1e-3)
    assert error < 2e-2


def test_primitive_with_another_state_dtype():
    *operands, state = draw(1, 70, 1, 1, 64, 64, "bfloat16")
    with backend("triton", strict=True):
        _, final = gated_delta_rule_p(
            *operands, state.astype(jnp.bfloat16), scale=0.125, chunk_size=64
        )
    assert final.dtype == jnp.bfloat16 and bool(jnp.isfinite(final).all())
