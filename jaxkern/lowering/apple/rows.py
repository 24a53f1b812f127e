"""What runs on Apple platforms: each op its reference, rewritten for the plugin.

With jax-mps the ops below run MLX's own kernels where they can.
"""

import functools

from jaxkern.lowering.apple import fused
from jaxkern.lowering.apple.plugins import PLATFORMS
from jaxkern.lowering.apple.portable import portable
from jaxkern.lowering.lower import lower
from jaxkern.primitives.activation.gelu import gelu_p
from jaxkern.primitives.activation.softmax import softmax_p
from jaxkern.primitives.attention.attention import attention_p
from jaxkern.primitives.kernel_primitive import REWRITES
from jaxkern.primitives.norm.add_rms_norm import add_rms_norm_p
from jaxkern.primitives.norm.layer_norm import layer_norm_p
from jaxkern.primitives.norm.rms_norm import rms_norm_p
from jaxkern.primitives.quant.affine_matmul import affine_matmul_p, dequantize_affine_p
from jaxkern.primitives.quant.quantize_affine import quantize_affine_p
from jaxkern.primitives.rope.rope_from import rope_from_p

REWRITES.update(
    {name: functools.partial(portable, platform=name) for name in PLATFORMS}
)

ROWS = (
    (rms_norm_p, fused.rms_norm, fused.rms_norm_unless),
    (add_rms_norm_p, fused.add_rms_norm, fused.add_rms_norm_unless),
    (layer_norm_p, fused.layer_norm, fused.layer_norm_unless),
    (gelu_p, fused.gelu, fused.gelu_unless),
    (softmax_p, fused.softmax, fused.softmax_unless),
    (attention_p, fused.attention, fused.attention_unless),
    (rope_from_p, fused.rope, fused.rope_unless),
    (quantize_affine_p, fused.quantize, fused.quantize_unless),
    (dequantize_affine_p, fused.dequantize, fused.dequantize_unless),
    (affine_matmul_p, fused.quantized_matmul, fused.quantized_matmul_unless),
)
for op, kernel, unless in ROWS:
    lower(op, "mps", "mps", fwd=None, primal=kernel, unless=unless)
