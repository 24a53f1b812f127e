"""What a choice of experts is, and the weights of those that are chosen."""

import dataclasses

from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import jit, tl

LOWEST = -0x80000000  # below the integer of every float
LEAST = -0x7F800001  # that of -inf


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is static of a choice of experts.

    Attributes:
      experts: of which `chosen` are taken.
      places: in which the experts stand, a power of 2; `slots` likewise of the chosen.
      sigmoid, normalize, renorm, factor: how they are weighed.
      num_groups, top_groups, top2: what groups they are taken from.
      lowest, least: below the integer of every float, and that of -inf.
    """

    experts: int
    chosen: int
    places: int
    slots: int
    sigmoid: bool
    normalize: bool
    renorm: bool
    num_groups: int
    top_groups: int
    top2: bool
    factor: float
    lowest: int = LOWEST
    least: int = LEAST


@jit
def weights_of(
    chosen, ids, slot, dropped, top_logit, total, scale_ptr, C: tl.constexpr
):
    """The weights of the chosen logits, 0 behind the last and where one is dropped."""
    K: tl.constexpr = C.chosen
    if C.sigmoid:  # log sigmoid without overflow
        log_score = tl.minimum(chosen, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(chosen)))
        log_score = tl.where(chosen == chosen, log_score, chosen)
    else:
        log_score = chosen - top_logit - tl.log(total)
    log_score = tl.where((slot < K) & (dropped == 0), log_score, -float("inf"))
    weights = tl.exp(log_score)
    if C.normalize:
        top_score = tl.max(log_score, 1)[:, None]
        top_score = tl.where(top_score == -float("inf"), 0.0, top_score)
        weights = tl.exp(log_score - top_score)
        sum_of_all = tl.sum(weights, 1)[:, None]
        weights /= tl.where(sum_of_all == 0.0, 1.0, sum_of_all)
    if scale_ptr is not None:
        weights *= tl.load(scale_ptr + ids, slot < K, 0.0).to(tl.float32)
    if C.renorm:
        sum_of_all = tl.sum(tl.where(slot < K, weights, 0.0), 1)[:, None]
        weights /= tl.where(sum_of_all == 0.0, 1.0, sum_of_all)
    return weights * C.factor


def choice(
    e: int,
    *,
    k: int,
    score: str,
    normalize: bool,
    num_groups: int,
    top_groups: int,
    group_score: str,
    scaling_factor: float,
    scale_then_renorm: bool = False,
) -> Choice:
    """Among e experts, by the options of `route`."""
    return Choice(
        experts=e,
        chosen=k,
        # groups are equal runs
        places=e if num_groups > 1 else max(next_power_of_2(e), 32),
        slots=next_power_of_2(k),
        sigmoid=score == "sigmoid",
        normalize=normalize,
        renorm=scale_then_renorm,
        num_groups=num_groups,
        top_groups=top_groups,
        top2=group_score == "top2",
        factor=scaling_factor,
    )
