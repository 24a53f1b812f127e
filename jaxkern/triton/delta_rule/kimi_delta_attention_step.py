"""One token of Kimi delta attention, by the kernel of gated_delta_step."""

from jaxkern.triton.delta_rule.gated_delta_step import (
    gated_delta_step as kimi_delta_attention_step,
)
from jaxkern.triton.delta_rule.gated_delta_step import unsupported

__all__ = ["kimi_delta_attention_step", "unsupported"]
