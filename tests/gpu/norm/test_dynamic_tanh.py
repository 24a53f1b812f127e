"""Triton kernels of dynamic_tanh on a GPU: every operand, odd rows, who runs it."""

import jax.numpy as jnp
import pytest

from jaxkern import dynamic_tanh, explain
from tests.gpu.norm.rows import DTYPES, LONG, WIDTHS, draws, rows_of
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [*WIDTHS, *LONG])
def test_long_and_odd_rows(d, dtype):
    draw, n = draws(dtype, d), rows_of(d)
    x, alpha, weight, bias = draw(n, d), draw(), draw(d), draw(d)
    # the gradient of alpha is one sum of n d terms, of random signs here
    least = [1e-2, 1e-2, 0.1 * (n * d) ** 0.5, 1e-2, 1e-2]
    for operands in ((x, alpha), (x, alpha, weight), (x, alpha, weight, bias)):
        sizes = least[: 1 + len(operands)]
        check_against_float64(dynamic_tanh, *operands, slack=2, least=sizes)


def test_only_who_asks_for_it_gets_it():
    text = str(explain(dynamic_tanh, jnp.zeros((8, 128)), 0.5))
    assert "runs xla: dynamic_tanh_reference" in text
    assert "it fuses work on single elements; not measured" in text
