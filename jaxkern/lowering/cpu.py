"""What runs on the CPU: one row per kernel. Other ops run their reference.

XLA:CPU is good at plain elementwise work and at float32 products; a row stands here
where a C++ kernel is several times faster, see docs/design/cpu_kernels.md.
"""

import functools

from jaxkern.cpu.activation import softmax
from jaxkern.cpu.attention import attention
from jaxkern.cpu.delta_rule import causal_conv1d, gated_delta_rule
from jaxkern.cpu.index import argmax, top_k
from jaxkern.cpu.linear import matmul_transpose_b
from jaxkern.cpu.loss import linear_cross_entropy
from jaxkern.cpu.norm import norm
from jaxkern.cpu.quant import (
    affine_matmul,
    fused_products,
    interleaved_matmul,
    quantized_embedding,
    quantized_matmul,
    quantized_matmul_id,
)
from jaxkern.cpu.rope import rope
from jaxkern.cpu.sampling import sample
from jaxkern.lowering.lower import lower, never_refuses
from jaxkern.primitives.activation.softmax import softmax_p
from jaxkern.primitives.attention.attend import saves_no_tail
from jaxkern.primitives.attention.attention import attention_p
from jaxkern.primitives.attention.quantized_cache_attention import (
    quantized_cache_attention_p,
)
from jaxkern.primitives.delta_rule.causal_conv1d import causal_conv1d_p
from jaxkern.primitives.delta_rule.gated_delta_rule import gated_delta_rule_p
from jaxkern.primitives.delta_rule.gated_delta_step import gated_delta_step_p
from jaxkern.primitives.index.argmax import argmax_p
from jaxkern.primitives.index.top_k import top_k_p
from jaxkern.primitives.linear.linear import linear_p
from jaxkern.primitives.linear.matmul_transpose_b import matmul_transpose_b_p
from jaxkern.primitives.loss.linear_cross_entropy import linear_cross_entropy_p
from jaxkern.primitives.norm.add_rms_norm import add_rms_norm_p
from jaxkern.primitives.norm.layer_norm import layer_norm_p
from jaxkern.primitives.norm.rms_norm import rms_norm_p
from jaxkern.primitives.quant.affine_matmul import affine_matmul_id_p, affine_matmul_p
from jaxkern.primitives.quant.fused_products import (
    interleaved_matmul_add_p,
    interleaved_rms_norm_matmul_p,
    interleaved_swiglu_p,
)
from jaxkern.primitives.quant.interleaved_matmul import (
    interleaved_embedding_p,
    interleaved_matmul_id_p,
    interleaved_matmul_p,
)
from jaxkern.primitives.quant.quantized_embedding import quantized_embedding_p
from jaxkern.primitives.quant.quantized_matmul import quantized_matmul_p
from jaxkern.primitives.quant.quantized_matmul_id import quantized_matmul_id_p
from jaxkern.primitives.rope.rope import apply_rope_p
from jaxkern.primitives.sampling.sample import sample_p

# fmt: off
ROWS = (
    # op                      forward                                  refuses, and where XLA is as fast
    (attention_p,             saves_no_tail(attention.attention_fwd),  attention.unsupported),
    (quantized_matmul_p,      quantized_matmul.int8_activations,       quantized_matmul.refuses_int8),
    (quantized_matmul_p,      quantized_matmul.f32_activations,        quantized_matmul.refuses_f32),
    (quantized_matmul_id_p,   quantized_matmul_id.int8_activations,    quantized_matmul_id.refuses_int8),
    (quantized_matmul_id_p,   quantized_matmul_id.f32_activations,     quantized_matmul_id.refuses_f32),
    (quantized_embedding_p,   quantized_embedding.quantized_embedding, quantized_embedding.unsupported),
    (interleaved_matmul_p,    interleaved_matmul.int8_activations,     interleaved_matmul.refuses_int8),
    (interleaved_matmul_p,    interleaved_matmul.f32_activations,      interleaved_matmul.refuses_f32),
    (interleaved_matmul_id_p, interleaved_matmul.int8_activations_id,  interleaved_matmul.refuses_int8_id),
    (interleaved_matmul_id_p, interleaved_matmul.f32_activations_id,   interleaved_matmul.refuses_f32_id),
    (interleaved_embedding_p, interleaved_matmul.interleaved_embedding, interleaved_matmul.refuses_rows),
    (quantized_cache_attention_p, attention.quantized_cache_attention,  attention.unsupported_quantized),
    (gated_delta_rule_p,      gated_delta_rule.gated_delta_rule,       gated_delta_rule.unsupported),
    (gated_delta_step_p,      gated_delta_rule.gated_delta_step,       gated_delta_rule.unsupported),
    (argmax_p,                argmax.argmax,                           argmax.unsupported),
    (top_k_p,                 top_k.top_k,                             top_k.unsupported, top_k.slower),
    (sample_p,                sample.sample,                           sample.unsupported),
    (interleaved_rms_norm_matmul_p, fused_products.norm_int8,          fused_products.refuses_norm_int8),
    (interleaved_rms_norm_matmul_p, fused_products.norm_f32,           fused_products.refuses_norm_f32),
    (interleaved_swiglu_p,     fused_products.swiglu_int8,             fused_products.refuses_norm_int8),
    (interleaved_swiglu_p,     fused_products.swiglu_f32,              fused_products.refuses_norm_f32),
    (interleaved_matmul_add_p, fused_products.add_int8,                fused_products.refuses_int8),
    (interleaved_matmul_add_p, fused_products.add_f32,                 fused_products.refuses_f32),
    (affine_matmul_p,         affine_matmul.affine_matmul,             affine_matmul.unsupported, affine_matmul.slower),
    (affine_matmul_id_p,      affine_matmul.affine_matmul_id,          affine_matmul.unsupported_id),
    (linear_p,                matmul_transpose_b.linear,               matmul_transpose_b.unsupported, matmul_transpose_b.slower),
    (matmul_transpose_b_p,    matmul_transpose_b.matmul_transpose_b,   matmul_transpose_b.unsupported, matmul_transpose_b.slower),
)
# fmt: on

for op, forward, refuses, *slower in ROWS:
    than_xla = slower[0] if slower else never_refuses
    lower(op, "cpu", "cpp", fwd=forward, unless=refuses, slower=than_xla)

for op, forward, backward in (
    (rms_norm_p, norm.rms_norm_fwd, norm.rms_norm_bwd),
    (add_rms_norm_p, norm.add_rms_norm_fwd, norm.add_rms_norm_bwd),
    (layer_norm_p, norm.layer_norm_fwd, norm.layer_norm_bwd),
):
    row = functools.partial(lower, op, "cpu", "cpp", unless=norm.unsupported)
    row(fwd=forward, slower=norm.slower)
    row(fwd=None, bwd=backward, slower=norm.slower_gradient)

lower(
    linear_cross_entropy_p,
    "cpu",
    "cpp",
    fwd=linear_cross_entropy.linear_cross_entropy,
    bwd=linear_cross_entropy.linear_cross_entropy_bwd,
    unless=linear_cross_entropy.unsupported,
    slower=linear_cross_entropy.slower,
)
lower(
    causal_conv1d_p,
    "cpu",
    "cpp",
    fwd=causal_conv1d.causal_conv1d,
    bwd=causal_conv1d.causal_conv1d_bwd,
    unless=causal_conv1d.unsupported,
)
lower(
    softmax_p,
    "cpu",
    "cpp",
    fwd=softmax.softmax,
    bwd=softmax.softmax_bwd,
    unless=softmax.unsupported,
    slower=softmax.slower,
)
lower(
    apply_rope_p,
    "cpu",
    "cpp",
    fwd=rope.apply_rope,
    bwd=rope.apply_rope_bwd,
    unless=rope.unsupported,
    slower=rope.slower,
)
