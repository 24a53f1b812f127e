"""Transforms of signals."""

from jaxkern.primitives.signal.fft import fft

__all__ = [
    "fft",
]
