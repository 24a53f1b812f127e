"""What runs on NVIDIA GPUs: one row per kernel. Other ops run their reference."""

from jaxkern.lowering.lower import lower
from jaxkern.primitives.norm.add_rms_norm import add_rms_norm_p
from jaxkern.primitives.norm.layer_norm import layer_norm_p
from jaxkern.primitives.norm.rms_norm import rms_norm_p
from jaxkern.triton.norm import layer_norm, rms_norm
from jaxkern.triton.triton_call import unsupported

lower(
    rms_norm_p,
    "cuda",
    "triton",
    fwd=rms_norm.rms_norm_fwd,
    bwd=rms_norm.rms_norm_bwd,
    unless=unsupported,
)
lower(
    add_rms_norm_p,
    "cuda",
    "triton",
    fwd=rms_norm.add_rms_norm_fwd,
    bwd=rms_norm.add_rms_norm_bwd,
    unless=unsupported,
)
lower(
    layer_norm_p,
    "cuda",
    "triton",
    fwd=layer_norm.layer_norm_fwd,
    bwd=layer_norm.layer_norm_bwd,
    unless=unsupported,
)
