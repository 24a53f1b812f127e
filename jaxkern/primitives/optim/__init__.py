"""Optimisers."""

from jaxkern.primitives.optim.adamw import adam_update, adamw_update

__all__ = [
    "adam_update",
    "adamw_update",
]
