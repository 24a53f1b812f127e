"""What a user sees of a compiled model: plans, graphs, limits, fallbacks, events.

Nothing here costs anything until it is called.
"""

from jaxkern.primitives.linear.policy import Policy, current_policy, policy
from jaxkern.runtime import events, kernel_cache, testing
from jaxkern.runtime.bucketed import bucketed
from jaxkern.runtime.buffer_pool import BufferPool
from jaxkern.runtime.compilation_cache import enable_compilation_cache
from jaxkern.runtime.conflicts import ConflictTracker, Region
from jaxkern.runtime.events import reset_stats, stats
from jaxkern.runtime.fuse import Fusion, NotFused, Pattern
from jaxkern.runtime.graph import Graph, Node, graph
from jaxkern.runtime.implementations import implementations
from jaxkern.runtime.memory_limit import (
    MemoryLimitExceeded,
    allocated_bytes,
    limited,
    memory_limit,
)
from jaxkern.runtime.memory_tracker import MemoryTracker
from jaxkern.runtime.op_kind import OpKind
from jaxkern.runtime.plan import Plan, compile
from jaxkern.runtime.profile import Limits, measured_limits
from jaxkern.runtime.saved_plan import load
from jaxkern.runtime.symbolic_plan import SymbolicPlan
from jaxkern.runtime.trace import OpaqueOp, Trace, TracedOp, TracedPlan, trace
from jaxkern.runtime.upload import UploadReport, upload
from jaxkern.runtime.with_oom_fallback import with_oom_fallback

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
    "graph",
    "implementations",
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
