"""Kernels of qk_norm_rope on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, explain, qk_norm_rope
from tests.gpu.rope.heads import HEADS, draw_operands
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("n, k, h, pairs, options", HEADS)
def test_queries_and_keys(n, k, h, pairs, options, dtype):
    for t in (1, 157):
        operands, tables = draw_operands(t, n, k, h, pairs, dtype)
        check_against_float64(
            lambda *a, tables=tables: qk_norm_rope(*a, *tables, **options),
            *operands,
            slack=2,
        )
        check_against_float64(
            lambda q, k, tables=tables: qk_norm_rope(
                q, k, None, None, *tables, **options
            ),
            *operands[:2],
            slack=2,
        )


def test_queries_and_keys_of_other_dtypes():
    (query, _, weight, _), tables = draw_operands(9, 4, 2, 64, 32, "bfloat16")
    (_, key, _, key_weight), _ = draw_operands(9, 4, 2, 64, 32, "float32")
    check_against_float64(
        lambda *a: qk_norm_rope(*a, *tables), query, key, weight, key_weight, slack=2
    )


def test_it_is_one_launch_each_way():
    operands, tables = draw_operands(16, 8, 2, 128, 64, "bfloat16")

    def loss(*operands):
        query, key = qk_norm_rope(*operands, *tables)
        return query.astype(jnp.float32).sum() + key.astype(jnp.float32).sum()

    forward, backward = explain(jax.grad(loss, (0, 1, 2, 3)), *operands).rows
    assert len(forward.launches) == len(backward.launches) == 1


def test_a_bad_head_spoils_no_other():
    (query, key, *weights), tables = draw_operands(7, 4, 2, 128, 64, "float32")
    with backend("triton", strict=True):
        f = jax.jit(lambda q: qk_norm_rope(q, key, *weights, *tables))
        y, y_key = f(query.at[0, 3, 1, 5].set(jnp.nan))
        expected, expected_key = f(query)
    assert jnp.isnan(y[0, 3, 1]).all()
    y = y.at[0, 3, 1].set(0)
    np.testing.assert_array_equal(y, expected.at[0, 3, 1].set(0))
    np.testing.assert_array_equal(y_key, expected_key)
