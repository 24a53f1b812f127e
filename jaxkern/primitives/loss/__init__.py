"""Losses."""

from jaxkern.primitives.loss.cross_entropy import cross_entropy
from jaxkern.primitives.loss.linear_cross_entropy import linear_cross_entropy
from jaxkern.primitives.loss.linear_distillation import linear_distillation
from jaxkern.primitives.loss.linear_dpo import linear_dpo, linear_log_probs

__all__ = [
    "cross_entropy",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_dpo",
    "linear_log_probs",
]
