"""dk and dv of attention on Hopper: programs hold keys and walk over queries."""

from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from jaxkern.pallas.attention.attention.gradient_blocks import CONSUMERS
from jaxkern.pallas.attention.attention.keys_consumer import differentiate
from jaxkern.pallas.attention.attention.keys_loader import load
from jaxkern.pallas.attention.attention.keys_tiles import Program
from jaxkern.pallas.attention.attention.problem import Problem


def keys_kernel(
    *operands: Any, c: Problem, interpret: bool, whole: int, in_turn: bool = False
):
    """dk and dv of KEYS keys, 64 in each consumer; behind the first `whole` programs of
    half of them, as Share has it.

        P = exp(S - lse),  dv = P^T dout,  dS = P (dP - delta),  dk = scale dS^T q

    One warpgroup loads, CONSUMERS differentiate and write their keys.

    `operands` are those of `Operands`, then buffers and barriers. `in_turn`: dP is
    computed when P has been rounded and dv added to, as registers have no room for
    both. P is then scaled as in wide_keys_kernel.
    """
    me = lax.axis_index("warpgroup")
    program = Program(lax.axis_index("program"), whole, operands, c, interpret)

    @pl.when(me == CONSUMERS)
    def loads():
        load(program)

    @pl.when(me < CONSUMERS)
    def computes():
        differentiate(program, me, in_turn)
