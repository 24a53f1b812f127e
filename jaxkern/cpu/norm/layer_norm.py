"""LayerNorm on a CPU, by norm.h."""

from jaxkern.cpu.norm.norm import backward, forward
from jaxkern.cpu.norm.norm import slower as slower
from jaxkern.cpu.norm.norm import slower_bwd as slower_bwd
from jaxkern.cpu.norm.norm import unsupported as unsupported


def layer_norm_fwd(x, weight, bias, *, eps, offset):
    y, _, mean, rstd = forward(x, None, weight, bias, eps, offset, centred=True)
    return y, mean, rstd


def layer_norm_bwd(x, weight, bias, mean, rstd, dy, *, eps, offset):
    del eps
    dx, _, *gradients = backward(x, None, weight, bias, mean, rstd, dy, None, offset)
    return dx, *gradients
