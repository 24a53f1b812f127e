"""jaxkern: the operators of today's models as JAX primitives with every rule."""

from jaxkern.lowering import cpu as _cpu
from jaxkern.lowering import cuda as _cuda
from jaxkern.lowering.lower import backend, explain
from jaxkern.primitives.norm.add_rms_norm import add_rms_norm
from jaxkern.primitives.norm.rms_norm import rms_norm

__all__ = ["add_rms_norm", "backend", "explain", "rms_norm"]

del _cpu, _cuda  # imported for their rows
