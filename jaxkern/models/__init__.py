"""Whole models: `load` a file or folder, then `llama` and `generate` run it."""

from jaxkern.models.loader import load

__all__ = ["load"]
