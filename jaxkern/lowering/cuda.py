"""What runs on NVIDIA GPUs: one row per kernel. Other ops run their reference.

Plain elementwise ops (swiglu, geglu, whole rotations) have no row: XLA's own fusion
reaches 94 to 99 % of the memory bandwidth there, see docs/performance.md.
"""

from jaxkern.lowering.lower import lower
from jaxkern.primitives.activation.softmax import softmax_p
from jaxkern.primitives.attention.attention import attention_p
from jaxkern.primitives.attention.paged_attention import paged_attention_p
from jaxkern.primitives.norm.add_rms_norm import add_rms_norm_p
from jaxkern.primitives.norm.layer_norm import layer_norm_p
from jaxkern.primitives.norm.rms_norm import rms_norm_p
from jaxkern.primitives.rope.rope import apply_rope_p
from jaxkern.triton.activation import softmax
from jaxkern.triton.attention import decode_attention
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
    # backward from the kernel's lse: the reference
    (attention_p,       decode_attention.attention_fwd,       None, decode_attention.unsupported),
    (paged_attention_p, decode_attention.paged_attention_fwd, None, decode_attention.unsupported_paged),
)
# fmt: on
for op, fwd, bwd, unless in ROWS:
    lower(op, "cuda", "triton", fwd=fwd, bwd=bwd, unless=unless)
