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
from jaxkern.lowering.lower import backend, explain
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
from jaxkern.primitives.moe.balance_losses import load_balance_loss, router_z_loss
from jaxkern.primitives.moe.expert_order import expert_order
from jaxkern.primitives.moe.grouped_matmul import grouped_matmul
from jaxkern.primitives.moe.moe_ffn import moe_ffn
from jaxkern.primitives.moe.moe_weighted_reduce import moe_weighted_reduce
from jaxkern.primitives.moe.permute_tokens import permute_tokens
from jaxkern.primitives.moe.route import route
from jaxkern.primitives.moe.unpermute_tokens import unpermute_tokens
from jaxkern.primitives.norm.add_rms_norm import add_rms_norm
from jaxkern.primitives.norm.batch_norm import batch_norm
from jaxkern.primitives.norm.batch_norm_training import batch_norm_training
from jaxkern.primitives.norm.gated_rms_norm import gated_rms_norm
from jaxkern.primitives.norm.group_norm import group_norm
from jaxkern.primitives.norm.l2_norm import l2_norm
from jaxkern.primitives.norm.layer_norm import layer_norm
from jaxkern.primitives.norm.layer_norm_2d import layer_norm_2d
from jaxkern.primitives.norm.rms_norm import rms_norm
from jaxkern.primitives.norm.rms_norm_add import rms_norm_add
from jaxkern.primitives.quant.affine_matmul import dequantize_affine
from jaxkern.primitives.quant.affine_tensor import AffineTensor
from jaxkern.primitives.quant.dequantize import dequantize
from jaxkern.primitives.quant.fake_quant import fake_quant
from jaxkern.primitives.quant.fp4 import pack_fp4, unpack_fp4
from jaxkern.primitives.quant.fp8 import quantize_fp8
from jaxkern.primitives.quant.fp8_tensor import FP8Tensor
from jaxkern.primitives.quant.gguf_tensor import GGUFTensor
from jaxkern.primitives.quant.import_int4 import (
    int4_from_awq,
    int4_from_gptq,
    int4_from_linear,
    int4_to_linear,
)
from jaxkern.primitives.quant.int8_matmul import int8_matmul
from jaxkern.primitives.quant.int_tensor import IntTensor, quantize_int
from jaxkern.primitives.quant.microscaled import quantize_microscaled
from jaxkern.primitives.quant.microscaled_tensor import MicroscaledTensor
from jaxkern.primitives.quant.quantize_affine import quantize_affine
from jaxkern.primitives.quant.quantize_gguf import quantize_gguf
from jaxkern.primitives.quant.quantized_embedding import quantized_embedding
from jaxkern.primitives.quant.quantized_matmul import quantized_matmul
from jaxkern.primitives.quant.quantized_matmul_id import quantized_matmul_id
from jaxkern.primitives.quant.requantize import requantize
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
    "AffineTensor",
    "DynamicScaling",
    "FP8Tensor",
    "GGUFTensor",
    "IntTensor",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MicroscaledTensor",
    "YarnScaling",
    "add_rms_norm",
    "apply_repetition_penalty",
    "apply_rope",
    "argmax",
    "attention",
    "backend",
    "batch_norm",
    "batch_norm_training",
    "dequantize",
    "dequantize_affine",
    "embedding",
    "expert_order",
    "explain",
    "fake_quant",
    "gated_rms_norm",
    "geglu",
    "group_norm",
    "grouped_matmul",
    "int4_from_awq",
    "int4_from_gptq",
    "int4_from_linear",
    "int4_to_linear",
    "int8_matmul",
    "l2_norm",
    "layer_norm",
    "layer_norm_2d",
    "linear",
    "load_balance_loss",
    "moe_ffn",
    "moe_weighted_reduce",
    "pack_fp4",
    "permute_tokens",
    "quantize_affine",
    "quantize_fp8",
    "quantize_gguf",
    "quantize_int",
    "quantize_microscaled",
    "quantized_embedding",
    "quantized_matmul",
    "quantized_matmul_id",
    "requantize",
    "ring_positions",
    "rms_norm",
    "rms_norm_add",
    "rope",
    "rope_cos_sin",
    "rope_frequencies",
    "route",
    "router_z_loss",
    "sample",
    "softcap",
    "softmax",
    "swiglu",
    "top_k",
    "unpack_fp4",
    "unpermute_tokens",
    "update_kv_cache",
]

del _cpu, _cuda  # imported for their rows
