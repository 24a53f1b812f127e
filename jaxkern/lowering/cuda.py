"""What runs on NVIDIA GPUs: one line per kernel. Other ops run their reference.

An op's kernels are asked from top to bottom; the first that does not refuse runs. So
Mosaic's, for Hopper and newer, stand before Triton's, those for a few queries before
those for many, and the kernel of five products before the one of two launches.

Plain elementwise ops (geglu, whole rotations) have no line: XLA's own fusion reaches 94
to 99 % of the memory bandwidth there, see docs/performance.md. Only `backend("triton")`
takes dynamic_tanh, the example of CONTRIBUTING.md. swiglu has its gradients, which XLA
makes in two passes within a training step, and a large one of gate and up in one array.
"""

from jaxkern.lowering.kernel_table import Kernel, add_table

# fmt: off
KERNELS = (
    #      op                            backend       module                                            passes
    Kernel("rms_norm",                   "mosaic_gpu", "pallas.norm.rms_norm",                           "bwd"),
    Kernel("rms_norm",                   "triton",     "triton.norm.rms_norm",                           "primal fwd bwd"),
    Kernel("add_rms_norm",               "triton",     "triton.norm.add_rms_norm",                       "primal fwd bwd"),
    Kernel("branched_rms_norm",          "triton",     "triton.norm.branched_rms_norm",                  "primal fwd bwd"),
    Kernel("layer_norm",                 "triton",     "triton.norm.layer_norm",                         "primal fwd bwd"),
    Kernel("l2_norm",                    "triton",     "triton.norm.l2_norm",                            "primal fwd bwd"),
    Kernel("group_norm",                 "triton",     "triton.norm.group_norm",                         "primal fwd bwd"),
    Kernel("dynamic_tanh",               "triton",     "triton.norm.dynamic_tanh",                       "primal bwd"),
    Kernel("gated_rms_norm",             "triton",     "triton.norm.gated_rms_norm",                     "primal fwd bwd"),
    Kernel("rms_norm_mul",               "triton",     "triton.norm.rms_norm_mul",                       "primal fwd bwd"),
    Kernel("rms_norm_add",               "triton",     "triton.norm.rms_norm_add",                       "primal fwd bwd"),
    Kernel("dual_rms_norm",              "triton",     "triton.norm.multi_rms_norm",                     "primal fwd bwd"),
    Kernel("triple_rms_norm",            "triton",     "triton.norm.multi_rms_norm",                     "primal fwd bwd"),
    Kernel("sandwich_rms_norm",          "triton",     "triton.norm.sandwich_rms_norm",                  "primal fwd bwd"),
    Kernel("sandwich_triple_rms_norm",   "triton",     "triton.norm.sandwich_rms_norm",                  "primal fwd bwd"),
    Kernel("moe_rms_norm_add",           "triton",     "triton.norm.moe_rms_norm_add.fwd",               "primal fwd"),
    Kernel("moe_rms_norm_add",           "triton",     "triton.norm.moe_rms_norm_add.bwd",               "bwd"),
    Kernel("rms_norm_quantized",         "triton",     "triton.norm.rms_norm_quantized",                 "primal"),
    Kernel("add_rms_norm_quantized",     "triton",     "triton.norm.rms_norm_quantized",                 "primal"),

    Kernel("softmax",                    "mosaic_gpu", "pallas.activation.softmax",                      "primal bwd"),
    Kernel("softmax",                    "triton",     "triton.activation.softmax",                      "primal bwd"),
    Kernel("softcap_softmax",            "triton",     "triton.activation.softmax",                      "primal bwd"),
    Kernel("swiglu",                     "triton",     "triton.activation.swiglu",                       "bwd"),
    Kernel("packed_swiglu",              "triton",     "triton.activation.swiglu",                       "primal bwd"),

    Kernel("apply_rope",                 "triton",     "triton.rope.rope",                               "primal bwd"),
    Kernel("qkv_rope",                   "triton",     "triton.rope.qkv_rope",                           "primal bwd"),
    Kernel("head_norm_rope",             "triton",     "triton.rope.head_norm_rope",                     "primal fwd bwd"),
    Kernel("qk_norm_rope",               "triton",     "triton.rope.qk_norm_rope.fwd",                   "primal fwd"),
    Kernel("qk_norm_rope",               "triton",     "triton.rope.qk_norm_rope.bwd",                   "bwd"),

    Kernel("cross_entropy",              "triton",     "triton.loss.cross_entropy",                      "primal bwd"),
    Kernel("weighted_cross_entropy",     "mosaic_gpu", "pallas.loss.cross_entropy",                      "fwd"),
    Kernel("weighted_cross_entropy",     "triton",     "triton.loss.cross_entropy",                      "primal fwd"),
    Kernel("linear_cross_entropy",       "triton",     "triton.loss.linear_cross_entropy",               "primal bwd"),
    Kernel("summed_linear_cross_entropy", "triton",    "triton.loss.summed_linear_cross_entropy",        "fwd"),

    Kernel("embedding",                  "triton",     "triton.index.embedding",                         "bwd"),
    Kernel("argmax",                     "triton",     "triton.index.argmax",                            "primal"),
    Kernel("top_k",                      "triton",     "triton.index.top_k",                             "primal"),
    Kernel("argsort",                    "triton",     "triton.index.argsort",                           "primal"),
    Kernel("sample",                     "mosaic_gpu", "pallas.sampling.sample.fwd",                     "primal"),
    Kernel("sample",                     "triton",     "triton.sampling.sample.fwd",                     "primal"),

    Kernel("grouped_matmul",             "mosaic_gpu", "pallas.moe.grouped_matmul",                      "primal bwd"),
    Kernel("grouped_matmul",             "triton",     "triton.moe.grouped_matmul",                      "primal bwd"),
    Kernel("scaled_grouped_matmul",      "mosaic_gpu", "pallas.moe.grouped_matmul_fp8",                  "primal"),
    Kernel("moe_ffn_few",                "triton",     "triton.moe.moe_ffn",                             "primal", chain=True),
    Kernel("route",                      "triton",     "triton.moe.route",                               "primal"),
    Kernel("norm_route",                 "triton",     "triton.moe.norm_route",                          "primal"),
    Kernel("dense_expert_hidden",        "triton",     "triton.moe.expert_slots.dense",                  "primal", unsupported="unsupported_hidden"),
    Kernel("dense_expert_sum",           "triton",     "triton.moe.expert_slots.dense",                  "primal", unsupported="unsupported_sum"),
    Kernel("fp8_expert_hidden",          "triton",     "triton.moe.expert_slots.fp8",                    "primal", unsupported="unsupported_hidden"),
    Kernel("fp8_expert_sum",             "triton",     "triton.moe.expert_slots.fp8",                    "primal", unsupported="unsupported_sum"),
    Kernel("microscaled_expert_hidden",  "triton",     "triton.moe.expert_slots.microscaled",            "primal", unsupported="unsupported_hidden"),
    Kernel("microscaled_expert_sum",     "triton",     "triton.moe.expert_slots.microscaled",            "primal", unsupported="unsupported_sum"),
    Kernel("interleaved_expert_hidden",  "triton",     "triton.moe.expert_slots.interleaved",            "primal", unsupported="unsupported_hidden"),
    Kernel("interleaved_expert_sum",     "triton",     "triton.moe.expert_slots.interleaved",            "primal", unsupported="unsupported_sum"),

    Kernel("linear",                     "triton",     "triton.linear.linear",                           "primal"),
    Kernel("encode_fp8",                 "triton",     "triton.linear.encode_fp8",                       "primal"),
    Kernel("encode_rows_fp8",            "triton",     "triton.linear.encode_rows_fp8",                  "primal"),
    Kernel("swiglu_rows_fp8",            "triton",     "triton.linear.encode_rows_fp8",                  "primal"),
    Kernel("dequantize_interleaved",     "triton",     "triton.quant.interleaved_matmul",                "primal", unsupported="unsupported_weights"),
    Kernel("dequantize_int",             "triton",     "triton.quant.int_matmul",                        "primal", unsupported="unsupported_weights"),
    Kernel("dequantize_microscaled",     "triton",     "triton.quant.microscaled",                       "primal", unsupported="unsupported_weights"),
    Kernel("interleaved_matmul",         "triton",     "triton.quant.interleaved_matmul",                "primal"),
    Kernel("interleaved_embedding",      "triton",     "triton.quant.interleaved_matmul",                "primal", unsupported="unsupported_embedding"),
    Kernel("interleaved_matmul_id",      "triton",     "triton.quant.interleaved_matmul",                "primal", unsupported="unsupported_id"),
    Kernel("affine_matmul",              "triton",     "triton.quant.affine_matmul",                     "primal"),
    Kernel("affine_embedding",           "triton",     "triton.quant.affine_matmul",                     "primal", unsupported="unsupported_embedding"),
    Kernel("affine_matmul_id",           "triton",     "triton.quant.affine_matmul",                     "primal", unsupported="unsupported_id"),
    Kernel("int_matmul",                 "triton",     "triton.quant.int_matmul",                        "primal"),
    Kernel("int_embedding",              "triton",     "triton.quant.int_matmul",                        "primal", unsupported="unsupported_embedding"),
    Kernel("int_matmul_id",              "triton",     "triton.quant.int_matmul",                        "primal", unsupported="unsupported_id"),
    Kernel("fp8_matmul",                 "triton",     "triton.quant.fp8",                               "primal"),
    Kernel("fp8_embedding",              "triton",     "triton.quant.fp8",                               "primal", unsupported="unsupported_embedding"),
    Kernel("microscaled_matmul",         "triton",     "triton.quant.microscaled",                       "primal"),
    Kernel("microscaled_matmul_id",      "triton",     "triton.quant.microscaled",                       "primal", unsupported="unsupported_id"),
    Kernel("microscaled_embedding",      "triton",     "triton.quant.microscaled",                       "primal", unsupported="unsupported_embedding"),
    Kernel("interleaved_rms_norm_matmul", "triton",    "triton.quant.fused_products",                    "primal", unsupported="unsupported_interleaved_norm"),
    Kernel("interleaved_swiglu",         "triton",     "triton.quant.fused_products",                    "primal", unsupported="unsupported_interleaved_gate"),
    Kernel("interleaved_matmul_add",     "triton",     "triton.quant.fused_products",                    "primal", unsupported="unsupported_interleaved_add"),
    Kernel("dense_rms_norm_matmul",      "triton",     "triton.quant.fused_products",                    "primal", unsupported="unsupported_dense_norm"),
    Kernel("dense_swiglu",               "triton",     "triton.quant.fused_products",                    "primal", unsupported="unsupported_dense_gate"),
    Kernel("dense_matmul_add",           "triton",     "triton.quant.fused_products",                    "primal", unsupported="unsupported_dense_add"),

    Kernel("adamw_tree",                 "triton",     "triton.optim.adamw",                             "primal"),
    Kernel("adamw_copied_tree",          "triton",     "triton.optim.adamw",                             "primal"),

    Kernel("fwht",                       "triton",     "triton.turboquant.fwht",                         "primal bwd"),
    Kernel("quantize_vectors",           "triton",     "triton.turboquant.quantize_vectors",             "primal"),
    Kernel("dequantize_vectors",         "triton",     "triton.turboquant.dequantize_vectors",           "primal"),

    Kernel("update_quantized_kv_cache",  "triton",     "triton.kv_cache.update_quantized_kv_cache",      "primal"),
    Kernel("qk_norm_rope_cache",         "triton",     "triton.kv_cache.qk_norm_rope_cache",             "primal"),
    Kernel("qk_norm_rope_quantized_cache", "triton",   "triton.kv_cache.qk_norm_rope_cache",             "primal"),
    Kernel("qk_norm_rope_paged_cache",   "triton",     "triton.kv_cache.qk_norm_rope_paged_cache",       "primal"),

    Kernel("causal_conv1d",              "triton",     "triton.delta_rule.causal_conv1d",                "primal bwd"),
    Kernel("cumsum",                     "triton",     "triton.delta_rule.cumsum",                       "primal bwd"),
    Kernel("gated_delta_step",           "triton",     "triton.delta_rule.gated_delta_step",             "primal"),
    Kernel("gated_delta_net_inputs",     "triton",     "triton.delta_rule.gated_delta_net_inputs",       "primal bwd"),
    Kernel("gated_delta_net_step",       "triton",     "triton.delta_rule.gated_delta_net_step",         "primal"),
    Kernel("gated_delta_net_verify",     "triton",     "triton.delta_rule.gated_delta_net_verify",       "primal"),
    Kernel("kimi_delta_attention_step",  "triton",     "triton.delta_rule.kimi_delta_attention_step",    "primal"),
    Kernel("gated_delta_rule",           "triton",     "triton.delta_rule.gated_delta_rule.fwd",         "primal"),
    Kernel("gated_delta_rule",           "triton",     "triton.delta_rule.gated_delta_rule.bwd",         "bwd"),
    Kernel("kimi_delta_attention",       "triton",     "triton.delta_rule.kimi_delta_attention.fwd",     "primal"),
    Kernel("kimi_delta_attention",       "triton",     "triton.delta_rule.kimi_delta_attention.bwd",     "bwd"),
    Kernel("state_space_dual",           "triton",     "triton.delta_rule.state_space_dual.fwd",         "primal"),
    Kernel("state_space_dual",           "triton",     "triton.delta_rule.state_space_dual.bwd",         "bwd"),

    Kernel("attention",                  "mosaic_gpu", "pallas.attention.decode.attention",              "primal fwd"),
    Kernel("attention",                  "triton",     "triton.attention.decode.attention",              "primal fwd"),
    Kernel("attention",                  "mosaic_gpu", "pallas.attention.attention.fwd",                 "primal fwd"),
    Kernel("attention",                  "triton",     "triton.attention.attention.fwd",                 "primal fwd"),
    Kernel("attention",                  "mosaic_gpu", "pallas.attention.attention.joint_bwd",           "bwd"),
    Kernel("attention",                  "mosaic_gpu", "pallas.attention.attention.bwd",                 "bwd"),
    Kernel("attention",                  "triton",     "triton.attention.attention.bwd",                 "bwd"),
    Kernel("paged_attention",            "triton",     "triton.attention.decode.paged_attention",        "primal"),
    Kernel("quantized_cache_attention",  "triton",     "triton.attention.quantized_cache_attention.fwd", "primal"),
    Kernel("qk_norm_rope_cache_attention", "triton",   "triton.attention.qk_norm_rope_cache_attention",  "primal"),
    Kernel("latent_attention",           "triton",     "triton.attention.latent_attention",              "primal"),
    Kernel("indexer_scores",             "triton",     "triton.attention.indexer_scores",                "primal"),
    Kernel("sparse_attention",           "triton",     "triton.attention.sparse_attention",              "primal"),
)
# fmt: on

add_table("cuda", KERNELS)
