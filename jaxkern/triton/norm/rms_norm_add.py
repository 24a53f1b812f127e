"""rms_norm_add: the first half of sandwich_norm, with a factor of the sum."""

from typing import Any

from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import unsupported as unsupported
from jaxkern.triton.norm.faster_by_xla import slower_at_some_sizes
from jaxkern.triton.norm.sandwich_norm import sandwich_norm_fwd
from jaxkern.triton.norm.sandwich_norm_backward import sandwich_norm_bwd
from jaxkern.triton.norm.split_rows import split_sizes

slower_at = slower_at_some_sizes("rms_norm_add")


def slower(x: Any, dy: Any = None, **_: Any) -> str | None:
    d = x.shape[-1]
    block = next_power_of_2(d)
    idle = d <= 4096 and 3 * d < 2 * block
    if dy is None and idle and split_sizes(x) is None:
        return f"a row of {d} columns leaves a third of a block of {block} idle"
    return slower_at(x, dy)


def rms_norm_add_fwd(x, residual, weight, scale, *, eps, offset):
    _, total, rstd, _ = sandwich_norm_fwd(
        x, residual, weight, scale, (), eps=eps, offset=offset
    )
    return total, rstd


def rms_norm_add_bwd(x, residual, weight, scale, rstd, dy, *, eps, offset, wanted):
    del eps  # already in rstd
    passes = scale is None  # then dresidual is dy itself
    if passes:
        wanted = (wanted[0], False, *wanted[2:])
    dx, dresidual, dweight, dscale, *_ = sandwich_norm_bwd(
        x,
        residual,
        (weight, scale),
        rstd,
        None,
        (),
        dy,
        offset=offset,
        wanted=wanted,
    )
    return dx, dy if passes else dresidual, dweight, dscale
