"""`Node`: one equation of a graph, with what it reads and writes."""

import dataclasses

from jaxkern.runtime.graph.conflicts import Region
from jaxkern.runtime.graph.op_kind import JaxprEqn, OpKind


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One equation.

    Attributes:
      id: its place in the recorded order; stays with it when the graph is reordered.
      name: of its primitive.
      kind: from the table of `jaxkern.runtime.graph.op_kind`.
      inputs, outputs: ids of the values it takes and makes. Arguments have the first
        ids, then constants, then results in recorded order.
      reads, writes: the bytes it touches. A view touches none: who uses it does.
      barrier: why nothing may be moved past it, or None.
      is_view: does it only give other dims to, or cut, a value?
      equation: the jaxpr equation.
    """

    id: int
    name: str
    kind: OpKind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    barrier: str | None
    is_view: bool
    equation: JaxprEqn = dataclasses.field(repr=False)
