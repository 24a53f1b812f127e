"""Fixtures shared with the tests that need no GPU."""

from tests.lowering.test_mosaic_gpu import mosaic_rows

__all__ = ["mosaic_rows"]
