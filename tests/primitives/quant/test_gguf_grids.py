"""The codebooks, point by point: random bytes rarely name every one of 2048."""

import gguf
import numpy as np
import pytest

from jaxkern.primitives.quant.gguf_grids import CODEBOOKS, grid


@pytest.mark.parametrize("name", CODEBOOKS)
def test_points_are_those_of_ggml(name):
    theirs = gguf.quants.__dict__[name]
    theirs.init_grid()
    ours = grid(name)
    assert ours.dtype == np.int8 and ours.shape == theirs.grid_shape
    np.testing.assert_array_equal(ours, theirs.grid.reshape(ours.shape))
