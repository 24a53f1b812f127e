"""What runs on NVIDIA GPUs: one row per kernel. Other ops run their reference.

Plain elementwise ops (swiglu, geglu, whole rotations) have no row: XLA's own fusion
reaches 94 to 99 % of the memory bandwidth there, see docs/performance.md.
"""

from jaxkern.lowering.lower import lower
from jaxkern.primitives.activation.softmax import softmax_p
from jaxkern.primitives.attention.attention import attention_p
from jaxkern.primitives.norm.add_rms_norm import add_rms_norm_p
from jaxkern.primitives.norm.layer_norm import layer_norm_p
from jaxkern.primitives.norm.rms_norm import rms_norm_p
from jaxkern.primitives.rope.rope import apply_rope_p
from jaxkern.triton.activation import softmax
from jaxkern.triton.attention import flash_attention
from jaxkern.triton.norm import layer_norm, rms_norm
from jaxkern.triton.rope import apply_rope
from jaxkern.triton.triton_call import unsupported

# fmt: off
ROWS = (
    # op            forward                  backward                 refuses
    (rms_norm_p,     rms_norm.rms_norm_fwd,     rms_norm.rms_norm_bwd,     unsupported),
    (add_rms_norm_p, rms_norm.add_rms_norm_fwd, rms_norm.add_rms_norm_bwd, unsupported),
    (layer_norm_p,   layer_norm.layer_norm_fwd, layer_norm.layer_norm_bwd, unsupported),
    (softmax_p,      softmax.softmax_fwd,       softmax.softmax_bwd,       unsupported),
    (apply_rope_p,   apply_rope.apply_rope_fwd, apply_rope.apply_rope_bwd, apply_rope.unsupported),
    (attention_p,    flash_attention.attention_fwd, flash_attention.attention_bwd, flash_attention.unsupported),
)
# fmt: on
for op, fwd, bwd, unless in ROWS:
    lower(op, "cuda", "triton", fwd=fwd, bwd=bwd, unless=unless)
