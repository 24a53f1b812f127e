"""Rows and experts of interleaved GGUF blocks on a GPU; products: fused_products."""

import jax
import pytest

from jaxkern.triton.quant.packed_products import BYTES
from tests.gpu.quant.row_checks import check_experts, check_rows, check_weights
from tests.gpu.quant.test_fused_products import weights
from tests.gpu.truth import on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("qtype", BYTES)
def test_rows(qtype, dtype):
    check_rows(*weights(qtype, 48, 1280), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("qtype", BYTES)
def test_weights(qtype, dtype):
    w, values = weights(qtype, 48, 1280)
    check_weights(w, values, dtype)
    stack = jax.tree.map(lambda a: a.reshape(3, 1, -1), w)
    check_weights(stack, values, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("qtype", ["Q4_K", "Q6_K", "MXFP4", "Q2_K"])
def test_experts(qtype, dtype):
    w, values = weights(qtype, 5 * 48, 1024)
    stack = jax.tree.map(lambda a: a.reshape(5, 3, -1), w)
    check_experts(stack, values.reshape(5, 48, 1024), dtype=dtype)


def test_one_token_of_many_experts():
    w, values = weights("Q4_K", 16 * 32, 512)
    stack = jax.tree.map(lambda a: a.reshape(16, 2, -1), w)
    check_experts(stack, values.reshape(16, 32, 512), tokens=1, top_k=8)
    check_experts(stack, values.reshape(16, 32, 512), tokens=8, top_k=8)
