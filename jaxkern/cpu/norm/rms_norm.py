"""RMSNorm on a CPU, by norm.h."""

from jaxkern.cpu.norm.norm import backward, forward
from jaxkern.cpu.norm.norm import slower as slower
from jaxkern.cpu.norm.norm import slower_bwd as slower_bwd
from jaxkern.cpu.norm.norm import unsupported as unsupported


def rms_norm_fwd(x, weight, bias, *, eps, offset):
    y, _, _, rstd = forward(x, None, weight, bias, eps, offset)
    return y, rstd


def rms_norm_bwd(x, weight, bias, rstd, dy, *, eps, offset):
    del eps  # already in rstd
    dx, _, *gradients = backward(x, None, weight, bias, None, rstd, dy, None, offset)
    return dx, *gradients
