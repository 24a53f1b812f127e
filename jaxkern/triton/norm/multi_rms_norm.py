"""multi_rms_norm: the second half of sandwich_norm, for two or three weights."""

from jaxkern.gpu.triton_call import unsupported as unsupported
from jaxkern.triton.norm.sandwich_norm import sandwich_norm_fwd
from jaxkern.triton.norm.sandwich_norm_backward import sandwich_norm_bwd


def multi_rms_norm_fwd(x, *weights, eps, offset):
    ys, _, _, rstd = sandwich_norm_fwd(
        x, None, None, None, weights, eps=eps, offset=offset
    )
    return *ys, rstd


dual_rms_norm_fwd = triple_rms_norm_fwd = multi_rms_norm_fwd


def multi_rms_norm_bwd(x, weights, rstd, dys, offset, wanted):
    dx, _, _, _, *dweights = sandwich_norm_bwd(
        x,
        None,
        (None, None, *weights),
        None,
        rstd,
        dys,
        None,
        offset=offset,
        wanted=(wanted[0], False, False, False, *wanted[1:]),
    )
    return dx, *dweights[: len(weights)]


def dual_rms_norm_bwd(x, weight1, weight2, rstd, dy1, dy2, *, eps, offset, wanted):
    del eps  # already in rstd
    weights, dys = (weight1, weight2), (dy1, dy2)
    return multi_rms_norm_bwd(x, weights, rstd, dys, offset, wanted)


def triple_rms_norm_bwd(
    x, weight1, weight2, weight3, rstd, dy1, dy2, dy3, *, eps, offset, wanted
):
    del eps  # already in rstd
    weights, dys = (weight1, weight2, weight3), (dy1, dy2, dy3)
    return multi_rms_norm_bwd(x, weights, rstd, dys, offset, wanted)
