"""Jaxprs as functions: run one equation, or open the calls of `jit`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import eval_jaxpr
from jax.extend.core import DropVar, Literal

from jaxkern.runtime.graph.op_kind import Jaxpr, JaxprEqn, public_primitive


class Step(NamedTuple):
    """A piece of a replay: `call` takes the values of `invars`, gives the `outvars`."""

    invars: Sequence[Any]
    outvars: Sequence[Any]
    call: Callable[..., Sequence[Any]]


def step_of(jaxpr: Jaxpr, eqn: JaxprEqn) -> Step:
    """The step that runs one equation as it stands, with its name stack and context."""
    invars = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))
    outvars = [v for v in eqn.outvars if not isinstance(v, DropVar)]
    alone = jaxpr.replace(
        constvars=(), invars=invars, outvars=outvars, eqns=(eqn,), effects=eqn.effects
    )
    return Step(invars, outvars, lambda *values: list(eval_jaxpr(alone, (), *values)))


def run(jaxpr: Jaxpr, steps: Sequence[Step], args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr whose equations are replaced by `steps`."""
    names = [*jaxpr.constvars, *jaxpr.invars]
    values = dict(zip(names, [*jaxpr.consts, *args], strict=True))

    def read(v):
        return v.val if isinstance(v, Literal) else values[v]

    for step in steps:
        results = step.call(*map(read, step.invars))
        values.update(zip(step.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def retrace(jaxpr: Jaxpr, steps: Sequence[Step]) -> Jaxpr:
    """The jaxpr of `run` on the same arguments."""
    avals = [v.aval for v in jaxpr.invars]
    return jax.make_jaxpr(lambda *args: run(jaxpr, steps, args))(*avals)


def opened(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with the body of each plain `jit` in the place of its call."""
    if not any(is_plain_jit(eqn) for eqn in jaxpr.eqns):
        return jaxpr
    return retrace(jaxpr, opened_steps(jaxpr))


def opened_steps(jaxpr: Jaxpr) -> list[Step]:
    return [
        opened_call(eqn) if is_plain_jit(eqn) else step_of(jaxpr, eqn)
        for eqn in jaxpr.eqns
    ]


def opened_call(eqn: JaxprEqn) -> Step:
    body = eqn.params["jaxpr"]
    steps = opened_steps(body)
    return Step(eqn.invars, eqn.outvars, lambda *values: run(body, steps, values))


def is_plain_jit(eqn: JaxprEqn) -> bool:
    """Is it a call of `jit` that neither places, lays out nor donates anything?"""
    if eqn.primitive is not public_primitive("jit"):
        return False
    params = eqn.params
    shardings = (*params["in_shardings"], *params["out_shardings"])
    layouts = (*params["in_layouts"], *params["out_layouts"])
    return not (
        any(isinstance(x, jax.sharding.Sharding) for x in shardings)
        or any(x is not None for x in layouts)
        or any(params["donated_invars"])
        or params["compiler_options_kvs"]
    )
