"""A traced function in pieces, which XLA compiles beside each other.

    if found := cut(traced, arguments, 3):
        order, pieces = found
        executables = [one.lower(*shapes).compile() for one, shapes in pieces]
        in_pieces = InPieces(order, executables, jax.tree.structure(traced.out_info))
        in_pieces(*arguments)      # as the whole function is called

XLA takes a program through its passes in one thread. The layers of a model come one
after the other, and one hands little to the next: there the function is cut. The host
asks for all pieces at once, so the device does not wait between them.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Literal, Var

EQUATIONS = 200  # of a function that is worth cutting: a few layers


class Order(NamedTuple):
    """Which values each piece takes and gives, by number.

    First come the operands of the whole function, as they lie in its arguments, then
    what the pieces give, in turn.
    """

    takes: tuple[tuple[int, ...], ...]
    gives: tuple[tuple[int, ...], ...]
    results: tuple[int, ...]


class InPieces:
    """The executables of all pieces, called as one; `results` is their tree."""

    def __init__(self, order: Order, executables: Sequence[Any], results: Any) -> None:
        self.order, self.executables, self.results = order, [*executables], results

    def __call__(self, *arguments: Any) -> Any:
        values = dict(enumerate(jax.tree.leaves(arguments)))
        takes, gives, results = self.order
        for run, taken, given in zip(self.executables, takes, gives, strict=True):
            found = run(*[values[i] for i in taken])
            values.update(zip(given, found, strict=True))
        return jax.tree.unflatten(self.results, [values[i] for i in results])

    def as_text(self) -> str:
        """The optimised HLO of all pieces, in turn."""
        return "\n\n".join(one.as_text() for one in self.executables)


Executable = jax.stages.Compiled | InPieces


class Piece(NamedTuple):
    """A jitted function of a list of arrays, and what it is lowered for."""

    function: Any
    shapes: list[jax.ShapeDtypeStruct]


def cut(traced: Any, arguments: tuple, count: int) -> tuple[Order, list[Piece]] | None:
    """Up to `count` pieces of about as many equations each.

    None for a function that is short, has effects, is on several devices, overwrites
    an operand, or has a result that is no operand and that no equation makes.
    """
    jaxpr = traced.jaxpr.jaxpr
    operands = jax.tree.leaves(arguments)
    if count < 2 or len(jaxpr.eqns) < EQUATIONS or jaxpr.effects:
        return None
    if any(x.donated for x in jax.tree.leaves(traced.args_info)):
        return None
    if any(len(x.device_set) > 1 for x in map(sharding_of, operands) if x):
        return None
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    if any(isinstance(v, Literal) for v in jaxpr.outvars):
        return None
    if not {*jaxpr.invars, *made}.issuperset(jaxpr.outvars):
        return None
    return in_order(traced, operands, sunk(jaxpr), count)


def sharding_of(operand: Any) -> jax.sharding.Sharding | None:
    return getattr(operand, "sharding", None)  # NumPy's arrays and numbers have none


def in_order(
    traced: Any, operands: list[Any], equations: list[Any], count: int
) -> tuple[Order, list[Piece]]:
    jaxpr = traced.jaxpr.jaxpr
    last, consts = last_uses(equations, jaxpr), set(jaxpr.constvars)
    number = {v: i for i, v in enumerate(jaxpr.invars)}
    where = dict(zip(jaxpr.invars, operands, strict=True))
    takes, gives, pieces, copies, total = [], [], [], {}, len(number)
    places = [0, *places_of(equations, jaxpr, count), len(equations)]
    for begin, end in itertools.pairwise(places):
        part = equations[begin:end]
        born = dict.fromkeys(v for eqn in part for v in eqn.outvars)
        used = dict.fromkeys(v for eqn in part for v in variables(eqn.invars))
        passed = [v for v in jaxpr.outvars if v in where and end == len(equations)]
        used |= dict.fromkeys(passed)  # an operand as a result, which is copied
        taken = [v for v in used if v not in born and v not in consts]
        takes.append(tuple(number[v] for v in taken))
        born |= dict.fromkeys(passed)
        given = [v for v in born if last.get(v, -1) >= end]
        number |= {v: total + i for i, v in enumerate(given)}
        for v in repeated(jaxpr.outvars):
            if v in born:
                copies.setdefault(v, []).append(total + len(given))
                given.append(v)
        gives.append(tuple(range(total, total + len(given))))
        total += len(given)
        name = f"{traced.fun_name}_{len(pieces) + 1}"
        function = jitted(name, traced.jaxpr, part, taken, given)
        pieces.append(Piece(function, [shape_of(v, where.get(v)) for v in taken]))
    results = [copies[v].pop() if copies.get(v) else number[v] for v in jaxpr.outvars]
    return Order(tuple(takes), tuple(gives), tuple(results)), pieces


def repeated(results: Sequence[Var]) -> list[Var]:
    """Each result that stands there again: who deletes one array keeps the other."""
    return [v for i, v in enumerate(results) if v in results[:i]]


def jitted(name: str, closed: Any, part: list, taken: list, given: list) -> Any:
    """Some equations of a function as a function of what they take."""
    jaxpr = closed.jaxpr.replace(invars=taken, outvars=given, eqns=part)

    def run(*arrays: Any) -> list[Any]:
        return eval_jaxpr(jaxpr, closed.consts, *arrays)

    run.__name__ = name
    return jax.jit(run)


def shape_of(v: Var, operand: Any) -> jax.ShapeDtypeStruct:
    """Of a value, and where it lies if that is known."""
    aval: Any = v.aval
    sharding = sharding_of(operand)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def variables(values: Sequence[Any]) -> list[Var]:
    return [v for v in values if not isinstance(v, Literal)]


def sunk(jaxpr: Any) -> list[Any]:
    """The equations, but those that read no array stand before their first use.

    So the piece that fills an empty cache makes it, and nothing copies it.
    """
    free: dict[Var, Any] = {}
    order: list[Any] = []
    for eqn in jaxpr.eqns:
        read = variables(eqn.invars)
        if not read and len(eqn.outvars) == 1:
            free[eqn.outvars[0]] = eqn
            continue
        order += [free.pop(v) for v in dict.fromkeys(read) if v in free]
        order.append(eqn)
    return order + [free.pop(v) for v in dict.fromkeys(jaxpr.outvars) if v in free]


def last_uses(equations: list[Any], jaxpr: Any) -> dict[Var, int]:
    """Where a value is read last: results behind all equations."""
    last = {v: i for i, eqn in enumerate(equations) for v in variables(eqn.invars)}
    return last | dict.fromkeys(jaxpr.outvars, len(equations))


def places_of(equations: list[Any], jaxpr: Any, count: int) -> list[int]:
    """Where to cut: into nearly equal lengths, where the fewest bytes are handed on."""
    end, last = len(equations), last_uses(equations, jaxpr)
    grows = [0] * (end + 1)  # by what they are handed on; results are given anyway
    for i, eqn in enumerate(equations):
        for v in eqn.outvars:
            if i < last.get(v, -1) < end:
                grows[i + 1] += num_bytes(v)
                grows[last[v] + 1] -= num_bytes(v)
    handed = [sum(grows[: i + 1]) for i in range(end + 1)]
    places, reach = set(), end // (4 * count)
    for k in range(1, count):
        middle = end * k // count
        near = range(middle - reach, middle + reach + 1)
        places.add(min(near, key=lambda i: (handed[i], abs(i - middle))))
    return sorted(places)


def num_bytes(v: Var) -> int:
    aval: Any = v.aval
    return aval.size * getattr(aval.dtype, "itemsize", 8) + 1  # keys have no size
