"""What runs on the CPU: one line per kernel. Other ops run their reference.

XLA:CPU is good at plain elementwise work and at float32 products; a line stands here
where a C++ kernel is several times faster, see docs/design/cpu_kernels.md. An op's
kernels are asked from top to bottom: of products, those that round x to 8 bits first.
"""

from jaxkern.lowering.kernel_table import Kernel, add_table

# fmt: off
KERNELS = (
    #      op                          backend  module                                     passes            function, its refusal
    Kernel("attention",                "cpp", "cpu.attention.attention",                   "primal fwd"),
    Kernel("quantized_cache_attention", "cpp", "cpu.attention.quantized_cache_attention",  "primal"),
    Kernel("quantized_matmul",         "cpp", "cpu.quant.quantized_matmul",                "primal",         "int8_activations",    "unsupported_int8"),
    Kernel("quantized_matmul",         "cpp", "cpu.quant.quantized_matmul",                "primal",         "f32_activations",     "unsupported_f32"),
    Kernel("quantized_matmul_id",      "cpp", "cpu.quant.quantized_matmul_id",             "primal",         "int8_activations",    "unsupported_int8"),
    Kernel("quantized_matmul_id",      "cpp", "cpu.quant.quantized_matmul_id",             "primal",         "f32_activations",     "unsupported_f32"),
    Kernel("quantized_embedding",      "cpp", "cpu.quant.quantized_embedding",             "primal"),
    Kernel("interleaved_matmul",       "cpp", "cpu.quant.interleaved_matmul",              "primal",         "int8_activations",    "unsupported_int8"),
    Kernel("interleaved_matmul",       "cpp", "cpu.quant.interleaved_matmul",              "primal",         "f32_activations",     "unsupported_f32"),
    Kernel("interleaved_matmul_id",    "cpp", "cpu.quant.interleaved_matmul",              "primal",         "int8_activations_id", "unsupported_int8_id"),
    Kernel("interleaved_matmul_id",    "cpp", "cpu.quant.interleaved_matmul",              "primal",         "f32_activations_id",  "unsupported_f32_id"),
    Kernel("interleaved_embedding",    "cpp", "cpu.quant.interleaved_matmul",              "primal",         "interleaved_embedding", "unsupported_rows"),
    Kernel("interleaved_rms_norm_matmul", "cpp", "cpu.quant.fused_products",               "primal",         "norm_int8",           "unsupported_norm_int8"),
    Kernel("interleaved_rms_norm_matmul", "cpp", "cpu.quant.fused_products",               "primal",         "norm_f32",            "unsupported_norm_f32"),
    Kernel("interleaved_swiglu",       "cpp", "cpu.quant.fused_products",                  "primal",         "swiglu_int8",         "unsupported_gate_int8"),
    Kernel("interleaved_swiglu",       "cpp", "cpu.quant.fused_products",                  "primal",         "swiglu_f32",          "unsupported_gate_f32"),
    Kernel("interleaved_matmul_add",   "cpp", "cpu.quant.fused_products",                  "primal",         "add_int8",            "unsupported_int8"),
    Kernel("interleaved_matmul_add",   "cpp", "cpu.quant.fused_products",                  "primal",         "add_f32",             "unsupported_f32"),
    Kernel("affine_matmul",            "cpp", "cpu.quant.affine_matmul",                   "primal"),
    Kernel("affine_matmul_id",         "cpp", "cpu.quant.affine_matmul",                   "primal",         "affine_matmul_id",    "unsupported_id"),
    Kernel("linear",                   "cpp", "cpu.linear.linear",                         "primal"),
    Kernel("matmul_transpose_b",       "cpp", "cpu.linear.matmul_transpose_b",             "primal"),
    Kernel("grouped_matmul",           "cpp", "cpu.moe.grouped_matmul",                    "primal"),
    Kernel("moe_ffn_few",              "cpp", "cpu.moe.moe_ffn_few",                       "primal"),
    Kernel("gated_delta_rule",         "cpp", "cpu.delta_rule.gated_delta_rule",           "primal"),
    Kernel("gated_delta_step",         "cpp", "cpu.delta_rule.gated_delta_step",           "primal"),
    Kernel("kimi_delta_attention",     "cpp", "cpu.delta_rule.kimi_delta_attention",       "primal"),
    Kernel("kimi_delta_attention_step", "cpp", "cpu.delta_rule.kimi_delta_attention_step", "primal"),
    Kernel("state_space_dual",         "cpp", "cpu.delta_rule.state_space_dual",           "primal"),
    Kernel("causal_conv1d",            "cpp", "cpu.delta_rule.causal_conv1d",              "primal bwd"),
    Kernel("argmax",                   "cpp", "cpu.index.argmax",                          "primal"),
    Kernel("top_k",                    "cpp", "cpu.index.top_k",                           "primal"),
    Kernel("sample",                   "cpp", "cpu.sampling.sample",                       "primal"),
    Kernel("rms_norm",                 "cpp", "cpu.norm.rms_norm",                         "primal fwd bwd"),
    Kernel("add_rms_norm",             "cpp", "cpu.norm.add_rms_norm",                     "primal fwd bwd"),
    Kernel("layer_norm",               "cpp", "cpu.norm.layer_norm",                       "primal fwd bwd"),
    Kernel("linear_cross_entropy",     "cpp", "cpu.loss.linear_cross_entropy",             "primal bwd"),
    Kernel("softmax",                  "cpp", "cpu.activation.softmax",                    "primal bwd"),
    Kernel("apply_rope",               "cpp", "cpu.rope.rope",                             "primal bwd"),
)
# fmt: on

add_table("cpu", KERNELS)
