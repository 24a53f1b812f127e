"""C++ recurrences with a decay of each channel, and of Mamba-2: exact, one call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    backend,
    explain,
    kimi_delta_attention,
    kimi_delta_attention_step,
    state_space_dual,
)
from tests.cpu.test_cpu_ops import assert_delta_rule, delta_rule_operands
from tests.cpu.test_cpu_products import normal

pytestmark = pytest.mark.usefixtures("kernels")


def kimi_operands(b, t, k, n, h, hv):
    q, key, v, _, beta, state = delta_rule_operands(b, t, k, n, h, hv)
    return q, key, v, -jnp.abs(normal(b, t, n, h, seed=t)), beta, state


def kimi(q, k, v, g, beta, state, chunk_size=4):
    options = {"initial_state": state, "chunk_size": chunk_size}
    return kimi_delta_attention(q, k, v, g, beta, **options)


one_by_one = functools.partial(kimi, chunk_size=1)  # soon compiled


def test_kimi_delta_attention():
    q, k, v, g, beta, state = kimi_operands(2, 9, 2, 4, 7, 37)
    assert_delta_rule(one_by_one, (q, k, v, g.at[0, 3, 1].set(-jnp.inf), beta, state))
    token = (x[:, 0] for x in (q, k, v, g, beta))
    assert_delta_rule(kimi_delta_attention_step, (*token, state))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_kimi_delta_attention_of_any_size(dtype):
    """The recurrence against the chunked form."""
    sizes = ((1, 1, 1, 1, 1, 1), (1, 130, 2, 2, 64, 64), (3, 5, 1, 3, 128, 33))
    for b, t, k, n, h, hv in sizes:
        operands = kimi_operands(b, t, k, n, h, hv)
        assert_delta_rule(kimi, operands, dtype)
    assert_delta_rule(kimi_delta_attention, operands[:5], dtype)  # from zeros


def dual_operands(r, t, k, n, h, size):
    x, step = normal(r, t, n, h), abs(normal(r, t, n, seed=1))
    b, c = (normal(r, t, k, size, seed=s) for s in (2, 3))
    return x, step, -abs(normal(n, seed=4)), b, c, normal(r, n, h, size, seed=5)


def test_state_space_dual():
    """Tokens and rows that are no whole groups, and sequences packed in a row."""
    *operands, state = dual_operands(2, 6, 2, 4, 19, 21)
    ids = jnp.array([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 3, 3]])

    def packed(*operands):
        return state_space_dual(*operands, segment_ids=ids, chunk_size=4)

    assert_delta_rule(packed, (*operands, state))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_state_space_dual_of_any_size(dtype):
    for sizes in ((1, 1, 1, 1, 1, 1), (1, 130, 1, 6, 64, 128), (3, 5, 2, 4, 33, 16)):
        operands = dual_operands(*sizes)
        assert_delta_rule(state_space_dual, operands, dtype)
    assert_delta_rule(state_space_dual, operands[:5], dtype)  # from zeros


def assert_one_call(each, target, axes, operands):
    """`each` gives the results of three operands, or of one they share, by one call."""
    mapped = jax.jit(jax.vmap(each, axes)).lower(*operands).compile()
    calls = mapped.as_text().count(f'custom_call_target="jaxkern_{target}"')
    assert calls == 1
    for i in range(3):
        own = (y if a is None else y[i] for y, a in zip(operands, axes, strict=True))
        for found, expected in zip(mapped(*operands), each(*own), strict=True):
            np.testing.assert_allclose(found[i], expected, atol=1e-6)


def test_vmap_of_mamba_is_a_batch_dim_of_one_call():
    x, step, a, b, c, state = (y[:, None] for y in dual_operands(3, 5, 1, 2, 4, 8))
    axes = (0, 0, None, 0, 0, None)
    given = x, step, a[:, 0], b, c, state[0]
    assert_one_call(state_space_dual, "state_space", axes, given)


@pytest.mark.full
def test_vmap_of_a_kimi_step_is_a_batch_dim_of_one_call():
    *token, state = (y[:, None] for y in kimi_operands(3, 1, 1, 2, 8, 16))
    given = *(y[:, :, 0] for y in token), state[0]
    assert_one_call(kimi_delta_attention_step, "delta_rule", (*[0] * 5, None), given)


def test_a_row_that_is_not_finite_stays_alone():
    x, *rest = dual_operands(1, 5, 1, 2, 18, 21)
    y, state = state_space_dual(x.at[0, 2, 1, 17].set(jnp.nan), *rest)
    lost = ~np.isfinite(y[0])
    assert lost[2:, 1, 17].all() and lost.sum() == 3
    assert (~np.isfinite(state)).sum() == 21


def test_who_runs_and_why_not():
    operands = dual_operands(1, 5, 1, 2, 4, 8)
    with backend("auto"):
        for f, given in (
            (state_space_dual, operands),
            (kimi_delta_attention, kimi_operands(1, 3, 1, 2, 4, 8)),
        ):
            [row] = explain(f, *given).rows
            assert row.runs.startswith("cpp: ")
            t = given[0].shape[1]
            none = (y[:, :0] if y.shape[:2] == (1, t) else y for y in given)
            [row] = explain(f, *none).rows
            assert row.runs.startswith("xla") and "is empty" in " ".join(row.refused)
