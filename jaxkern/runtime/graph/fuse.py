"""Find chains of equations by their plain spelling and replace them by fused operators.

A pattern is written as the function that it replaces:

    Pattern("swiglu", lambda gate, up: jax.nn.silu(gate) * up, jaxkern.swiglu)

The spelling is traced for the shape at hand and laid over the graph (`spelling.py`).
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.extend.core import Literal

from jaxkern.primitives.call import Backend, backend_context
from jaxkern.primitives.family import KernelPrimitive
from jaxkern.runtime.graph.equations import Equations, Traced
from jaxkern.runtime.graph.op_kind import Jaxpr, JaxprEqn, public_primitive
from jaxkern.runtime.graph.replay import opened
from jaxkern.runtime.graph.spelling import (
    CONSTANTS,
    Attempt,
    Layout,
    Refusal,
    is_float,
    last_primitive,
    traced,
)

NEAR = 0.55  # the share of a chain from which on it is worth a word


def never(**_: Any) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A chain of equations and the function that replaces it.

    Attributes:
      name: what it is called in reports.
      chain: the plain spelling. Its parameters are named for their shapes, d being the
        last dim of the first result: x, residual, scale, gate, up are `[..., d]`;
        weight, bias, next_weight `[d]`; eps and offset constants.
      fused: takes the same parameters by name, and the options of the jaxkern operators
        in the chain; returns the same results.
      unless: called with what `fused` is called with, but for each array the equation
        that makes it, or None for an argument, and the first result's `dtype`. Returns
        a reason not to fuse, or None.
    """

    name: str
    chain: Callable
    fused: Callable
    unless: Callable[..., str | None] = never


@dataclasses.dataclass(frozen=True)
class Fusion:
    """What was replaced: ids of the nodes in the graph that was fused.

    `inside` is the path of loops and branches, "" for the function itself; ids are then
    places in the body.
    """

    pattern: str
    nodes: tuple[int, ...]
    inside: str = ""

    def __str__(self) -> str:
        where = f" in {self.inside}" if self.inside else ""
        return f"{self.pattern} for nodes {', '.join(map(str, self.nodes))}{where}"


@dataclasses.dataclass(frozen=True)
class NotFused:
    """A chain that nearly matched a pattern; `node` is the last one of the chain."""

    pattern: str
    node: int
    reason: str
    inside: str = ""

    def __str__(self) -> str:
        where = f" in {self.inside}" if self.inside else ""
        return f"{self.pattern} at node {self.node}{where}: {self.reason}"


class Match(NamedTuple):
    """`eqns` replace those at `positions`, before the one at `place`."""

    positions: tuple[int, ...]
    eqns: Sequence[JaxprEqn]
    place: int


def fused(
    jaxpr: Jaxpr, patterns: Sequence[Pattern], ids: Sequence[int], inside: str = ""
) -> tuple[Jaxpr, tuple[Fusion, ...], tuple[NotFused, ...]]:
    """The jaxpr with every pattern applied in order, what was done and what was not.

    `ids` are those of the nodes of its equations.
    """
    eqns = [Traced(eqn, (id,)) for eqn, id in zip(jaxpr.eqns, ids, strict=True)]
    done: list[Fusion] = []
    for pattern in patterns:
        eqns, replaced = apply_pattern(jaxpr, eqns, pattern)
        done += [Fusion(pattern.name, nodes, inside) for nodes in replaced]
    standing = {nodes for _, nodes in eqns}
    latest = {fusion.nodes: fusion for fusion in done if fusion.nodes in standing}
    done = list(latest.values())
    nearest: dict[int, tuple[Refusal, str]] = {}
    for pattern in patterns:
        search = Search(jaxpr, eqns, pattern)
        for root in range(len(eqns)):
            found = search.at(root)
            if isinstance(found, Refusal) and found.share >= NEAR:
                best = nearest.get(root)
                if best is None or best[0].share < found.share:
                    nearest[root] = found, pattern.name
    missed = [
        NotFused(name, eqns[root].nodes[-1], found.reason, inside)
        for root, (found, name) in sorted(nearest.items())
    ]
    for k, (eqn, nodes) in enumerate(eqns):
        if nodes in latest:  # what a pattern put here stays as it is
            continue
        path = f"{inside}/{eqn.primitive.name} {nodes[-1]}".lstrip("/")
        eqn, done_inside, missed_inside = fused_inside(eqn, patterns, path)
        eqns[k] = Traced(eqn, nodes)
        done += done_inside
        missed += missed_inside
    return jaxpr.replace(eqns=[e.eqn for e in eqns]), tuple(done), tuple(missed)


def fused_inside(
    eqn: JaxprEqn, patterns: Sequence[Pattern], path: str
) -> tuple[JaxprEqn, list[Fusion], list[NotFused]]:
    """A loop, branch, jit or checkpoint with its bodies fused."""
    names = ("scan", "while", "cond", "jit", "remat")
    if eqn.primitive not in map(public_primitive, names):
        return eqn, [], []
    done, missed, params = [], [], dict(eqn.params)
    for key, value in eqn.params.items():
        bodies = value if isinstance(value, tuple) else (value,)
        if not bodies or not all(isinstance(body, core.Jaxpr) for body in bodies):
            continue
        new = []
        for body in bodies:
            plain = opened(body)
            ids = range(len(plain.eqns))
            made, fusions, misses = fused(plain, patterns, ids, path)
            new.append(made if fusions else body)
            done += fusions
            missed += misses
        params[key] = tuple(new) if isinstance(value, tuple) else new[0]
    return (eqn.replace(params=params) if done else eqn), done, missed


def apply_pattern(
    jaxpr: Jaxpr, eqns: list[Traced], pattern: Pattern
) -> tuple[list[Traced], list[tuple[int, ...]]]:
    """Replaces every chain of the pattern; gives the nodes of each."""
    search = Search(jaxpr, eqns, pattern)
    before: dict[int, list[Traced]] = {}
    taken: set[int] = set()
    replaced = []
    for root in range(len(eqns)):
        match = search.at(root)
        if isinstance(match, Match) and taken.isdisjoint(match.positions):
            nodes = tuple(sorted({n for k in match.positions for n in eqns[k].nodes}))
            before.setdefault(match.place, []).extend(
                Traced(eqn, nodes) for eqn in match.eqns
            )
            taken.update(match.positions)
            replaced.append(nodes)
    out = []
    for k, traced_eqn in enumerate(eqns):
        out += before.get(k, [])
        if k not in taken:
            out.append(traced_eqn)
    return out, replaced


class Search:
    """One pattern over the equations of one jaxpr."""

    def __init__(self, jaxpr: Jaxpr, eqns: list[Traced], pattern: Pattern):
        self.equations, self.pattern = Equations(jaxpr, eqns), pattern
        self.parameters = list(inspect.signature(pattern.chain).parameters)

    def at(self, root: int) -> Match | Refusal | None:
        """The match whose first result is made at position `root`, or why none is."""
        eqn = self.equations.at(root)
        if len(eqn.outvars) != 1:
            return None
        aval = eqn.outvars[0].aval
        if not getattr(aval, "shape", ()) or not is_float(aval.dtype):
            return None
        if eqn.primitive is not last_primitive(self.pattern.chain, aval.dtype):
            return None
        spelling = traced(self.pattern.chain, aval.shape, aval.dtype)
        if spelling is None or len(spelling.eqns) < 2:  # nothing to fuse
            return None
        attempt = Attempt(self.equations, self.parameters, spelling)
        layout = attempt.lay(spelling.outvars[0], eqn.outvars[0], Layout({}, {}))
        if layout is None:
            return attempt.refusal()
        found = self.replacement(root, spelling, layout)
        return Refusal(found, 1.0) if isinstance(found, str) else found

    def replacement(self, root: int, spelling: Jaxpr, layout: Layout) -> Match | str:
        """The equations that replace a chain, or why there are none."""
        maker, users = self.equations.maker, self.equations.users
        positions = sorted(layout.positions.values())
        chain = [self.equations.at(k) for k in positions]
        results = [layout.values[v] for v in spelling.outvars]
        if reason := self.read_inside(positions, results):
            return reason
        options = options_of(chain)
        if isinstance(options, str):
            return options
        operands = dict(
            zip(
                self.parameters,
                (layout.values[v] for v in spelling.invars),
                strict=True,
            )
        )
        for name in [n for n in operands if n in CONSTANTS]:
            options[name] = float(operands.pop(name).val)
        makers = {
            name: self.equations.at(maker[v]) if v in maker else None
            for name, v in operands.items()
        }
        if reason := self.pattern.unless(
            **makers, **options, dtype=results[0].aval.dtype
        ):
            return reason
        outside = [k for v in results for k in users.get(v, ()) if k not in positions]
        place = min([root, *outside])
        made_at = [maker.get(v, -1) for v in operands.values()]
        if any(k >= place or k in positions for k in made_at):
            return "an operand is computed inside the chain or from its result"
        eqns = equations_of(self.pattern, operands, options, results)
        return eqns if isinstance(eqns, str) else Match(tuple(positions), eqns, place)

    def read_inside(self, positions: list[int], results: list[Any]) -> str | None:
        """Who else reads a value that the fused operator does not give."""
        equations, users = self.equations, self.equations.users
        for k in positions:
            for v in equations.at(k).outvars:
                others = [u for u in users.get(v, ()) if u not in positions]
                if others and v not in results:
                    end = others[0] == len(equations.eqns)
                    who = "the function returns" if end else equations.name(others[0])
                    verb = "" if end else " reads"
                    inside = equations.name(k)
                    return f"{who}{verb} the result of {inside}, which is inside"
        return None


def options_of(eqns: Sequence[JaxprEqn]) -> dict[str, Any] | str:
    """The options that the jaxkern operators of a chain share, or how they differ."""
    found: dict[str, Any] = {}
    for eqn in eqns:
        if isinstance(eqn.primitive, KernelPrimitive):
            options = {k: v for k, v in eqn.params.items() if k != "call"}
            options["backend"] = eqn.params["call"].backend
            for key, value in options.items():
                if found.setdefault(key, value) != value:
                    return (
                        f"`{key}` is {found[key]} in one operator, {value} in another"
                    )
    return found


def equations_of(
    pattern: Pattern,
    operands: dict[str, Any],
    options: dict[str, Any],
    results: Sequence[Any],
) -> list[JaxprEqn] | str:
    """The equations of the fused operator between the variables of the chain.

    It runs on the backend that the operators of the chain asked for.
    """
    asked: Backend | None = options.pop("backend", None)

    def call(*values):
        with backend_context(asked or backend_context.value):
            return pattern.fused(**dict(zip(operands, values, strict=True)), **options)

    try:
        made: Jaxpr = jax.make_jaxpr(call)(*(v.aval for v in operands.values()))
    except (TypeError, ValueError) as error:
        return f"the fused operator refuses: {error}"
    own = {v for eqn in made.eqns for v in eqn.outvars}
    types, wanted = ([str(v.aval) for v in vs] for vs in (made.outvars, results))
    if types != wanted:
        return f"the fused operator gives {', '.join(types)}, not {', '.join(wanted)}"
    if made.consts or not own.issuperset(made.outvars):
        return "the fused operator gives a constant or an operand"
    names = dict(zip(made.invars, operands.values(), strict=True))
    names.update(zip(made.outvars, results, strict=True))

    def renamed(atoms):
        return [v if isinstance(v, Literal) else names.get(v, v) for v in atoms]

    return [
        eqn.replace(invars=renamed(eqn.invars), outvars=renamed(eqn.outvars))
        for eqn in made.eqns
    ]
