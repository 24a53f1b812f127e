"""Kernels of gated_delta_net_inputs in Triton's interpreter, against the reference."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain, gated_delta_net_inputs
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.primitives.delta_rule.gated_delta_net_inputs import (
    gated_delta_net_inputs_p,
)
from jaxkern.triton.delta_rule import gated_delta_net_inputs as kernel
from tests.triton.interpreted import (
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
CASES = {  # b, t, key heads, their columns, columns of values, gate and rest, taps
    "four taps": (1, 70, 2, 4, 8, 5, 3, 4),
    "two taps, no rest": (1, 19, 1, 8, 24, 9, 0, 2),
    "segments": (2, 20, 1, 4, 4, 0, 2, 3),
}


@starts_it
def test_in_a_process_of_its_own():
    check_in_its_own_process(__file__, len(CASES))


@alone
@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name, monkeypatch):
    monkeypatch.setattr(kernel, "sigmoid", bridge.tl.sigmoid)  # not in assembly
    b, t, heads, h, values, gate, rest, w = CASES[name]
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.float32(rng.standard_normal(shape))

    c = 2 * heads * h + values
    x, weight = draw(b, t, c + gate + rest), draw(c, w)
    ids = None
    if name == "segments":
        ids = jnp.asarray(np.sort(rng.integers(0, 5, (b, t)), 1), jnp.int32)
    options: dict[str, Any] = dict(
        key_heads=heads, key_dim=h, gate_columns=gate, eps=1e-3
    )
    expected = gated_delta_net_inputs_p.reference(x, weight, ids, **options)
    cotangents = [draw(*y.shape) for y in expected]
    assert gated_delta_net_inputs_p.bwd is not None
    gradients = gated_delta_net_inputs_p.bwd.reference(
        x, weight, ids, *cotangents, **options
    )
    with interpreted():
        found = kernel.gated_delta_net_inputs(x, weight, ids, **options)
        back = kernel.gated_delta_net_inputs_bwd(x, weight, ids, *cotangents, **options)
    for y, e in zip((*found, *back), (*expected, *gradients), strict=True):
        assert y.shape == e.shape and y.dtype == e.dtype
        np.testing.assert_allclose(y, e, rtol=2e-5, atol=2e-5)


def gradients(x, weight, ids=None):
    def f(x, weight):
        sizes = dict(key_heads=4, key_dim=128, gate_columns=600)
        parts = gated_delta_net_inputs(x, weight, segment_ids=ids, **sizes)
        return sum(jnp.sin(y.astype(jnp.float32)).sum() for y in parts)

    return jax.grad(f, (0, 1))(x, weight)


full = pytest.mark.full


@starts_it
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=full)])
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=full)])
def test_nothing_spills(capability, packed):
    x, weight = jnp.ones((2, 300, 2700), jnp.bfloat16), jnp.ones((2048, 4))
    operands = (x, weight, jnp.zeros((2, 300), jnp.int32)) if packed else (x, weight)
    with compiling_for(capability):
        rows = explain(gradients, *operands, platform="cuda").rows
        assert [row.runs.split(":")[0] for row in rows] == ["triton", "triton"]
        launches: list[Any] = [launch for row in rows for launch in row.launches]
        assert [launch.stack_bytes for launch in launches] == [0, 0]


@starts_it
def test_refusals_in_words():
    def text(x, weight, **sizes):
        def f(x, weight):
            return gated_delta_net_inputs(x, weight, **sizes)

        return str(explain(f, x, weight, platform="cuda"))

    x = jnp.ones((1, 32, 520))
    heads = dict(key_heads=1, gate_columns=1)
    assert "5 taps" in text(x, jnp.ones((384, 5)), key_dim=128, **heads)
    assert "for 3 tokens" in text(x[:, :3], jnp.ones((384, 4)), key_dim=128, **heads)
    assert "heads of 64 columns" in text(x, jnp.ones((384, 4)), key_dim=64, **heads)
    assert "0 columns of values" in text(x, jnp.ones((256, 4)), key_dim=128, **heads)
