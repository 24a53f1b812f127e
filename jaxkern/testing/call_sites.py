"""The calls of ops in a function, each with the operands that it has there.

Shapes alone do not say what a call works on: ids, lengths and positions must be valid,
and times depend on them. So the function is evaluated as a whole, and what enters each
call comes out beside its results. A body of a loop or a branch is entered once, with
what a first step finds.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxkern.lowering.chained import INLINED
from jaxkern.lowering.explain import bodies, equations
from jaxkern.lowering.measured import call_key
from jaxkern.primitives.call import Backend, Call
from jaxkern.primitives.family import KernelPrimitive
from jaxkern.runtime.graph.replay import Step, run, step_of

CALLED = INLINED | {"remat2": "jaxpr", "checkpoint": "jaxpr", "chained": "jaxpr"}


@dataclasses.dataclass(frozen=True)
class CallSite:
    """Calls of one op with equal keys.

    Attributes:
      key: of these calls in a table of measurements.
      p: the op.
      call: what their equations record, without the backend.
      static: their options.
      sites: how many equations there are.
      operands: of the first of them.
    """

    key: str
    p: KernelPrimitive
    call: Call
    static: dict[str, Any]
    sites: int
    operands: Sequence[jax.Array]


def call_sites(f: Callable, arrays: Any) -> tuple[list[CallSite], list[str]]:
    """The calls in `f(arrays)` that may run what "auto" chooses, in their order.

    Beside them the keys of those that are not entered, such as inside of shard_map.
    """
    jaxpr: Any = jax.make_jaxpr(f)(arrays)
    counts: dict[str, int] = {}
    for eqn in equations(jaxpr):
        if follows_auto(eqn):
            key = key_of(eqn)
            counts[key] = counts.get(key, 0) + 1
    entered: dict[str, Any] = {}

    def operands_of_calls(arrays: Any) -> dict[str, list]:
        inside = Entering()
        inside.run(jaxpr, jax.tree.leaves(arrays))
        entered.update(inside.equations)
        return inside.operands

    operands = jax.jit(operands_of_calls)(arrays)
    found = [
        CallSite(key, eqn.primitive, *recorded(eqn), counts[key], operands[key])
        for key, eqn in entered.items()
    ]
    return found, [key for key in counts if key not in entered]


def follows_auto(eqn: Any) -> bool:
    """Whether its implementation is chosen, and not named by the user."""
    is_op = isinstance(eqn.primitive, KernelPrimitive)
    return is_op and eqn.params["call"].backend.name == "auto"


def recorded(eqn: Any) -> tuple[Call, dict[str, Any]]:
    params = dict(eqn.params)
    return dataclasses.replace(params.pop("call"), backend=Backend()), params


def key_of(eqn: Any) -> str:
    return call_key(eqn.primitive, [v.aval for v in eqn.invars], *recorded(eqn))


class Entering:
    """Evaluates a jaxpr, and keeps what the first call with each key was given."""

    def __init__(self) -> None:
        self.equations: dict[str, Any] = {}
        self.operands: dict[str, list] = {}

    def run(self, jaxpr: Any, args: Sequence[Any]) -> list:
        return run(jaxpr, [self.step(jaxpr, eqn) for eqn in jaxpr.eqns], args)

    def step(self, jaxpr: Any, eqn: Any) -> Step:
        if follows_auto(eqn):
            return Step(eqn.invars, eqn.outvars, lambda *x: self.call(eqn, x))
        name = eqn.primitive.name
        has_calls = any(True for body in bodies(eqn) for _ in equations(body))
        if has_calls and name in CALLED:
            body = eqn.params[CALLED[name]]
            return Step(eqn.invars, eqn.outvars, lambda *x: self.run(body, x))
        if not has_calls or name not in ("scan", "while", "cond"):
            return step_of(jaxpr, eqn)

        def entered(*values: Any) -> list:
            for body, args in first_steps(eqn, values):
                self.run(body, args)
            return eqn.primitive.bind(*values, **eqn.params)

        return Step(eqn.invars, eqn.outvars, entered)

    def call(self, eqn: Any, operands: Sequence[Any]) -> list:
        key = key_of(eqn)
        if key not in self.equations:
            self.equations[key], self.operands[key] = eqn, list(operands)
        return eqn.primitive.bind(*operands, **eqn.params)


def first_steps(eqn: Any, values: Sequence[Any]) -> Iterator[tuple[Any, list]]:
    """The bodies of a loop or of branches, with what they get first."""
    params = eqn.params
    match eqn.primitive.name:
        case "scan" if params["length"]:
            body, at = params["jaxpr"], -1 if params["reverse"] else 0
            yield (
                body,
                [  # xs have one dim more than what a step gets of them
                    x[at] if jax.typeof(x).ndim > v.aval.ndim else x
                    for x, v in zip(values, body.invars, strict=True)
                ],
            )
        case "while":
            n, m = params["cond_nconsts"], params["body_nconsts"]
            yield params["cond_jaxpr"], [*values[:n], *values[n + m :]]
            yield params["body_jaxpr"], list(values[n:])
        case "cond":
            for body in params["branches"]:
                yield body, list(values[1:])
