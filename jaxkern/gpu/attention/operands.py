"""The operands of attention's gradients by name, for the kernels of every backend."""

import collections

from jaxkern.primitives.attention.operands import AttentionOperands

# those of attention, what its forward pass has saved, and cotangents
GradientOperands = collections.namedtuple(
    "GradientOperands",
    (*AttentionOperands._fields, "out", "lse", "tail", "dout", "dlse"),
)
