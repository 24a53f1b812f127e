"""swiglu, its gradients on a GPU: every dtype, odd rows, one array or two, bounds."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, explain, swiglu
from jaxkern.testing import checks
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu
GPT_OSS = dict(alpha=1.702, limit=1.5, up_offset=1.0)


def drawn(*shapes, dtype):
    draw = np.random.default_rng(0).standard_normal
    return [jnp.asarray(2 * draw(shape), dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("f", [1, 13, 512, 1536, 5632])
def test_odd_and_even_rows(f, dtype):
    for options in ({}, GPT_OSS):
        f_of = functools.partial(swiglu, **options)
        check = functools.partial(check_against_float64, strict=False, slack=2)
        with backend("triton"):
            check(f_of, *drawn((3, 37, f), (3, 37, f), dtype=dtype))
            check(f_of, *drawn((3, 37, 2 * f), dtype=dtype))


def test_a_long_one_is_one_launch():
    operands = drawn((4096, 11264), dtype="bfloat16")
    slopes = checks.gradients(swiglu, operands)
    assert "triton: triton.activation.swiglu.packed_swiglu_bwd" in str(
        explain(slopes, *operands)
    )
    check_against_float64(swiglu, *operands, strict=False, slack=2)
