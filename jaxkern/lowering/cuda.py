"""What runs on NVIDIA GPUs: one row per kernel. Other ops run their reference."""

from jaxkern.lowering.lower import lower
from jaxkern.primitives.activation.geglu import geglu_p
from jaxkern.primitives.activation.softmax import softmax_p
from jaxkern.primitives.activation.swiglu import swiglu_p
from jaxkern.primitives.norm.add_rms_norm import add_rms_norm_p
from jaxkern.primitives.norm.layer_norm import layer_norm_p
from jaxkern.primitives.norm.rms_norm import rms_norm_p
from jaxkern.primitives.rope.head_norm_rope import head_norm_rope_p
from jaxkern.primitives.rope.qk_norm_rope import qk_norm_rope_p
from jaxkern.primitives.rope.rope import apply_rope_p
from jaxkern.triton.activation import gated, softmax
from jaxkern.triton.norm import layer_norm, rms_norm
from jaxkern.triton.rope import apply_rope, head_norm_rope, qk_norm_rope
from jaxkern.triton.triton_call import unsupported

# fmt: off
ROWS = (
    # op            forward                  backward                 refuses
    (rms_norm_p,     rms_norm.rms_norm_fwd,     rms_norm.rms_norm_bwd,     unsupported),
    (add_rms_norm_p, rms_norm.add_rms_norm_fwd, rms_norm.add_rms_norm_bwd, unsupported),
    (layer_norm_p,   layer_norm.layer_norm_fwd, layer_norm.layer_norm_bwd, unsupported),
    (softmax_p,      softmax.softmax_fwd,       softmax.softmax_bwd,       unsupported),
    (swiglu_p,       gated.swiglu_fwd,          gated.swiglu_bwd,          unsupported),
    (geglu_p,        gated.geglu_fwd,           gated.geglu_bwd,           unsupported),
    (apply_rope_p,   apply_rope.apply_rope_fwd, apply_rope.apply_rope_bwd, unsupported),
    (head_norm_rope_p, head_norm_rope.head_norm_rope_fwd, head_norm_rope.head_norm_rope_bwd, qk_norm_rope.unsupported),
    (qk_norm_rope_p, qk_norm_rope.qk_norm_rope_fwd, qk_norm_rope.qk_norm_rope_bwd, qk_norm_rope.unsupported),
)
# fmt: on
for op, fwd, bwd, unless in ROWS:
    lower(op, "cuda", "triton", fwd=fwd, bwd=bwd, unless=unless)
