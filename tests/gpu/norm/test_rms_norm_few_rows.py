"""Few rows of the norms, split over clusters of programs, on a GPU."""

import pytest

import jaxkern
from tests.gpu.norm.rows import draws
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu
OPS = {  # tensors, vectors
    "rms_norm": (1, 1),
    "layer_norm": (1, 2),
    "l2_norm": (1, 0),
    "add_rms_norm": (2, 1),
    "gated_rms_norm": (2, 1),
    "rms_norm_mul": (2, 1),
    "rms_norm_add": (2, 1),
    "multi_rms_norm": (1, 2),
    "sandwich_rms_norm": (2, 2),
}
SIZES = [  # the last program of a row of 8190 holds nothing of some
    (1, 62592, "bfloat16"),
    (2, 17398, "float32"),
    (3, 2227, "bfloat16"),
    (5, 50257, "float16"),
    (40, 1025, "float32"),
    (40, 8190, "bfloat16"),
    (65, 16384, "bfloat16"),
    (300, 5001, "bfloat16"),
]


@pytest.mark.parametrize(("n", "d", "dtype"), SIZES)
@pytest.mark.parametrize("op", OPS)
def test_few_rows(op, n, d, dtype):
    draw, (tensors, vectors) = draws(dtype, d), OPS[op]
    operands = [draw(n, d) for _ in range(tensors)] + [draw(d) for _ in range(vectors)]
    check_against_float64(getattr(jaxkern, op), *operands, slack=2)


def test_few_rows_far_from_zero_keep_their_variance():
    x = 1000 + draws("float32")(4, 50257)
    check_against_float64(jaxkern.layer_norm, x, slack=50)  # x is known to 6e-5
