"""Kernel of gated_delta_net_step on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, gated_delta_net_step
from jaxkern.lowering.chained import chained
from tests.gpu.truth import check_against_float64, on_a_gpu
from tests.primitives.delta_rule.test_gated_delta_net_step import draw

pytestmark = on_a_gpu

NARROW = ("qkv", "gate", "write", "rate")


def operands(shape, dtype="bfloat16", state_dtype="float32"):
    x = draw(*shape)
    dtypes = {name: dtype for name in NARROW} | {"state": state_dtype}
    x = {name: y.astype(dtypes.get(name, "float32")) for name, y in x.items()}
    return x | {"state": x["state"] / 4}


@pytest.mark.parametrize(
    "dtype, state_dtype",
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32")],
)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 16, 2, 128, 128, 4),
        (32, 4, 1, 128, 128, 4),
        (3, 2, 3, 100, 70, 3),
        (2, 2, 2, 64, 256, 4),
        (2, 1, 1, 128, 256, 2),
        (1, 1, 2, 256, 256, 4),
        (2, 1, 2, 256, 128, 4),
        (2, 1, 1, 1, 1, 1),
    ],
    ids=str,
)
def test_step(shape, dtype, state_dtype):
    x = list(operands(shape, dtype, state_dtype).values())
    with backend("triton", strict=True):
        jax.block_until_ready(jax.jit(gated_delta_net_step)(*x))
    # the gradient has no kernel
    check_against_float64(gated_delta_net_step, *x, slack=2.0, strict=False)


def test_rows_that_do_not_count_stay():
    x = operands((5, 2, 2, 64, 128, 4))
    counts = jnp.array([1, 0, 1, 0, 0])
    with backend("triton", strict=True):
        _, inputs, state = jax.jit(gated_delta_net_step)(**x, counts=counts)
    with backend("xla"):
        _, inputs_too, state_too = jax.jit(gated_delta_net_step)(**x, counts=counts)
    for row in (1, 3, 4):
        np.testing.assert_array_equal(state[row], x["state"][row])
        np.testing.assert_array_equal(inputs[row], x["inputs"][row])
    np.testing.assert_array_equal(inputs, inputs_too)
    np.testing.assert_allclose(state, state_too, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_chains", [False, True])
def test_many_steps_in_place(in_chains):
    """Each reads what the one before has written, two launches a step."""
    x = operands((1, 16, 2, 128, 128, 4))
    token = {name: y for name, y in x.items() if name not in ("inputs", "state")}

    def two(token, inputs, state):
        out, inputs, state = gated_delta_net_step(**token, inputs=inputs, state=state)
        again = gated_delta_net_step(
            **token | {"gate": out}, inputs=inputs, state=state
        )
        return out, *again

    def run(token, inputs, state):
        step = chained(two) if in_chains else two

        def body(states, _):
            first, last, *states = step(token, *states)
            return tuple(states), (first, last)

        return jax.lax.scan(body, (inputs, state), length=20)

    with backend("triton", strict=True):
        found = jax.jit(run, donate_argnums=2)(token, x["inputs"], x["state"] + 0)
    with backend("xla"):
        expected = jax.jit(run)(token, x["inputs"], x["state"])
    for y, e in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        y, e = (np.asarray(a, np.float32) for a in (y, e))
        np.testing.assert_allclose(y, e, rtol=2e-2, atol=2e-2)
