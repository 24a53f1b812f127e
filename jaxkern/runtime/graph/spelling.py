"""Lay the traced spelling of a chain over the equations of a graph.

From the result upwards: the same primitives, the same parameters, the same constants;
sums and products also with their operands swapped. Custom derivatives must be the same
program.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxkern.primitives.family import KernelPrimitive, Tangent
from jaxkern.runtime.graph.equations import Equations
from jaxkern.runtime.graph.op_kind import Jaxpr, JaxprEqn, public_primitive
from jaxkern.runtime.graph.replay import opened, step_of

ROWS = ("x", "residual", "scale", "gate", "up")  # of the result's shape `[..., d]`
VECTORS = ("weight", "bias", "next_weight")  # `[d]`
CONSTANTS = ("eps", "offset")  # numbers that the chain has as constants
COMMUTATIVE = ("add", "mul", "max", "min")
# What every chain has: a chain of these alone is near to nothing.
COMMON = (*COMMUTATIVE, "sub", "div", "broadcast_in_dim", "convert_element_type")


class Refusal(NamedTuple):
    """Why there is no match, and which share of the chain there is."""

    reason: str
    share: float


class Layout(NamedTuple):
    """A spelling laid over a graph: its variables, and its equations' positions."""

    values: dict[Any, Any]
    positions: dict[int, int]


class Attempt:
    """One attempt to lay a spelling over a graph; remembers how far it came.

    `parameters` are the names of the spelling's arguments.
    """

    def __init__(self, equations: Equations, parameters: list[str], spelling: Jaxpr):
        self.equations, self.parameters = equations, parameters
        self.spelling = spelling
        self.spelled_by = {
            v: k for k, eqn in enumerate(spelling.eqns) for v in eqn.outvars
        }
        self.best, self.reason = Layout({}, {}), ""

    def refusal(self) -> Refusal | None:
        """Why it failed; None where there was nothing but sums and products."""
        laid = [self.spelling.eqns[k].primitive.name for k in self.best.positions]
        if all(name in COMMON for name in laid):
            return None
        return Refusal(self.reason, len(laid) / len(self.spelling.eqns))

    def fail(self, layout: Layout, reason: str) -> None:
        if len(layout.positions) > len(self.best.positions):
            self.best, self.reason = layout, reason

    def lay(self, spelled: Any, v: Any, layout: Layout) -> Layout | None:
        """`layout` with a variable of the spelling laid on one of the graph."""
        if isinstance(spelled, Literal):
            if isinstance(v, Literal) and same_literal(spelled, v):
                return layout
            return self.fail(layout, f"{spelled.val} is {v} in place of the pattern's")
        if spelled in layout.values:
            old = layout.values[spelled]
            both = isinstance(old, Literal) and isinstance(v, Literal)
            if old is v or (both and same_literal(old, v)):
                return layout
            return self.fail(layout, "two values stand where the pattern has one")
        if spelled in self.spelling.invars:
            position: int = self.spelling.invars.index(spelled)
            name = self.parameters[position]
            if reason := misfit(name, spelled.aval, v):
                return self.fail(layout, reason)
            return layout._replace(values={**layout.values, spelled: v})
        return self.lay_equation(spelled, v, layout)

    def lay_equation(self, spelled: Any, v: Any, layout: Layout) -> Layout | None:
        number = self.spelled_by[spelled]
        wanted = self.spelling.eqns[number]
        if isinstance(v, Literal) or v not in self.equations.maker:
            what = f"the constant {v.val}" if isinstance(v, Literal) else "an argument"
            name = wanted.primitive.name
            return self.fail(layout, f"{what} stands where the pattern has {name}")
        k = self.equations.maker[v]
        eqn = self.equations.at(k)
        if layout.positions.get(number, k) != k:
            return self.fail(layout, "two equations stand where the pattern has one")
        if reason := difference(wanted, eqn):
            return self.fail(layout, f"{self.equations.name(k)} {reason}")
        if wanted.outvars.index(spelled) != eqn.outvars.index(v):
            return self.fail(
                layout, f"another result of {self.equations.name(k)} is meant"
            )
        layout = Layout({**layout.values, spelled: v}, {**layout.positions, number: k})
        orders = [eqn.invars]
        if eqn.primitive.name in COMMUTATIVE:
            orders.append(eqn.invars[::-1])
        for operands in orders:
            found: Layout | None = layout
            for inner, operand in zip(wanted.invars, operands, strict=True):
                found = found and self.lay(inner, operand, found)
            if found:
                return found
        return None


@functools.lru_cache(maxsize=4096)
def traced(chain: Callable, shape: tuple[int, ...], dtype: Any) -> Jaxpr | None:
    """The spelling for a result of this shape; None where it gives another one."""
    shapes = {
        **dict.fromkeys(ROWS, shape),
        **dict.fromkeys(VECTORS, shape[-1:]),
        **dict.fromkeys(CONSTANTS, ()),
    }
    names = list(inspect.signature(chain).parameters)
    if unknown := [name for name in names if name not in shapes]:
        raise ValueError(
            f"Pattern: parameters of `chain` are of {', '.join(shapes)}, got {unknown}."
        )
    specs = [jax.ShapeDtypeStruct(shapes[name], dtype) for name in names]
    spelling = opened(jax.make_jaxpr(chain)(*specs))
    first = spelling.outvars[0].aval
    fits = (first.shape, first.dtype) == (shape, dtype)
    return spelling if fits else None


@functools.lru_cache(maxsize=4096)
def last_primitive(chain: Callable, dtype: Any) -> Any:
    """The primitive that makes the first result of a spelling, whatever its shape."""
    spelling = traced(chain, (2, 3), dtype)
    if spelling is None:
        return None
    result = spelling.outvars[0]
    return next((e.primitive for e in spelling.eqns if result in e.outvars), None)


def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def misfit(name: str, wanted: Any, v: Any) -> str | None:
    """Why a value cannot be this parameter."""
    if name in CONSTANTS:
        constant = isinstance(v, Literal) and not np.shape(v.val)
        return None if constant else f"`{name}` is computed, not a constant"
    if isinstance(v, Literal):
        return f"`{name}` is the constant {v.val}"
    if v.aval.shape != wanted.shape:
        return f"`{name}` has shape {v.aval.shape}, the pattern's has {wanted.shape}"
    return None


def same_literal(a: Literal, b: Literal) -> bool:
    return str(a.aval) == str(b.aval) and np.array_equal(a.val, b.val)


def difference(wanted: JaxprEqn, eqn: JaxprEqn) -> str | None:
    """How an equation differs from that of a spelling, its operands aside."""
    if wanted.primitive is not eqn.primitive:
        return f"stands where the pattern has {wanted.primitive.name}"
    if eqn.effects:
        return "has effects"
    if isinstance(eqn.primitive, KernelPrimitive | Tangent):
        call = eqn.params["call"]
        if call.vmaps:
            return "was recorded under vmap"
        absent = wanted.params["call"].absent
        return None if call.absent == absent else "has other optional operands"
    if len(wanted.invars) != len(eqn.invars):
        return "has another number of operands"
    if eqn.primitive is public_primitive("custom_jvp_call"):
        program = derivative_program(eqn)
        same = program is not None and program == derivative_program(wanted)
        return None if same else "has another function or derivative"
    for key, value in wanted.params.items():
        other = eqn.params.get(key)
        if value is not other and value != other:
            return f"has {key}={other} where the pattern has {value}"
    return None


def derivative_program(eqn: JaxprEqn) -> str | None:
    """A custom_jvp with its derivative as text; None if it holds arrays."""
    alone = step_of(eqn.params["call_jaxpr"], eqn)
    avals = tuple(v.aval for v in alone.invars)

    def both(primals, tangents):
        return jax.jvp(alone.call, primals, tangents)

    program = jax.make_jaxpr(both)(avals, avals)
    return None if program.consts else str(program)
