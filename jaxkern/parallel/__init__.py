"""Operators whose operands are cut over the devices of a mesh axis."""

from jaxkern.parallel.carried_state import (
    sharded_gated_delta_rule,
    sharded_state_space_dual,
)
from jaxkern.parallel.expert_parallel import sharded_moe_ffn
from jaxkern.parallel.ring_attention import ring_attention
from jaxkern.parallel.sum_over_devices import sum_over_devices
from jaxkern.parallel.zigzag import sequence_positions, zigzag

__all__ = [
    "ring_attention",
    "sequence_positions",
    "sharded_gated_delta_rule",
    "sharded_moe_ffn",
    "sharded_state_space_dual",
    "sum_over_devices",
    "zigzag",
]
