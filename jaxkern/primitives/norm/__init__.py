"""Normalisations."""

from jaxkern.primitives.norm.add_rms_norm import add_rms_norm
from jaxkern.primitives.norm.batch_norm import batch_norm
from jaxkern.primitives.norm.batch_norm_training import batch_norm_training
from jaxkern.primitives.norm.branched_rms_norm import branched_rms_norm
from jaxkern.primitives.norm.dynamic_tanh import dynamic_tanh
from jaxkern.primitives.norm.gated_rms_norm import gated_rms_norm
from jaxkern.primitives.norm.group_norm import group_norm
from jaxkern.primitives.norm.l2_norm import l2_norm
from jaxkern.primitives.norm.layer_norm import layer_norm
from jaxkern.primitives.norm.layer_norm_2d import layer_norm_2d
from jaxkern.primitives.norm.moe_rms_norm_add import moe_rms_norm_add
from jaxkern.primitives.norm.multi_rms_norm import multi_rms_norm
from jaxkern.primitives.norm.rms_norm import rms_norm
from jaxkern.primitives.norm.rms_norm_add import rms_norm_add
from jaxkern.primitives.norm.rms_norm_mul import rms_norm_mul
from jaxkern.primitives.norm.rms_norm_quantized import (
    add_rms_norm_quantized,
    rms_norm_quantized,
)
from jaxkern.primitives.norm.sandwich_rms_norm import sandwich_rms_norm

__all__ = [
    "add_rms_norm",
    "add_rms_norm_quantized",
    "batch_norm",
    "batch_norm_training",
    "branched_rms_norm",
    "dynamic_tanh",
    "gated_rms_norm",
    "group_norm",
    "l2_norm",
    "layer_norm",
    "layer_norm_2d",
    "moe_rms_norm_add",
    "multi_rms_norm",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_mul",
    "rms_norm_quantized",
    "sandwich_rms_norm",
]
