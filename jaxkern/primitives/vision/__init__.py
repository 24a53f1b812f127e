"""Convolutions, pooling and patches."""

from jaxkern.primitives.vision.avg_pool import avg_pool
from jaxkern.primitives.vision.conv2d import conv2d
from jaxkern.primitives.vision.conv_transpose2d import conv_transpose2d
from jaxkern.primitives.vision.gaussian_splat import gaussian_splat
from jaxkern.primitives.vision.int8_conv2d import int8_conv2d
from jaxkern.primitives.vision.max_pool import max_pool
from jaxkern.primitives.vision.patches import (
    block_merge,
    block_unmerge,
    patchify,
    unpatchify,
)
from jaxkern.primitives.vision.resize_nearest import resize_nearest

__all__ = [
    "avg_pool",
    "block_merge",
    "block_unmerge",
    "conv2d",
    "conv_transpose2d",
    "gaussian_splat",
    "int8_conv2d",
    "max_pool",
    "patchify",
    "resize_nearest",
    "unpatchify",
]
