"""The equations in which a chain is looked for: who makes and who reads each value."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from jaxkern.runtime.graph.op_kind import Jaxpr, JaxprEqn


class Traced(NamedTuple):
    """An equation, and the nodes that it stands for."""

    eqn: JaxprEqn
    nodes: tuple[int, ...]


class Equations:
    """The equations of one jaxpr, some of them replaced already.

    Attributes:
      eqns: in order, each with the nodes that it stands for.
      maker: of each variable the position of the equation that makes it.
      users: of each variable the positions that read it; `len(eqns)` for the results.
    """

    def __init__(self, jaxpr: Jaxpr, eqns: Sequence[Traced]):
        self.eqns = eqns
        self.maker = {v: k for k, (eqn, _) in enumerate(eqns) for v in eqn.outvars}
        self.users: dict[Any, list[int]] = {}
        reading = [eqn.invars for eqn, _ in eqns] + [jaxpr.outvars]
        for k, atoms in enumerate(reading):
            for v in atoms:
                if not isinstance(v, Literal):
                    self.users.setdefault(v, []).append(k)

    def at(self, k: int) -> JaxprEqn:
        return self.eqns[k].eqn

    def name(self, k: int) -> str:
        """What reports call it."""
        return f"node {self.eqns[k].nodes[-1]} ({self.eqns[k].eqn.primitive.name})"
