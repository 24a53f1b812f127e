"""`linear` with weights of bfloat16 on a GPU: one to four activations, and more."""

import pytest

from tests.gpu.quant.test_fused_products import check
from tests.gpu.truth import on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_few_activations(rows, dtype):
    check("plain", "dense", rows, 97, 4096, dtype)


@pytest.mark.parametrize("rows", [5, 64])
def test_more_activations_are_multiplied_by_xla(rows):
    check("plain", "dense", rows, 96, 1024, "bfloat16")
