"""MLX's affine format on a GPU: products, rows and experts, of 2 to 8 bits."""

import functools

import pytest

from jaxkern import quantize_affine
from tests.gpu.quant.row_checks import (
    check_experts,
    check_product,
    check_rows,
    normal,
    on_the_cpu,
)
from tests.gpu.truth import on_a_gpu

pytestmark = on_a_gpu


def weights(bits, group_size, *shape):
    quantize = functools.partial(quantize_affine, bits=bits, group_size=group_size)
    return on_the_cpu(quantize, normal(shape))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_products(bits):
    w, values = weights(bits, 64, 96, 4096)
    for rows in (1, 10, 40):
        check_product(w, values, rows)
    check_rows(w, values)


@pytest.mark.parametrize("bits, group_size", [(4, 32), (4, 128), (8, 32), (3, 128)])
def test_groups(bits, group_size):
    check_product(*weights(bits, group_size, 40, 1408), 1)
    check_product(*weights(bits, group_size, 40, 1408), 5)


def test_experts():
    check_experts(*weights(4, 64, 4, 48, 1024))
