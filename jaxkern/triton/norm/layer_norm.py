"""LayerNorm: rows of `row_norm_forward` that are centred."""

from jaxkern.gpu.triton_call import unsupported as unsupported
from jaxkern.triton.norm.faster_by_xla import slower_at_some_sizes
from jaxkern.triton.norm.row_norm_backward import row_norm_bwd
from jaxkern.triton.norm.row_norm_forward import row_norm_fwd

slower = slower_at_some_sizes("layer_norm")


def layer_norm_fwd(x, weight, bias, *, eps, offset):
    y, _, mean, rstd = row_norm_fwd(
        x, weight, bias, eps=eps, offset=offset, center=True
    )
    return y, mean, rstd


def layer_norm_bwd(x, weight, bias, mean, rstd, dy, *, eps, offset, wanted):
    del eps  # already in rstd
    wanted = wanted[0], False, *wanted[1:]
    dx, _, dweight, dbias = row_norm_bwd(
        x, weight, bias, rstd=rstd, dy=dy, mean=mean, offset=offset, wanted=wanted
    )
    return dx, dweight, dbias
