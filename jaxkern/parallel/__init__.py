"""Operators whose operands are cut over the devices of a mesh axis."""

from jaxkern.parallel.ring_attention import ring_attention
from jaxkern.parallel.zigzag import sequence_positions, zigzag

__all__ = ["ring_attention", "sequence_positions", "zigzag"]
