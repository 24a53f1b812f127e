"""RMSNorm of a sum: rows of `row_norm_forward` with a residual."""

from jaxkern.gpu.triton_call import unsupported as unsupported
from jaxkern.triton.norm.row_norm_backward import row_norm_bwd
from jaxkern.triton.norm.row_norm_forward import row_norm_fwd


def add_rms_norm_fwd(x, residual, weight, bias, *, eps, offset):
    y, total, _, rstd = row_norm_fwd(
        x, weight, bias, residual=residual, eps=eps, offset=offset
    )
    return y, total, rstd


def add_rms_norm_bwd(
    x, residual, weight, bias, rstd, dy, dtotal, *, eps, offset, wanted
):
    del eps  # already in rstd
    return row_norm_bwd(
        x,
        weight,
        bias,
        rstd=rstd,
        dy=dy,
        residual=residual,
        dtotal=dtotal,
        offset=offset,
        wanted=wanted,
    )
