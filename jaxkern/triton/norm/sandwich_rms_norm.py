"""sandwich_rms_norm: both halves of sandwich_norm, with one next weight or three."""

from jaxkern.gpu.triton_call import unsupported as unsupported
from jaxkern.triton.norm.sandwich_norm import sandwich_norm_fwd
from jaxkern.triton.norm.sandwich_norm_backward import sandwich_norm_bwd


def sandwich_rms_norm_fwd(x, residual, weight, *next_weights, eps, offset):
    ys, *rest = sandwich_norm_fwd(
        x, residual, weight, None, next_weights, eps=eps, offset=offset
    )
    return *ys, *rest


sandwich_triple_rms_norm_fwd = sandwich_rms_norm_fwd


def gradients(
    x, residual, weight, next_weights, rstd, next_rstd, dys, dtotal, offset, wanted
):
    dx, dresidual, dweight, _, *dnext = sandwich_norm_bwd(
        x,
        residual,
        (weight, None, *next_weights),
        rstd,
        next_rstd,
        dys,
        dtotal,
        offset=offset,
        wanted=(*wanted[:3], False, *wanted[3:]),
    )
    return dx, dresidual, dweight, *dnext[: len(next_weights)]


def sandwich_rms_norm_bwd(
    x,
    residual,
    weight,
    next_weight,
    rstd,
    next_rstd,
    dy,
    dtotal,
    *,
    eps,
    offset,
    wanted,
):
    del eps  # already in rstd
    rstds = rstd, next_rstd
    return gradients(
        x, residual, weight, (next_weight,), *rstds, (dy,), dtotal, offset, wanted
    )


def sandwich_triple_rms_norm_bwd(
    x,
    residual,
    weight,
    next_weight1,
    next_weight2,
    next_weight3,
    rstd,
    next_rstd,
    dy1,
    dy2,
    dy3,
    dtotal,
    *,
    eps,
    offset,
    wanted,
):
    del eps  # already in rstd
    next_weights, dys = (next_weight1, next_weight2, next_weight3), (dy1, dy2, dy3)
    rstds = rstd, next_rstd
    return gradients(
        x, residual, weight, next_weights, *rstds, dys, dtotal, offset, wanted
    )
