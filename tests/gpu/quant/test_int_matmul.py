"""Integers of 4 and 8 bits on a GPU: products, rows and experts."""

import functools

import pytest

from jaxkern import IntTensor, quantize_int
from tests.gpu.quant.row_checks import (
    check_experts,
    check_product,
    check_rows,
    normal,
    on_the_cpu,
)
from tests.gpu.truth import on_a_gpu

pytestmark = on_a_gpu

KINDS = {
    "int4 by 128": {"bits": 4, "group_size": 128},
    "uint4 by 128": {"bits": 4, "group_size": 128, "zero_point": True},
    "uint4 by 32": {"bits": 4, "group_size": 32, "zero_point": True},
    "int4 by row": {"bits": 4},
    "int8 by row": {"bits": 8},
    "uint8 by 64": {"bits": 8, "group_size": 64, "zero_point": True},
}


def weights(kind, *shape):
    return on_the_cpu(functools.partial(quantize_int, **KINDS[kind]), normal(shape))


@pytest.mark.parametrize("rows", [1, 3, 16, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind, rows):
    check_product(*weights(kind, 96, 4096), rows)


@pytest.mark.parametrize("kind", ["int4 by 128", "uint4 by 32", "int8 by row"])
def test_sizes_that_nothing_divides(kind):
    d = 2944 if "128" in kind else 2880
    check_product(*weights(kind, 83, d), 1)
    check_product(*weights(kind, 83, d), 9)
    check_product(*weights(kind, 83, 256), 2)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("kind", ["int4 by 128", "uint4 by 32"])
def test_activations_of_more_digits(kind, dtype):
    check_product(*weights(kind, 64, 2048), 3, dtype)


def test_unsigned_codes_without_zeros():
    def unsigned(w):
        q = quantize_int(w, bits=4, group_size=64, zero_point=True)
        return IntTensor(q.codes, q.scales, bits=4, group_size=64, signed=False)

    w, values = on_the_cpu(unsigned, normal((64, 1024)))
    check_product(w, values, 2)
    check_rows(w, values, "float32")


@pytest.mark.parametrize("kind", ["uint4 by 128", "int8 by row"])
def test_rows_and_experts(kind):
    check_rows(*weights(kind, 50, 1056))
    check_experts(*weights(kind, 5, 80, 1024))
