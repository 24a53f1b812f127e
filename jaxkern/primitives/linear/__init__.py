"""Products with dense weights."""

from jaxkern.primitives.linear.linear import linear
from jaxkern.primitives.linear.matmul_transpose_b import matmul_transpose_b
from jaxkern.primitives.linear.qkv_split import qkv_split

__all__ = [
    "linear",
    "matmul_transpose_b",
    "qkv_split",
]
