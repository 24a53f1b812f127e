"""Profiles on a CPU, where XLA's trace names the instruction of each execution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import runtime
from jaxkern.runtime.plan.profile import Limits

W = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)
LIMITS = Limits(bytes_per_second=1e10, flops_per_second=1e11)


def chain(w, x):
    def step(h, _):
        return jnp.tanh(h @ w), None

    return jax.lax.sort(jax.lax.scan(step, x, length=4)[0]), x + 1


@pytest.mark.smoke
def test_rows_have_times_bytes_and_shares():
    plan = runtime.compile(chain, W, W, donate=1)
    x = W + 0
    profile = plan.profile(W, x, calls=3, limits=LIMITS)
    assert not x.is_deleted(), "a profile must not take a donated argument"
    assert profile.note == "" and profile.seconds > 0
    rows = {row.name: row for row in profile.rows}
    listed = {i.name: i for i in plan.instructions()}
    assert set(rows) <= set(listed)
    assert not any(listed[name].opcode == "while" for name in rows)
    (product,) = [
        name for name, i in listed.items() if i.flops == 2 * 64**3 and i.runs == 4
    ]
    row = rows[product]
    assert row.runs == 4
    assert row.flops == 4 * 2 * 64**3
    assert row.bytes == 4 * 3 * 4 * 64 * 64
    floor = max(row.bytes / 1e10, row.flops / 1e11)
    assert row.share == pytest.approx(floor / row.seconds)
    times = [row.seconds for row in profile.rows]
    assert times == sorted(times, reverse=True) and times[-1] > 0
    assert {span.name for span in profile.timeline} <= set(listed)
    assert min(span.start for span in profile.timeline) == 0
    assert product in str(profile)


def test_two_profiles_at_once_are_refused_in_words(tmp_path):
    plan = runtime.compile(jnp.sin, W)
    with jax.profiler.trace(tmp_path):
        with pytest.raises(RuntimeError, match="jax's profiler is in use"):
            plan.profile(W, limits=LIMITS)
    assert plan.profile(W, limits=LIMITS).rows
    with pytest.raises(ValueError, match="at least 1, got 0"):
        plan.profile(W, calls=0, limits=LIMITS)


def test_limits_say_how_long_work_must_take():
    assert LIMITS.seconds(1e10, 0) == 1
    assert LIMITS.seconds(1e9, 2e11) == 2


@pytest.mark.full
def test_limits_are_measured():
    limits = runtime.measured_limits(jax.devices()[0])
    assert 1e8 < limits.bytes_per_second < 1e13
    assert 1e8 < limits.flops_per_second < 1e15
