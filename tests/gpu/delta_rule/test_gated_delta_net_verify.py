"""Kernel of gated_delta_net_verify on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, gated_delta_net_verify
from jaxkern.lowering.chained import chained
from tests.gpu.truth import check_against_float64, on_a_gpu
from tests.primitives.delta_rule.test_gated_delta_net_verify import PER_TOKEN, draw

pytestmark = on_a_gpu

LEFT = ("inputs", "state", "keys", "corrections", "g")


def operands(shape, dtype="bfloat16", state_dtype="float32"):
    """Keys of length 1, as calls leave them."""
    x = draw(*shape)
    dtypes = {name: dtype for name in PER_TOKEN} | {"state": state_dtype}
    x = {name: y.astype(dtypes.get(name, "float32")) for name, y in x.items()}
    keys = x["keys"] / jnp.linalg.norm(x["keys"], axis=-1, keepdims=True)
    return x | {"state": x["state"] / 4, "keys": keys}


@pytest.mark.parametrize(
    "shape, dtype, state_dtype",
    [
        ((1, 4, 16, 2, 128, 128), "bfloat16", "float32"),
        ((9, 8, 4, 1, 128, 128), "float16", "float32"),
        ((3, 2, 2, 2, 128, 128), "float32", "float32"),
        ((4, 3, 2, 3, 100, 70, 3), "bfloat16", "float32"),
        ((2, 5, 2, 2, 64, 256), "float32", "float32"),
        ((3, 4, 2, 2, 128, 128), "bfloat16", "bfloat16"),
        ((2, 2, 1, 1, 1, 1, 1), "float32", "float32"),
    ],
    ids=str,
)
def test_values(shape, dtype, state_dtype):
    """Rows keep none of the last call's tokens, all of them, or what lies between."""
    x = list(operands(shape, dtype, state_dtype).values())
    accepted = jnp.arange(shape[0]) % (shape[1] + 1)
    verify = functools.partial(verified, accepted)
    with backend("triton", strict=True):
        jax.block_until_ready(jax.jit(verify)(*x))
    # the gradient has no kernel
    check_against_float64(verify, *x, slack=2.0, strict=False)


def verified(accepted, *x):
    return tuple(gated_delta_net_verify(*x, accepted))


def test_rows_that_rest_stay():
    x = operands((5, 4, 2, 2, 64, 128))
    x["keys"] = x["keys"].at[1].set(jnp.nan)
    accepted = jnp.array([1, 0, 4, -2, 9])
    with backend("triton", strict=True):
        found = jax.jit(gated_delta_net_verify)(**x, accepted=accepted)
    with backend("xla"), jax.default_matmul_precision("highest"):
        expected = jax.jit(gated_delta_net_verify)(**x, accepted=accepted)
    for row in (1, 3):
        np.testing.assert_array_equal(found.state[row], x["state"][row])
    np.testing.assert_array_equal(found.inputs, expected.inputs)
    np.testing.assert_allclose(found.state, expected.state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_chains", [False, True])
def test_many_calls_in_place(in_chains):
    """Each goes on with what the one before has left, two launches a step."""
    x = operands((2, 4, 16, 2, 128, 128))
    tokens = {name: y for name, y in x.items() if name not in LEFT}

    def two(tokens, left, accepted):
        verify = functools.partial(gated_delta_net_verify, accepted=accepted)
        out, *left = verify(**tokens, **dict(zip(LEFT, left, strict=True)))
        again = tokens | {"gate": out}
        return out, *verify(**again, **dict(zip(LEFT, left, strict=True)))

    def run(tokens, left):
        step = chained(two) if in_chains else two

        def body(left, i):
            first, last, *left = step(tokens, left, jnp.stack([i % 5, 3 * i % 5]))
            return left, (first, last)

        return jax.lax.scan(body, left, jnp.arange(20))

    left = [x[name] for name in LEFT]
    with backend("triton", strict=True):
        copies = jax.tree.map(lambda y: y + 0, left)
        found = jax.jit(run, donate_argnums=1)(tokens, copies)
    with backend("xla"), jax.default_matmul_precision("highest"):
        expected = jax.jit(run)(tokens, left)
    for y, e in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        y, e = (np.asarray(a, np.float32) for a in (y, e))
        np.testing.assert_allclose(y, e, rtol=2e-2, atol=2e-2)
