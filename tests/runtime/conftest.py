"""Fixtures of the runtime's tests."""

import gc

import pytest


@pytest.fixture
def quiet_memory():
    """No array of an earlier test is freed while bytes are compared."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
