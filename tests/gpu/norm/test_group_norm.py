"""Kernels of group_norm on a GPU: images, a mean far from zero, refusals."""

import jax
import jax.numpy as jnp
import pytest

from jaxkern import explain, group_norm
from tests.gpu.norm.rows import DTYPES, draws
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape, groups",
    [
        ((8, 320, 32, 32), 32),
        ((5, 96, 71, 71), 32),
        ((8, 1280, 8, 8), 32),
        ((3, 15, 7), 5),
        ((2, 4), 2),
        ((2, 6, 1, 1), 6),
        ((160, 20, 64, 101), 1),
        ((1, 32, 256, 256), 32),
        ((2, 6, 601, 601), 2),
        ((1, 5, 1023, 1025), 1),
    ],
)
def test_group_norm_of_images(shape, groups, dtype):
    draw = draws(dtype)
    x, weight, bias = draw(*shape), draw(shape[1]), draw(shape[1])
    whole = x.size == shape[0] * groups  # groups of one element: all cancels
    least = 1e-5**-0.5 if whole else 1e-2

    def without_weight(x, b):
        return group_norm(x, None, b, groups=groups)

    def with_weight(*operands):
        return group_norm(*operands, groups=groups)

    check_against_float64(with_weight, x, weight, bias, slack=2, least=least)
    check_against_float64(without_weight, x, bias, slack=2, least=least)


@pytest.mark.parametrize("shape", [(8, 64, 50, 50), (1, 64, 300, 300)])
def test_images_far_from_zero_keep_their_variance(shape):
    x = 1000 + draws("float32")(*shape)
    check_against_float64(lambda x: group_norm(x, groups=32), x, slack=20)


def test_what_xla_does_faster_is_refused_in_words():
    x = jnp.zeros((1, 32, 256, 256))
    text = str(explain(jax.grad(lambda x: group_norm(x, groups=32).sum()), x))
    assert "group_norm_fwd on cuda runs triton" in text
    assert "32 groups of 65536 elements do not fill" in text
