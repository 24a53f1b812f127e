"""RMSNorm: rows of `row_norm_forward` that are not centred; short ones by groups."""

from jaxkern.gpu.triton_call import unsupported as unsupported
from jaxkern.triton.norm.faster_by_xla import slower_at_some_sizes
from jaxkern.triton.norm.row_norm_backward import row_norm_bwd
from jaxkern.triton.norm.row_norm_forward import row_norm_fwd
from jaxkern.triton.norm.short_rms_norm import is_short, short_rms_norm

slower = slower_at_some_sizes("rms_norm")


def rms_norm(x, weight, bias, *, eps, offset):
    if bias is None and is_short(x):
        return short_rms_norm(x, weight, eps=eps, offset=offset)
    return rms_norm_fwd(x, weight, bias, eps=eps, offset=offset)[0]


def rms_norm_fwd(x, weight, bias, *, eps, offset):
    y, _, _, rstd = row_norm_fwd(x, weight, bias, eps=eps, offset=offset)
    return y, rstd


def rms_norm_bwd(x, weight, bias, rstd, dy, *, eps, offset, wanted):
    del eps  # already in rstd
    wanted = wanted[0], False, *wanted[1:]
    dx, _, dweight, dbias = row_norm_bwd(
        x, weight, bias, rstd=rstd, dy=dy, offset=offset, wanted=wanted
    )
    return dx, dweight, dbias
