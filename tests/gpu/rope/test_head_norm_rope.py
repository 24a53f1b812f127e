"""Kernels of head_norm_rope on a GPU."""

import pytest

from jaxkern import head_norm_rope
from tests.gpu.rope.heads import HEADS, draw_operands
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("n, k, h, pairs, options", HEADS)
def test_one_tensor_and_learned_tables(n, k, h, pairs, options):
    (x, _, weight, _), tables = draw_operands(57, n, k, h, pairs, "float32")
    check_against_float64(
        lambda *a: head_norm_rope(*a, offset=1.0, eps=0.1, **options),
        x,
        weight,
        *tables,
        slack=2,
    )
