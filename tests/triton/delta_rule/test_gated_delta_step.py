"""The kernel of both delta steps: its launch, and its values in the interpreter."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain, gated_delta_step
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.primitives.delta_rule.gated_delta_step import gated_delta_step_reference
from jaxkern.primitives.delta_rule.kimi_delta_attention_step import (
    kimi_delta_attention_step_reference,
)
from jaxkern.testing.interpreter import evaluated
from jaxkern.triton.delta_rule import gated_delta_step as kernel
from tests.triton.interpreted import (
    INTERPRETED,
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

SHAPES = [  # b, k, group, h, hv: one block of columns, several, none whole
    (2, 2, 2, 4, 3),
    (1, 1, 1, 16, 72),
    (3, 2, 1, 5, 1),
]


@starts_it
@pytest.mark.skipif(bridge.triton is None, reason="triton is not installed")
def test_in_a_process_of_its_own():
    check_in_its_own_process(__file__, 3 * len(SHAPES) + 3)


@pytest.mark.skipif(INTERPRETED or bridge.missing() is not None, reason="no compiler")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_it_is_one_launch_in_place_without_spilling(dtype):
    operands = draw(1, 16, 2, 128, 128, dtype)
    for capability in (80, 90):
        with compiling_for(capability):
            [row] = explain(gated_delta_step, *operands, platform="cuda").rows
            [launch] = row.launches
            assert row.runs.startswith("triton") and launch.stack_bytes == 0
    jitted = jax.jit(gated_delta_step).trace(*operands)
    text = jitted.lower(lowering_platforms=("cuda",)).as_text()
    assert re.search(r"output_tuple_indices = \[1\], operand_index = 5", text)


def draw(b, k, group, h, hv, dtype=jnp.float32):
    rng = np.random.default_rng([b, k, group, h, hv])
    shapes = (b, k, h), (b, k, h), (b, k * group, hv), (b, k * group), (b, k * group)
    query, key, value, g, beta = (rng.standard_normal(s) for s in shapes)
    state = jnp.asarray(rng.standard_normal((b, k * group, h, hv)), dtype)
    token = (query, key, value, -np.abs(g), beta)
    return *(jnp.asarray(x, jnp.float32) for x in token), state


@alone
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape, in_place):
    operands = draw(*shape)
    expected = evaluated(
        functools.partial(gated_delta_step_reference, scale=0.3), *operands
    )
    with interpreted(in_place):
        found = kernel.gated_delta_step(*operands, scale=0.3)
    for y, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, e, atol=1e-5)


@alone
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_with_a_decay_of_each_channel(shape):
    query, key, value, g, beta, state = draw(*shape)
    g = g[..., None] * jnp.arange(key.shape[-1])  # the first row keeps all
    g = g.at[..., -1].set(-jnp.inf)
    operands = (query, key, value, g, beta, state)
    expected = evaluated(
        functools.partial(kimi_delta_attention_step_reference, scale=0.3), *operands
    )
    with interpreted():
        found = kernel.gated_delta_step(*operands, scale=0.3)
    for y, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, e, atol=1e-5)


@alone
@pytest.mark.parametrize("forgotten", [1.0, jnp.nan, jnp.inf])
def test_g_of_minus_infinity_forgets(forgotten):
    query, key, value, g, beta, state = draw(1, 1, 2, 8, 8)
    g = g.at[0, 1].set(-jnp.inf)
    state = state.at[0, 1].multiply(forgotten)
    with interpreted():
        out, new = kernel.gated_delta_step(query, key, value, g, beta, state, scale=1.0)
    expected = gated_delta_step_reference(
        query, key, value, g, beta, jnp.zeros_like(state), scale=1.0
    )
    np.testing.assert_allclose(out[:, 1], expected[0][:, 1], atol=1e-5)
    np.testing.assert_allclose(new[:, 1], expected[1][:, 1], atol=1e-5)
