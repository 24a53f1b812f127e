"""What runs on NVIDIA GPUs: one row per kernel. Other ops run their reference.

Plain elementwise ops (swiglu, geglu, whole rotations) have no row: XLA's own fusion
reaches 94 to 99 % of the memory bandwidth there, see docs/performance.md.
"""

from jaxkern.lowering.lower import lower
from jaxkern.primitives.activation.softmax import softmax_p
from jaxkern.primitives.delta_rule.causal_conv1d import causal_conv1d_p
from jaxkern.primitives.delta_rule.cumsum import cumsum_p
from jaxkern.primitives.kv_cache.update_quantized_kv_cache import (
    update_quantized_kv_cache_p,
)
from jaxkern.primitives.norm.add_rms_norm import add_rms_norm_p
from jaxkern.primitives.norm.layer_norm import layer_norm_p
from jaxkern.primitives.norm.rms_norm import rms_norm_p
from jaxkern.primitives.rope.rope import apply_rope_p
from jaxkern.primitives.turboquant.fwht import fwht_p
from jaxkern.primitives.turboquant.quantize_vectors import quantize_vectors_p
from jaxkern.triton.activation import softmax
from jaxkern.triton.delta_rule import causal_conv1d, cumsum
from jaxkern.triton.norm import layer_norm, rms_norm
from jaxkern.triton.rope import apply_rope
from jaxkern.triton.triton_call import unsupported
from jaxkern.triton.turboquant import fwht, quantize_vectors

# fmt: off
ROWS = (
    # op            forward                  backward                 refuses
    (rms_norm_p,     rms_norm.rms_norm_fwd,     rms_norm.rms_norm_bwd,     unsupported),
    (add_rms_norm_p, rms_norm.add_rms_norm_fwd, rms_norm.add_rms_norm_bwd, unsupported),
    (layer_norm_p,   layer_norm.layer_norm_fwd, layer_norm.layer_norm_bwd, unsupported),
    (softmax_p,      softmax.softmax_fwd,       softmax.softmax_bwd,       unsupported),
    (apply_rope_p,   apply_rope.apply_rope_fwd, apply_rope.apply_rope_bwd, apply_rope.unsupported),
    (fwht_p,         fwht.fwht_fwd,             fwht.fwht_bwd,             fwht.unsupported),
    (cumsum_p,       cumsum.cumsum_fwd,         cumsum.cumsum_bwd,         cumsum.unsupported),
    (quantize_vectors_p, quantize_vectors.quantize_vectors_fwd, None, quantize_vectors.unsupported),
    (update_quantized_kv_cache_p,
     quantize_vectors.update_quantized_kv_cache_fwd, None,
     quantize_vectors.unsupported_in_cache),
    (causal_conv1d_p,
     causal_conv1d.causal_conv1d_fwd, causal_conv1d.causal_conv1d_bwd,
     causal_conv1d.unsupported),
)
# fmt: on
for op, fwd, bwd, unless in ROWS:
    lower(op, "cuda", "triton", fwd=fwd, bwd=bwd, unless=unless)
