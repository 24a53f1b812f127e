"""l2_norm: rows of `row_norm_forward` divided by the sum of squares, not its mean."""

from typing import Any

from jaxkern.gpu.triton_call import unsupported as unsupported
from jaxkern.triton.norm.row_norm_backward import row_norm_bwd
from jaxkern.triton.norm.row_norm_forward import row_norm_fwd


def slower(x: Any, dy: Any = None, **_: Any) -> str | None:
    if dy is None and x.shape[-1] <= 256:
        return f"by a few hundredths where a row has {x.shape[-1]} columns"
    return None


def l2_norm_fwd(x, *, eps):
    y, _, _, rnorm = row_norm_fwd(x, eps=eps, mean_square=False)
    return y, rnorm


def l2_norm_bwd(x, rnorm, dy, *, eps):
    del eps  # already in rnorm
    dx, *_ = row_norm_bwd(x, rstd=rnorm, dy=dy, mean_square=False)
    return dx
