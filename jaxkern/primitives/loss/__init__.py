"""Losses."""

from jaxkern.primitives.loss.cross_entropy import cross_entropy
from jaxkern.primitives.loss.linear_cross_entropy import linear_cross_entropy

__all__ = [
    "cross_entropy",
    "linear_cross_entropy",
]
