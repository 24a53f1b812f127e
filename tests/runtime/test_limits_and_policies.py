"""The page on limits runs as it stands; importing the runtime changes nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxkern.runtime import reset_stats

PAGE = Path(__file__).parents[2] / "docs/limits_and_policies.md"


def test_the_page_runs(capsys):
    reset_stats()
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 6
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    out = capsys.readouterr().out
    assert "needs 4,194,304 bytes (outputs 4,194,304)" in out
    assert "{('scores', 'RESOURCE_EXHAUSTED'): 1}" in out
    assert "sums float32, result as x" in out and "float32 float8_e4m3fn" in out
    assert "4,356 bytes" in out and "\n0 2\n" in out
    assert "rms_norm on cuda runs triton" in out and "name='jit(<lambda>)'" in out
    assert names["cache"].is_deleted()


IMPORTED_LATER = """
import jax, jax.numpy as jnp
from jax._src import monitoring  # the listeners have no public name
from jaxkern import linear, rms_norm, softmax
from jaxkern.primitives.kernel_primitive import REGISTRY

def f(x, w):
    return softmax(linear(rms_norm(x), w))

def state():
    listeners = (len(monitoring._event_listeners),
                 len(monitoring._event_duration_secs_listeners))
    eager = {name: p.impl for name, p in REGISTRY.items()}
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda *a: f(*a).sum(), (0, 1)))(x, w))
    return listeners, eager, jaxpr, type(jax.jit(f)).__call__, jax.jit, jax.device_put

x, w = jnp.ones((2, 8)), jnp.ones((4, 8))
before = state()
from jaxkern import runtime
assert state() == before
with runtime.policy("bf16"), runtime.memory_limit(10**12):
    with runtime.events.subscribe(print), runtime.testing.inject_faults("rms_norm", 99):
        assert state() != before
assert state() == before
"""


@pytest.mark.full
def test_importing_and_leaving_the_runtime_changes_nothing():
    subprocess.run([sys.executable, "-W", "error", "-c", IMPORTED_LATER], check=True)
