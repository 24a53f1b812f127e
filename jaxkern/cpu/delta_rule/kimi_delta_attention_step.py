"""Kimi delta attention of one token on a CPU, by gated_delta_rule.h."""

from jaxkern.cpu.delta_rule.gated_delta_rule import unsupported
from jaxkern.cpu.delta_rule.gated_delta_step import (
    gated_delta_step as kimi_delta_attention_step,
)

__all__ = ["kimi_delta_attention_step", "unsupported"]
