"""RMSNorm times a tensor: gated_rms_norm with a plain factor for its gate."""

from jaxkern.gpu.triton_call import unsupported as unsupported
from jaxkern.triton.norm.faster_by_xla import slower_at_some_sizes
from jaxkern.triton.norm.gated_rms_norm import gated_norm_fwd
from jaxkern.triton.norm.gated_rms_norm_backward import gated_norm_bwd

slower = slower_at_some_sizes("rms_norm_mul")


def rms_norm_mul_fwd(x, scale, weight, *, eps, offset):
    options = {"offset": offset, "silu": False, "norm_first": True}
    return gated_norm_fwd(x, scale, weight, eps=eps, **options)


def rms_norm_mul_bwd(x, scale, weight, rstd, dy, *, eps, offset, wanted):
    del eps  # already in rstd
    options = {"offset": offset, "silu": False, "norm_first": True}
    return gated_norm_bwd(x, scale, weight, rstd, dy, **options, wanted=wanted)
