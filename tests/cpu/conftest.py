"""What the tests of the C++ kernels share."""

import shutil

import pytest

from jaxkern import backend
from jaxkern.cpu.cpu_call import missing


@pytest.fixture
def kernels():
    """The test runs kernels, or fails where a compiler could have built them."""
    if why := missing():
        if shutil.which("c++") or shutil.which("g++"):
            pytest.fail(f"there is a compiler, but {why}")
        pytest.skip(why)
    with backend("cpp", strict=True):
        yield
