"""jaxkern: the operators of today's models as JAX primitives with every rule.

Each op differentiates in both modes to any order, batches, checkpoints and
shards, and lowers on every platform. Where to look:

    primitives/   what each op means, one file an op: formula, docs, reference, gradient
    lowering/     what runs where: one row per kernel in cpu.py and cuda.py
    formats/      files to pytrees of arrays and quantised containers
    models/       whole models as pure functions, `generate`, the command line
"""

from jaxkern.lowering import cpu as _cpu
from jaxkern.lowering import cuda as _cuda
from jaxkern.lowering.explain import explain
from jaxkern.lowering.lower import backend
from jaxkern.primitives.activation.geglu import geglu
from jaxkern.primitives.activation.softcap import softcap
from jaxkern.primitives.activation.softmax import softmax
from jaxkern.primitives.activation.swiglu import swiglu
from jaxkern.primitives.attention.attention import attention
from jaxkern.primitives.index.argmax import argmax
from jaxkern.primitives.index.embedding import embedding
from jaxkern.primitives.index.top_k import top_k
from jaxkern.primitives.kv_cache.update_kv_cache import ring_positions, update_kv_cache
from jaxkern.primitives.linear.linear import linear
from jaxkern.primitives.norm.add_rms_norm import add_rms_norm
from jaxkern.primitives.norm.batch_norm import batch_norm
from jaxkern.primitives.norm.batch_norm_training import batch_norm_training
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
from jaxkern.primitives.quant.dequantize import dequantize
from jaxkern.primitives.quant.gguf_tensor import GGUFTensor
from jaxkern.primitives.quant.quantized_embedding import quantized_embedding
from jaxkern.primitives.quant.quantized_matmul import quantized_matmul
from jaxkern.primitives.rope.axial_rope import (
    axial_rope,
    axial_rope_2d,
    axial_rope_cos_sin,
)
from jaxkern.primitives.rope.head_norm_rope import head_norm_rope
from jaxkern.primitives.rope.mrope import mrope_cos_sin
from jaxkern.primitives.rope.qk_norm_rope import qk_norm_rope
from jaxkern.primitives.rope.rope import apply_rope, rope
from jaxkern.primitives.rope.rope_frequencies import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    YarnScaling,
    rope_cos_sin,
    rope_frequencies,
)
from jaxkern.primitives.sampling.repetition_penalty import apply_repetition_penalty
from jaxkern.primitives.sampling.sample import sample

__all__ = [
    "DynamicScaling",
    "GGUFTensor",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "YarnScaling",
    "add_rms_norm",
    "add_rms_norm_quantized",
    "apply_repetition_penalty",
    "apply_rope",
    "argmax",
    "attention",
    "axial_rope",
    "axial_rope_2d",
    "axial_rope_cos_sin",
    "backend",
    "batch_norm",
    "batch_norm_training",
    "dequantize",
    "embedding",
    "explain",
    "gated_rms_norm",
    "geglu",
    "group_norm",
    "head_norm_rope",
    "l2_norm",
    "layer_norm",
    "layer_norm_2d",
    "linear",
    "moe_rms_norm_add",
    "mrope_cos_sin",
    "multi_rms_norm",
    "qk_norm_rope",
    "quantized_embedding",
    "quantized_matmul",
    "ring_positions",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_mul",
    "rms_norm_quantized",
    "rope",
    "rope_cos_sin",
    "rope_frequencies",
    "sample",
    "sandwich_rms_norm",
    "softcap",
    "softmax",
    "swiglu",
    "top_k",
    "update_kv_cache",
]

del _cpu, _cuda  # imported for their rows
