"""What a compiled model does, made visible."""

from jaxkern.runtime.conflicts import ConflictTracker, Region
from jaxkern.runtime.fuse import Fusion, NotFused, Pattern
from jaxkern.runtime.graph import Graph, Node, graph
from jaxkern.runtime.op_kind import OpKind
from jaxkern.runtime.trace import OpaqueOp, Trace, TracedOp, TracedPlan, trace

__all__ = [
    "ConflictTracker",
    "Fusion",
    "Graph",
    "Node",
    "NotFused",
    "OpKind",
    "OpaqueOp",
    "Pattern",
    "Region",
    "Trace",
    "TracedOp",
    "TracedPlan",
    "graph",
    "trace",
]
