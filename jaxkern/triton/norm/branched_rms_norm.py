"""RMSNorm beside its operand: backward one pass over x, dy and the other cotangent.

What is kept for that pass may not be written over. So the operand that goes on is a
copy, written where x is read anyway: the product at the end of the branch adds to it in
place, for which XLA would read and write a copy in a pass of its own.
"""

from jaxkern.gpu.triton_call import unsupported as unsupported
from jaxkern.triton.norm.rms_norm import rms_norm
from jaxkern.triton.norm.row_norm_backward import row_norm_bwd
from jaxkern.triton.norm.row_norm_forward import row_norm_fwd


def branched_rms_norm(x, weight, *, eps, offset):
    return rms_norm(x, weight, None, eps=eps, offset=offset), x


def branched_rms_norm_fwd(x, weight, *, eps, offset):
    y, beside, _, rstd = row_norm_fwd(x, weight, eps=eps, offset=offset, copied=True)
    return y, beside, rstd


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
