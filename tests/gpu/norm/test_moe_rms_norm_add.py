"""Kernels of moe_rms_norm_add on a GPU: experts, long and odd rows, refusals."""

import jax.numpy as jnp
import pytest

from jaxkern import explain, moe_rms_norm_add
from tests.gpu.norm.rows import DTYPES, draws, rows_of
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "d, e",
    [
        (1, 1),
        (13, 3),
        (1000, 2),
        (2816, 8),
        (8192, 5),
        (8193, 3),
        (10007, 1),
        (16384, 8),
        (131072, 2),
    ],
)
def test_experts_are_mixed_normed_and_added(d, e, dtype):
    draw, n = draws(dtype, d), 2 * rows_of(d)  # more than the programs
    outputs, experts, residual = draw(n, e, d), draw(n, e), draw(n, d)
    weight, residual_weight = draw(d), draw(d)
    check_against_float64(moe_rms_norm_add, outputs, experts, residual, weight, slack=4)
    check_against_float64(
        lambda *a: moe_rms_norm_add(*a, normalize_residual=True, offset=1.0),
        outputs,
        experts,
        residual,
        weight,
        residual_weight,
        slack=4,
    )


def test_what_xla_does_faster_is_refused_in_words():
    token = jnp.zeros((2, 3, 65536)), jnp.zeros((2, 3)), jnp.zeros((2, 65536))
    assert "do not stay in the caches" in str(explain(moe_rms_norm_add, *token))
