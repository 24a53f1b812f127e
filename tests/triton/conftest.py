"""Every kernel of this folder, also those that run only where they are asked for."""

import pytest

from jaxkern import backend


@pytest.fixture(autouse=True)
def triton_is_asked_for():
    with backend("triton"):
        yield
