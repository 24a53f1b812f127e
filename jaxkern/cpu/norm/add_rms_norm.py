"""RMSNorm of a sum on a CPU, by norm.h."""

from jaxkern.cpu.norm.norm import backward, forward
from jaxkern.cpu.norm.norm import slower as slower
from jaxkern.cpu.norm.norm import slower_bwd as slower_bwd
from jaxkern.cpu.norm.norm import unsupported as unsupported


def add_rms_norm_fwd(x, residual, weight, bias, *, eps, offset):
    y, total, _, rstd = forward(x, residual, weight, bias, eps, offset)
    return y, total, rstd


def add_rms_norm_bwd(x, residual, weight, bias, rstd, dy, dtotal, *, eps, offset):
    del eps
    return backward(x, residual, weight, bias, None, rstd, dy, dtotal, offset)
