"""`graph`: the equations of a function with what they read and write.

A graph can be asked which equations conflict, grouped into what may run at once, fused
(`Graph.fuse`) and put into another order (`Graph.reorder`); each gives a new graph, and
a graph is a function. XLA fuses and schedules what it compiles by itself: a graph is
for seeing what a function does, and for taking the fused operators of this library.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import Literal

from jaxkern.runtime.graph.buffers import buffers, is_view, value_ids, variables
from jaxkern.runtime.graph.conflicts import conflicts_between
from jaxkern.runtime.graph.fuse import Fusion, NotFused, Pattern, fused
from jaxkern.runtime.graph.levels import barriers, levels
from jaxkern.runtime.graph.node import Node
from jaxkern.runtime.graph.op_kind import Jaxpr, classify, public_primitive
from jaxkern.runtime.graph.patterns import PATTERNS
from jaxkern.runtime.graph.reorder import reordered
from jaxkern.runtime.graph.replay import is_plain_jit, opened

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """The equations of a function, in the order in which calling the graph runs them.

    Made by `graph`. Immutable, so threads may share it. Calling it takes and returns
    what the function does; it can be jitted, differentiated and mapped.

    Attributes:
      jaxpr: the equations as JAX has them.
      nodes: the equations in order.
      donated: for each array of the arguments, may it be overwritten?
      copies: outputs that cannot be written into their donated argument, and why.
      in_tree, out_tree: the structure of the arguments and of the results.
      fusions: what `fuse` replaced.
      not_fused: chains that nearly matched a pattern, and why they do not.
    """

    jaxpr: Jaxpr = dataclasses.field(repr=False)
    nodes: tuple[Node, ...]
    donated: tuple[bool, ...]
    copies: tuple[str, ...]
    in_tree: Any = dataclasses.field(repr=False)
    out_tree: Any = dataclasses.field(repr=False)
    fusions: tuple[Fusion, ...] = ()
    not_fused: tuple[NotFused, ...] = ()

    def __call__(self, *args: Any) -> Any:
        """Runs the equations one after the other.

        Raises:
          TypeError: the arguments differ from the recorded ones.
        """
        flat, tree = jax.tree.flatten(args)
        if tree != self.in_tree:
            raise TypeError(
                f"graph: recorded for arguments {self.in_tree}, got {tree}."
            )
        for v, x in zip(self.jaxpr.invars, flat, strict=True):
            aval = jax.typeof(x)
            if (v.aval.shape, v.aval.dtype) != (aval.shape, aval.dtype):
                raise TypeError(
                    f"graph: recorded for {v.aval}, got {aval}. "
                    "Record a graph for these shapes."
                )
        out = eval_jaxpr(self.jaxpr, self.jaxpr.consts, *flat)
        return jax.tree.unflatten(self.out_tree, list(map(jnp.asarray, out)))

    # What waits for what.

    def node(self, id: int) -> Node:
        """The node with this id, wherever it stands now."""
        return self.nodes[self._positions[id]]

    def conflicts(self, a: int | Node, b: int | Node) -> frozenset[str]:
        """Why the later of two nodes waits for the other: of {"RAW", "WAR", "WAW"}.

        Direct conflicts only; nodes without any may still be ordered by one between
        them. A barrier has no conflicts of its own: nothing is moved past it at all.
        """
        ids = [x.id if isinstance(x, Node) else x for x in (a, b)]
        first, second = (self.nodes[k] for k in sorted(self._positions[i] for i in ids))
        if first is second:
            return frozenset()
        found = conflicts_between(
            first.reads, first.writes, second.reads, second.writes
        )
        flows = set(first.outputs) & set(second.inputs)
        return found | {"RAW"} if flows else found

    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Groups of node ids that may run at once, each after the one before it.

        A view costs nothing: it stands in the group of what it views.
        """
        return self._levels

    def barriers(self) -> tuple[int, ...]:
        """Ids of the nodes before which a device that runs in this order must wait.

        The fewest barriers for this order: one where a node conflicts with what has
        been issued since the last, and one on each side of a barrier.
        """
        return barriers(self.nodes)

    @property
    def dispatch_count(self) -> int:
        """Number of nodes that do work: all but views."""
        return sum(not node.is_view for node in self.nodes)

    @property
    def barrier_count(self) -> int:
        return len(self.barriers())

    @property
    def unannotated_dispatch_count(self) -> int:
        """Number of nodes of which it is not known what they do: barriers."""
        return sum(node.barrier is not None for node in self.nodes)

    @functools.cached_property
    def _positions(self) -> dict[int, int]:
        return {node.id: k for k, node in enumerate(self.nodes)}

    @functools.cached_property
    def _levels(self) -> tuple[tuple[int, ...], ...]:
        return levels(self.nodes)

    # New graphs.

    def fuse(self, patterns: Sequence[str | Pattern] = tuple(PATTERNS)) -> "Graph":
        """The same function with chains of equations replaced by fused operators.

        A chain is replaced where all of it is known and nobody else reads what is
        computed inside. A fused operator rounds once where the chain rounds at each
        step, so results agree to the rounding of their dtype.

        Args:
          patterns: names of `jaxkern.runtime.graph.patterns.PATTERNS`, or patterns
            of your own, applied in this order, also inside scan, while, cond and
            checkpoint.

        Returns:
          A graph with new ids whose `fusions` and `not_fused` say what was done.

        Raises:
          ValueError: an unknown name.
        """
        chosen: list[Pattern] = []
        for p in patterns:
            if isinstance(p, str) and p not in PATTERNS:
                raise ValueError(
                    f"fuse: `patterns` are of {', '.join(PATTERNS)}, got {p!r}."
                )
            chosen += PATTERNS[p] if isinstance(p, str) else [p]
        ids = [node.id for node in self.nodes]
        jaxpr, fusions, not_fused = fused(self.jaxpr, chosen, ids)
        made = make_graph(jaxpr, self.donated, self.in_tree, self.out_tree)
        return dataclasses.replace(
            made, fusions=self.fusions + fusions, not_fused=not_fused
        )

    def reorder(self, lookahead: int = 64) -> "Graph":
        """The same equations in an order that needs fewer barriers.

        Greedy list scheduling: where the next node must wait for the running group,
        up to `lookahead` nodes behind it are tried first. One is moved ahead if its
        kind is reorderable and it conflicts neither with the group nor with any node
        that it passes. Nothing passes a barrier.

        Args:
          lookahead: how many nodes behind the next are tried, at least 0.

        Returns:
          A graph of the same nodes, ids kept, in the new order.

        Raises:
          ValueError: `lookahead` is negative.
        """
        if lookahead < 0:
            raise ValueError(f"reorder: `lookahead` must be >= 0, got {lookahead}.")
        nodes = reordered(self.nodes, lookahead)
        jaxpr = self.jaxpr.replace(eqns=[node.equation for node in nodes])
        return dataclasses.replace(self, jaxpr=jaxpr, nodes=nodes)

    # For people.

    def _rows(self) -> list[tuple[str, ...]]:
        level = {id: n for n, group in enumerate(self.levels()) for id in group}
        waits = set(self.barriers())
        return [
            (
                str(node.id),
                "barrier" if node.barrier else node.kind.value,
                node.name,
                " ".join(map(repr, node.reads)) or ("view" if node.is_view else "-"),
                " ".join(map(repr, node.writes)) or "-",
                str(level[node.id]),
                node.barrier or ("waits" if node.id in waits else ""),
            )
            for node in self.nodes
        ]

    def __repr__(self) -> str:
        head = (
            f"Graph of {len(self.nodes)} nodes, {self.dispatch_count} dispatches, "
            f"{self.barrier_count} barriers, {len(self.levels())} levels"
        )
        lines = [f"  {'  '.join(row).rstrip()}" for row in self._rows()]
        lines += [f"  fused: {fusion}" for fusion in self.fusions]
        lines += [f"  not fused: {miss}" for miss in self.not_fused]
        lines += [f"  copy: {copy}" for copy in self.copies]
        return "\n".join([head, *lines])

    def __rich__(self) -> "Table":
        from rich.table import Table

        table = Table("id", "kind", "equation", "reads", "writes", "level", "")
        for row in self._rows():
            table.add_row(*row)
        return table


def graph(f: Callable, *specs: Any, donate: int | Sequence[int] = ()) -> Graph:
    """Records the equations of `f(*specs)`; traces f, runs nothing.

    Calls of plain `jit` are opened. Loops, branches and functions with gradients of
    their own stay one node each. What `f` does beside its results is kept: references
    by the bytes they touch, callbacks and unknown primitives as barriers.

    Args:
      f: any traceable function; of a jitted one the donated arguments are taken over.
      specs: its arguments: arrays, `jax.ShapeDtypeStruct`, references, pytrees of them.
      donate: positions of arguments that may be overwritten, as in `jax.jit`.

    Returns:
      The graph.

    Raises:
      ValueError: `donate` names an argument that there is not.

    Example:
      >>> from jaxkern import runtime
      >>> x = jnp.ones((2, 8))
      >>> found = runtime.graph(lambda x: jnp.tanh(jaxkern.rms_norm(x)), x)
      >>> [node.name for node in found.nodes]
      ['rms_norm', 'tanh']
    """
    donate = (donate,) if isinstance(donate, int) else tuple(donate)
    if wrong := [k for k in donate if not -len(specs) <= k < len(specs)]:
        raise ValueError(f"graph: `donate` has {wrong}, got {len(specs)} arguments.")
    jaxpr, out_shape = jax.make_jaxpr(f, return_shape=True)(*specs)
    given = {k % len(specs) for k in donate}
    donated = [
        k in given for k, spec in enumerate(specs) for _ in jax.tree.leaves(spec)
    ]
    jaxpr, by_jit = without_outer_jit(jaxpr)
    donated = tuple(a or b for a, b in zip(donated, by_jit, strict=True))
    in_tree, out_tree = jax.tree.structure(specs), jax.tree.structure(out_shape)
    return make_graph(opened(jaxpr), donated, in_tree, out_tree)


def without_outer_jit(jaxpr: Jaxpr) -> tuple[Jaxpr, Sequence[bool]]:
    """A function that is one call of `jit`: without its donation, and what that is."""
    nothing = [False] * len(jaxpr.invars)
    if len(jaxpr.eqns) != 1 or jaxpr.eqns[0].primitive is not public_primitive("jit"):
        return jaxpr, nothing
    (eqn,) = jaxpr.eqns
    undonated = {**eqn.params, "donated_invars": (False,) * len(eqn.invars)}
    plain = eqn.replace(params=undonated)
    if not is_plain_jit(plain):
        return jaxpr, nothing
    by_jit = zip(eqn.invars, eqn.params["donated_invars"], strict=True)
    donated = {v for v, d in by_jit if d and not isinstance(v, Literal)}
    return jaxpr.replace(eqns=[plain]), [v in donated for v in jaxpr.invars]


def make_graph(jaxpr: Jaxpr, donated: Sequence[bool], in_tree, out_tree) -> Graph:
    ids = value_ids(jaxpr)
    found = buffers(jaxpr, donated)
    nodes = []
    for k, (eqn, access) in enumerate(zip(jaxpr.eqns, found.accesses, strict=True)):
        kind, barrier = classify(eqn)
        inputs = tuple(dict.fromkeys(ids[v] for v in variables(eqn.invars)))
        nodes.append(
            Node(
                k,
                eqn.primitive.name,
                kind,
                inputs,
                tuple(ids[v] for v in eqn.outvars),
                *access,
                barrier,
                is_view(eqn),
                eqn,
            )
        )
    return Graph(jaxpr, tuple(nodes), tuple(donated), found.copies, in_tree, out_tree)
