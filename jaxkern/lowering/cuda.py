"""What runs on NVIDIA GPUs: one row per kernel. Other ops run their reference.

Plain elementwise ops (swiglu, geglu, whole rotations) have no row: XLA's own fusion
reaches 94 to 99 % of the memory bandwidth there, see docs/performance.md.
"""

from jaxkern.lowering.lower import lower
from jaxkern.primitives.activation.softmax import softmax_p
from jaxkern.primitives.index.embedding import embedding_p
from jaxkern.primitives.loss.cross_entropy import cross_entropy_p
from jaxkern.primitives.loss.linear_cross_entropy import linear_cross_entropy_p
from jaxkern.primitives.norm.add_rms_norm import add_rms_norm_p
from jaxkern.primitives.norm.layer_norm import layer_norm_p
from jaxkern.primitives.norm.rms_norm import rms_norm_p
from jaxkern.primitives.optim.adamw import adamw_tree_p
from jaxkern.primitives.rope.rope import apply_rope_p
from jaxkern.triton.activation import softmax
from jaxkern.triton.index import embedding
from jaxkern.triton.loss import cross_entropy, linear_cross_entropy
from jaxkern.triton.norm import layer_norm, rms_norm
from jaxkern.triton.optim import adamw
from jaxkern.triton.rope import apply_rope
from jaxkern.triton.triton_call import unsupported

# fmt: off
ROWS = (
    # op            forward                  backward                 refuses
    (rms_norm_p,     rms_norm.rms_norm_fwd,     rms_norm.rms_norm_bwd,     unsupported),
    (add_rms_norm_p, rms_norm.add_rms_norm_fwd, rms_norm.add_rms_norm_bwd, unsupported),
    (layer_norm_p,   layer_norm.layer_norm_fwd, layer_norm.layer_norm_bwd, unsupported),
    (softmax_p,      softmax.softmax_fwd,       softmax.softmax_bwd,       unsupported),
    (cross_entropy_p, cross_entropy.cross_entropy_fwd, cross_entropy.cross_entropy_bwd, cross_entropy.unsupported),
    (linear_cross_entropy_p, linear_cross_entropy.linear_cross_entropy_fwd, linear_cross_entropy.linear_cross_entropy_bwd, linear_cross_entropy.unsupported),
    (embedding_p,    None,              embedding.embedding_bwd,   embedding.unsupported),
    (adamw_tree_p,   adamw.adamw_tree,            None,                      adamw.unsupported),
    (apply_rope_p,   apply_rope.apply_rope_fwd, apply_rope.apply_rope_bwd, apply_rope.unsupported),
)
# fmt: on
for op, fwd, bwd, unless in ROWS:
    lower(op, "cuda", "triton", fwd=fwd, bwd=bwd, unless=unless)
