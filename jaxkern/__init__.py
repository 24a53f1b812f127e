"""jaxkern: the operators of today's models as JAX primitives with every rule.

Each op differentiates in both modes to any order, batches, checkpoints and
shards, and lowers on every platform. Where to look:

    primitives/   what each op means, one file an op: formula, docs, reference, gradient
    cpu/          C++ kernels for CPUs; triton/ and pallas/: kernels for NVIDIA GPUs
    lowering/     what runs where: one row per kernel in cpu.py, cuda.py, apple/
    formats/      files to pytrees of arrays and quantised containers
    runtime/      compiled functions in view and in bounds: plans, limits, uploads
    models/       whole models as pure functions, `generate`, the command line
"""

import inspect as _inspect

from jaxkern.lowering import cpu as _cpu
from jaxkern.lowering import cuda_later as _cuda
from jaxkern.lowering.apple import rows as _apple
from jaxkern.lowering.explain import explain
from jaxkern.lowering.lower import backend
from jaxkern.primitives.activation.bias_activation import bias_activation
from jaxkern.primitives.activation.clipped_relu import clipped_relu
from jaxkern.primitives.activation.geglu import geglu
from jaxkern.primitives.activation.gelu import gelu
from jaxkern.primitives.activation.glu import glu
from jaxkern.primitives.activation.sigmoid_gate import sigmoid_gate
from jaxkern.primitives.activation.softcap import softcap
from jaxkern.primitives.activation.softmax import softmax
from jaxkern.primitives.activation.swiglu import swiglu
from jaxkern.primitives.attention.attention import attention
from jaxkern.primitives.attention.latent_attention import latent_attention
from jaxkern.primitives.attention.mask import (
    block_mask,
    make_block_mask,
    make_mask,
    padding_mask,
    segment_mask,
)
from jaxkern.primitives.attention.merge_partials import merge_partials
from jaxkern.primitives.attention.paged_attention import paged_attention
from jaxkern.primitives.attention.quantized_cache_attention import (
    quantized_cache_attention,
)
from jaxkern.primitives.check_arguments import check_arguments as _check_arguments
from jaxkern.primitives.delta_rule.causal_conv1d import (
    causal_conv1d,
    causal_conv1d_step,
)
from jaxkern.primitives.delta_rule.compute_g_beta import (
    compute_g_beta,
    log_decay_from_positive,
)
from jaxkern.primitives.delta_rule.cumsum import cumsum
from jaxkern.primitives.delta_rule.gated_delta_rule import gated_delta_rule
from jaxkern.primitives.delta_rule.gated_delta_step import gated_delta_step
from jaxkern.primitives.delta_rule.packed_sequences import segment_ids_from_cu_seqlens
from jaxkern.primitives.delta_rule.selective_scan import selective_scan
from jaxkern.primitives.delta_rule.solve_unit_lower import solve_unit_lower
from jaxkern.primitives.delta_rule.unit_lower_inverse import unit_lower_inverse
from jaxkern.primitives.index.argmax import argmax
from jaxkern.primitives.index.argsort import argsort
from jaxkern.primitives.index.check_indices import check_indices
from jaxkern.primitives.index.embedding import embedding
from jaxkern.primitives.index.gather import gather
from jaxkern.primitives.index.scatter_add import scatter_add
from jaxkern.primitives.index.take_along_axis import take_along_axis
from jaxkern.primitives.index.top_k import top_k
from jaxkern.primitives.kv_cache.cached_attention import cached_attention
from jaxkern.primitives.kv_cache.kv_cache import (
    KVCache,
    append_kv_cache,
    empty_kv_cache,
)
from jaxkern.primitives.kv_cache.paged_kv_cache import (
    PagedKVCache,
    allocate_pages,
    append_paged_kv_cache,
    empty_paged_kv_cache,
    release_pages,
)
from jaxkern.primitives.kv_cache.qk_norm_rope_cache import (
    qk_norm_rope_cache,
    qk_norm_rope_quantized_cache,
)
from jaxkern.primitives.kv_cache.qk_norm_rope_paged_cache import (
    qk_norm_rope_paged_cache,
)
from jaxkern.primitives.kv_cache.update_kv_cache import ring_positions, update_kv_cache
from jaxkern.primitives.kv_cache.update_paged_kv_cache import (
    gather_pages,
    page_slots,
    update_paged_kv_cache,
)
from jaxkern.primitives.kv_cache.update_quantized_kv_cache import (
    update_quantized_kv_cache,
)
from jaxkern.primitives.linear.linear import linear
from jaxkern.primitives.linear.matmul_transpose_b import matmul_transpose_b
from jaxkern.primitives.linear.qkv_split import qkv_split
from jaxkern.primitives.loss.cross_entropy import cross_entropy
from jaxkern.primitives.loss.linear_cross_entropy import linear_cross_entropy
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
from jaxkern.primitives.optim.adamw import adam_update, adamw_update
from jaxkern.primitives.quant.affine_matmul import dequantize_affine
from jaxkern.primitives.quant.affine_tensor import AffineTensor
from jaxkern.primitives.quant.dequantize import dequantize
from jaxkern.primitives.quant.fake_quant import fake_quant
from jaxkern.primitives.quant.fp4 import pack_fp4, unpack_fp4
from jaxkern.primitives.quant.fp8 import quantize_fp8
from jaxkern.primitives.quant.fp8_tensor import FP8Tensor
from jaxkern.primitives.quant.fused_products import (
    quantized_matmul_add,
    quantized_rms_norm_matmul,
    quantized_swiglu,
)
from jaxkern.primitives.quant.gguf_tensor import GGUFTensor
from jaxkern.primitives.quant.import_int4 import (
    int4_from_awq,
    int4_from_gptq,
    int4_from_linear,
    int4_to_linear,
)
from jaxkern.primitives.quant.int8_matmul import int8_matmul
from jaxkern.primitives.quant.int_tensor import IntTensor, quantize_int
from jaxkern.primitives.quant.interleaved_tensor import InterleavedTensor, interleave
from jaxkern.primitives.quant.microscaled import quantize_microscaled
from jaxkern.primitives.quant.microscaled_tensor import MicroscaledTensor
from jaxkern.primitives.quant.quantize_affine import quantize_affine
from jaxkern.primitives.quant.quantize_gguf import quantize_gguf
from jaxkern.primitives.quant.quantized_embedding import quantized_embedding
from jaxkern.primitives.quant.quantized_matmul import quantized_matmul
from jaxkern.primitives.quant.quantized_matmul_id import quantized_matmul_id
from jaxkern.primitives.quant.requantize import requantize
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
from jaxkern.primitives.rope.rope_from import rope_from
from jaxkern.primitives.sampling.cut_logits import cut_logits
from jaxkern.primitives.sampling.frequency_penalty import apply_frequency_penalty
from jaxkern.primitives.sampling.repetition_penalty import apply_repetition_penalty
from jaxkern.primitives.sampling.sample import sample
from jaxkern.primitives.sampling.softmax_sample import softmax_sample
from jaxkern.primitives.signal.fft import fft
from jaxkern.primitives.turboquant.fwht import fwht
from jaxkern.primitives.turboquant.lloyd_max import lloyd_max_codebook, lloyd_max_error
from jaxkern.primitives.turboquant.quantize_vectors import (
    dequantize_vectors,
    quantize_straight_through,
    quantize_vectors,
    turboquant_decode,
    turboquant_encode,
)
from jaxkern.primitives.turboquant.quantized_vectors import QuantizedVectors
from jaxkern.primitives.turboquant.rotate import rotate, rotation_signs, unrotate
from jaxkern.primitives.turboquant.vector_codec import (
    Float8Codec,
    IntCodec,
    TurboQuantCodec,
)
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
    "AffineTensor",
    "DynamicScaling",
    "FP8Tensor",
    "Float8Codec",
    "GGUFTensor",
    "IntCodec",
    "IntTensor",
    "InterleavedTensor",
    "KVCache",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MicroscaledTensor",
    "PagedKVCache",
    "QuantizedVectors",
    "TurboQuantCodec",
    "YarnScaling",
    "adam_update",
    "adamw_update",
    "add_rms_norm",
    "add_rms_norm_quantized",
    "allocate_pages",
    "append_kv_cache",
    "append_paged_kv_cache",
    "apply_frequency_penalty",
    "apply_repetition_penalty",
    "apply_rope",
    "argmax",
    "argsort",
    "attention",
    "avg_pool",
    "axial_rope",
    "axial_rope_2d",
    "axial_rope_cos_sin",
    "backend",
    "batch_norm",
    "batch_norm_training",
    "bias_activation",
    "block_mask",
    "block_merge",
    "block_unmerge",
    "cached_attention",
    "causal_conv1d",
    "causal_conv1d_step",
    "check_indices",
    "clipped_relu",
    "compute_g_beta",
    "conv2d",
    "conv_transpose2d",
    "cross_entropy",
    "cumsum",
    "cut_logits",
    "dequantize",
    "dequantize_affine",
    "dequantize_vectors",
    "dynamic_tanh",
    "embedding",
    "empty_kv_cache",
    "empty_paged_kv_cache",
    "expert_order",
    "explain",
    "fake_quant",
    "fft",
    "fwht",
    "gated_delta_rule",
    "gated_delta_step",
    "gated_rms_norm",
    "gather",
    "gather_pages",
    "gaussian_splat",
    "geglu",
    "gelu",
    "glu",
    "group_norm",
    "grouped_matmul",
    "head_norm_rope",
    "int4_from_awq",
    "int4_from_gptq",
    "int4_from_linear",
    "int4_to_linear",
    "int8_conv2d",
    "int8_matmul",
    "interleave",
    "l2_norm",
    "latent_attention",
    "layer_norm",
    "layer_norm_2d",
    "linear",
    "linear_cross_entropy",
    "lloyd_max_codebook",
    "lloyd_max_error",
    "load_balance_loss",
    "log_decay_from_positive",
    "make_block_mask",
    "make_mask",
    "matmul_transpose_b",
    "max_pool",
    "merge_partials",
    "moe_ffn",
    "moe_rms_norm_add",
    "moe_weighted_reduce",
    "mrope_cos_sin",
    "multi_rms_norm",
    "pack_fp4",
    "padding_mask",
    "page_slots",
    "paged_attention",
    "patchify",
    "permute_tokens",
    "qk_norm_rope",
    "qk_norm_rope_cache",
    "qk_norm_rope_paged_cache",
    "qk_norm_rope_quantized_cache",
    "qkv_split",
    "quantize_affine",
    "quantize_fp8",
    "quantize_gguf",
    "quantize_int",
    "quantize_microscaled",
    "quantize_straight_through",
    "quantize_vectors",
    "quantized_cache_attention",
    "quantized_embedding",
    "quantized_matmul",
    "quantized_matmul_add",
    "quantized_matmul_id",
    "quantized_rms_norm_matmul",
    "quantized_swiglu",
    "release_pages",
    "requantize",
    "resize_nearest",
    "ring_positions",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_mul",
    "rms_norm_quantized",
    "rope",
    "rope_cos_sin",
    "rope_frequencies",
    "rope_from",
    "rotate",
    "rotation_signs",
    "route",
    "router_z_loss",
    "sample",
    "sandwich_rms_norm",
    "scatter_add",
    "segment_ids_from_cu_seqlens",
    "segment_mask",
    "selective_scan",
    "sigmoid_gate",
    "softcap",
    "softmax",
    "softmax_sample",
    "solve_unit_lower",
    "swiglu",
    "take_along_axis",
    "top_k",
    "turboquant_decode",
    "turboquant_encode",
    "unit_lower_inverse",
    "unpack_fp4",
    "unpatchify",
    "unpermute_tokens",
    "unrotate",
    "update_kv_cache",
    "update_paged_kv_cache",
    "update_quantized_kv_cache",
]

for _name in __all__:
    if _inspect.isfunction(globals()[_name]):
        globals()[_name] = _check_arguments(globals()[_name])

del _apple, _cpu, _cuda, _inspect, _name, _check_arguments
