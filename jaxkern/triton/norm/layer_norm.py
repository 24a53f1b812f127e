"""LayerNorm: rows of `row_norm` that are centred."""

from jaxkern.triton.norm.row_norm import row_norm_bwd, row_norm_fwd


def layer_norm_fwd(x, weight, bias, *, eps):
    y, _, mean, rstd = row_norm_fwd(
        x, None, weight, bias, eps=eps, offset=0.0, center=True
    )
    return y, mean, rstd


def layer_norm_bwd(x, weight, bias, mean, rstd, dy, *, eps, wanted):
    del eps  # already in rstd
    dx, _, dweight, dbias = row_norm_bwd(
        x,
        None,
        weight,
        bias,
        mean,
        rstd,
        dy,
        None,
        offset=0.0,
        wanted=(wanted[0], False, *wanted[1:]),
    )
    return dx, dweight, dbias
