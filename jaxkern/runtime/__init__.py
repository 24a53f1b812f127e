"""What a user sees of a compiled model: plans, graphs, limits, fallbacks, events.

Nothing here costs anything until it is called.
"""

from jaxkern.lowering.exported_kernels import exported_kernels
from jaxkern.primitives.linear.policy import Policy, current_policy, policy
from jaxkern.runtime import testing
from jaxkern.runtime.graph.conflicts import ConflictTracker, Region
from jaxkern.runtime.graph.fuse import Fusion, NotFused, Pattern
from jaxkern.runtime.graph.graph import Graph, graph
from jaxkern.runtime.graph.node import Node
from jaxkern.runtime.graph.op_kind import OpKind
from jaxkern.runtime.memory.buffer_pool import BufferPool
from jaxkern.runtime.memory.memory_limit import (
    MemoryLimitExceeded,
    allocated_bytes,
    limited,
    memory_limit,
)
from jaxkern.runtime.memory.memory_tracker import MemoryTracker
from jaxkern.runtime.memory.upload import UploadReport, upload
from jaxkern.runtime.memory.with_oom_fallback import with_oom_fallback
from jaxkern.runtime.plan import kernel_cache
from jaxkern.runtime.plan.bucketed import bucketed
from jaxkern.runtime.plan.compilation_cache import enable_compilation_cache
from jaxkern.runtime.plan.compile import compile
from jaxkern.runtime.plan.load import load
from jaxkern.runtime.plan.plan import Plan
from jaxkern.runtime.plan.profile import Limits, measured_limits
from jaxkern.runtime.plan.symbolic_plan import SymbolicPlan
from jaxkern.runtime.trace import events
from jaxkern.runtime.trace.events import reset_stats, stats
from jaxkern.runtime.trace.trace import OpaqueOp, Trace, TracedOp, TracedPlan, trace

__all__ = [
    "BufferPool",
    "ConflictTracker",
    "Fusion",
    "Graph",
    "Limits",
    "MemoryLimitExceeded",
    "MemoryTracker",
    "Node",
    "NotFused",
    "OpKind",
    "OpaqueOp",
    "Pattern",
    "Plan",
    "Policy",
    "Region",
    "SymbolicPlan",
    "Trace",
    "TracedOp",
    "TracedPlan",
    "UploadReport",
    "allocated_bytes",
    "bucketed",
    "compile",
    "current_policy",
    "enable_compilation_cache",
    "events",
    "exported_kernels",
    "graph",
    "kernel_cache",
    "limited",
    "load",
    "measured_limits",
    "memory_limit",
    "policy",
    "reset_stats",
    "stats",
    "testing",
    "trace",
    "upload",
    "with_oom_fallback",
]
