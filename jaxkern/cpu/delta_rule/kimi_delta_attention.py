"""Kimi delta attention on a CPU, by gated_delta_rule.h, which takes either decay."""

from jaxkern.cpu.delta_rule.gated_delta_rule import (
    gated_delta_rule as kimi_delta_attention,
)
from jaxkern.cpu.delta_rule.gated_delta_rule import unsupported

__all__ = ["kimi_delta_attention", "unsupported"]
