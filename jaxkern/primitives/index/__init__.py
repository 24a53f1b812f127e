"""Look-ups, sorting and the largest elements."""

from jaxkern.primitives.index.argmax import argmax
from jaxkern.primitives.index.argsort import argsort
from jaxkern.primitives.index.check_indices import check_indices
from jaxkern.primitives.index.embedding import embedding
from jaxkern.primitives.index.gather import gather
from jaxkern.primitives.index.scatter_add import scatter_add
from jaxkern.primitives.index.take_along_axis import take_along_axis
from jaxkern.primitives.index.top_k import top_k

__all__ = [
    "argmax",
    "argsort",
    "check_indices",
    "embedding",
    "gather",
    "scatter_add",
    "take_along_axis",
    "top_k",
]
