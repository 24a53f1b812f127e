"""RMSNorm beside its operand: backward one pass over x, dy and the other cotangent."""

from jaxkern.gpu.triton_call import unsupported as unsupported
from jaxkern.triton.norm.rms_norm import rms_norm, rms_norm_fwd
from jaxkern.triton.norm.row_norm_backward import row_norm_bwd


def branched_rms_norm(x, weight, *, eps, offset):
    return rms_norm(x, weight, None, eps=eps, offset=offset), x


def branched_rms_norm_fwd(x, weight, *, eps, offset):
    y, rstd = rms_norm_fwd(x, weight, None, eps=eps, offset=offset)
    return y, x, rstd


def branched_rms_norm_bwd(x, weight, rstd, dy, dbeside, *, eps, offset, wanted):
    del eps  # already in rstd
    dx, _, dweight, _ = row_norm_bwd(
        x,
        weight,
        rstd=rstd,
        dy=dy,
        dtotal=dbeside,
        offset=offset,
        wanted=(wanted[0], False, wanted[1], False),
    )
    return dx, dweight
