"""What a user sees of a compiled function: its plan, memory, kernels and times."""

from jaxkern.runtime import kernel_cache
from jaxkern.runtime.bucketed import bucketed
from jaxkern.runtime.plan import Plan, compile
from jaxkern.runtime.profile import Limits, measured_limits
from jaxkern.runtime.saved_plan import load
from jaxkern.runtime.symbolic_plan import SymbolicPlan

__all__ = [
    "Limits",
    "Plan",
    "SymbolicPlan",
    "bucketed",
    "compile",
    "kernel_cache",
    "load",
    "measured_limits",
]
