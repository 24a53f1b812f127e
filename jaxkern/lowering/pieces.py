"""A traced function in pieces, which XLA compiles beside each other.

    pieces = cut(traced, 4)
    InTurn(traced, pieces, [lower(piece).compile() for piece in pieces])(*arguments)

XLA compiles one program by one thread, but for what is assembled. Layers come one after
the other, and little is handed from one to the next: that is where a function is cut.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, Literal, Var


class Piece(NamedTuple):
    """Equations of a function, with the numbers of the values that it takes and gives.

    Values are the operands of the whole function, then what pieces before have given.
    """

    equations: list[Any]
    takes: list[Var]
    gives: list[Var]


def cut(jaxpr: Any, count: int) -> list[Piece]:
    """Up to `count` pieces of about as many equations each."""
    equations = sunk(jaxpr)
    places = places_of(equations, jaxpr, count)
    known = {*jaxpr.constvars, *jaxpr.invars}
    wanted = last_uses(equations, jaxpr)
    pieces = []
    for begin, end in zip([0, *places], [*places, len(equations)], strict=True):
        part = equations[begin:end]
        born = dict.fromkeys(v for eqn in part for v in eqn.outvars)
        used = dict.fromkeys(v for eqn in part for v in variables(eqn.invars))
        takes = [v for v in used if v not in born]
        gives = [v for v in born if wanted.get(v, -1) >= end]
        pieces.append(Piece(part, takes, gives))
        known.update(gives)
    return pieces


def variables(values: Sequence[Any]) -> list[Var]:
    return [v for v in values if not isinstance(v, Literal)]


def sunk(jaxpr: Any) -> list[Any]:
    """The equations, but those that read no array before their first use.

    An empty cache is made by the piece that fills it, and never copied.
    """
    free: dict[Var, Any] = {}
    order: list[Any] = []

    def place(v: Var) -> None:
        if eqn := free.pop(v, None):
            order.append(eqn)

    for eqn in jaxpr.eqns:
        if not variables(eqn.invars) and len(eqn.outvars) == 1 and not eqn.effects:
            free[eqn.outvars[0]] = eqn
            continue
        for v in variables(eqn.invars):
            place(v)
        order.append(eqn)
    for v in variables(jaxpr.outvars):
        place(v)
    return order


def last_uses(equations: list[Any], jaxpr: Any) -> dict[Var, int]:
    """The place of the last equation that reads a value; results are read behind all."""
    last = {v: i for i, eqn in enumerate(equations) for v in variables(eqn.invars)}
    return last | dict.fromkeys(variables(jaxpr.outvars), len(equations))


def places_of(equations: list[Any], jaxpr: Any, count: int) -> list[int]:
    """Where to cut: near equal lengths, where what is handed on is smallest."""
    last, end = last_uses(equations, jaxpr), len(equations)
    born = {v: i for i, eqn in enumerate(equations) for v in eqn.outvars}
    change = [0] * (end + 1)  # bytes that are handed on, as they grow and shrink
    for v, i in born.items():
        if last.get(v, -1) < end and last.get(v, -1) > i:  # results are given anyway
            size = v.aval.size * v.aval.dtype.itemsize + 1
            change[i + 1] += size
            change[last[v] + 1] -= size
    handed, so_far = [], 0
    for n in change:
        so_far += n
        handed.append(so_far)
    places = []
    for k in range(1, count):
        middle, reach = end * k // count, end // (4 * count)
        near = range(max(middle - reach, 1), min(middle + reach, end - 1) + 1)
        places.append(min(near, key=lambda i: (handed[i], abs(i - middle))))
    return sorted(set(places))


def jitted(piece: Piece, name: str) -> Any:
    """The piece as a jitted function of what it takes."""
    effects = set().union(*(eqn.effects for eqn in piece.equations))
    jaxpr = Jaxpr((), piece.takes, piece.gives, piece.equations, effects)

    def run(*arrays: Any) -> list[Any]:
        return eval_jaxpr(jaxpr, (), *arrays)

    run.__name__ = name
    return jax.jit(run, keep_unused=True)


def as_operands(piece: Piece, traced: Any, arguments: tuple) -> list[Any]:
    """Shapes of what a piece takes, where the function's own operands are."""
    given = dict(zip(traced.jaxpr.jaxpr.invars, jax.tree.leaves(arguments), strict=True))
    return [
        jax.ShapeDtypeStruct(
            v.aval.shape, v.aval.dtype, sharding=getattr(given.get(v), "sharding", None)
        )
        for v in piece.takes
    ]


class InTurn:
    """The executables of all pieces, called as the whole function would be."""

    def __init__(self, traced: Any, pieces: list[Piece], executables: list[Any]):
        closed = traced.jaxpr
        jaxpr = getattr(closed, "jaxpr", closed)
        self.consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self.jaxpr, self.pieces, self.executables = jaxpr, pieces, executables
        self.results = jax.tree.structure(traced.out_info)
        self.last = {}
        for i, piece in enumerate(pieces):
            self.last |= dict.fromkeys(piece.takes, i)

    def __call__(self, *arguments: Any) -> Any:
        values = dict(zip(self.jaxpr.invars, jax.tree.leaves(arguments), strict=True))
        values |= self.consts
        for piece, run in zip(self.pieces, self.executables, strict=True):
            given = run(*[values[v] for v in piece.takes])
            values |= zip(piece.gives, given, strict=True)
        read = [v.val if isinstance(v, Literal) else values[v] for v in self.jaxpr.outvars]
        return jax.tree.unflatten(self.results, read)
