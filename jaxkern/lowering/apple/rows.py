"""What runs on Apple platforms: each op its reference, rewritten for the plugin.

With jax-mps the ops below run MLX's own kernels where they can.
"""

import functools

from jaxkern.lowering.apple.plugins import PLATFORMS
from jaxkern.lowering.apple.portable import portable
from jaxkern.lowering.kernel_table import Kernel, add_table
from jaxkern.primitives.kernel_primitive import REWRITES

REWRITES.update(
    {name: functools.partial(portable, platform=name) for name in PLATFORMS}
)

# fmt: off
KERNELS = (
    #      op                   backend module                       passes    function               its refusal
    Kernel("rms_norm",          "mps", "lowering.apple.fused",        "primal", "rms_norm",            "unsupported_rms_norm"),
    Kernel("add_rms_norm",      "mps", "lowering.apple.fused",        "primal", "add_rms_norm",        "unsupported_add_rms_norm"),
    Kernel("layer_norm",        "mps", "lowering.apple.fused",        "primal", "layer_norm",          "unsupported_layer_norm"),
    Kernel("gelu",              "mps", "lowering.apple.fused",        "primal", "gelu",                "unsupported_gelu"),
    Kernel("softmax",           "mps", "lowering.apple.fused",        "primal", "softmax",             "unsupported_softmax"),
    Kernel("attention",         "mps", "lowering.apple.fused",        "primal", "attention",           "unsupported_attention"),
    Kernel("rope_from",         "mps", "lowering.apple.fused",        "primal", "rope",                "unsupported_rope"),
    Kernel("quantize_affine",   "mps", "lowering.apple.fused_affine", "primal", "quantize",            "unsupported_quantize"),
    Kernel("dequantize_affine", "mps", "lowering.apple.fused_affine", "primal", "dequantize",          "unsupported_dequantize"),
    Kernel("affine_embedding",  "mps", "lowering.apple.fused_affine", "primal", "embedding",           "unsupported_embedding"),
    Kernel("affine_matmul",     "mps", "lowering.apple.fused_affine", "primal", "quantized_matmul",    "unsupported_quantized_matmul"),
    Kernel("affine_matmul_id",  "mps", "lowering.apple.fused_affine", "primal", "quantized_matmul_id", "unsupported_quantized_matmul_id"),
)
# fmt: on

add_table("mps", KERNELS)
