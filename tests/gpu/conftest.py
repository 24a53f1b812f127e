"""Fixtures shared with the tests that need no GPU, and numbers that do not depend on
which tests ran before."""

import sys

import numpy as np
import pytest

from tests.lowering.test_mosaic_gpu import mosaic_rows

__all__ = ["mosaic_rows"]


@pytest.fixture(autouse=True)
def numbers_of_this_test_alone():
    """Generators of modules begin anew: workers share out the tests by chance."""
    for name, module in list(sys.modules.items()):
        if name.startswith("tests.gpu.") and hasattr(module, "RNG"):
            module.RNG = np.random.default_rng(0)
