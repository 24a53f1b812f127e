"""dq of attention on Hopper, and dS: programs hold queries and walk over keys."""

from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from jaxkern.pallas.attention.attention.gradient_blocks import CONSUMERS
from jaxkern.pallas.attention.attention.problem import Problem
from jaxkern.pallas.attention.attention.queries_consumer import differentiate
from jaxkern.pallas.attention.attention.queries_loader import load
from jaxkern.pallas.attention.attention.queries_tiles import (
    Barriers,
    Buffers,
    Operands,
    Program,
)


def queries_kernel(*operands: Any, c: Problem, interpret: bool):
    """dq of c.block_q queries, 64 in each consumer, and dS of their pairs if wanted.

        P = exp(S - lse),  dS = P (dout V^T - delta),  dq = scale dS K

    With `out`, delta is rowsum(dout out) more than the operand `delta`, and written
    too. What rounding took from `out` goes from memory to registers before the rest is
    there. One warpgroup loads, CONSUMERS differentiate and write their queries.

    `operands` are those of `Operands`, then buffers and barriers.
    """
    *arrays, in_shared, barriers = operands
    refs, buffers = Operands(*arrays), Buffers(*in_shared)
    barriers = Barriers(*barriers)
    me = lax.axis_index("warpgroup")
    program = Program(lax.axis_index("program"), refs, c)

    @pl.when(me == CONSUMERS)
    def loads():
        load(program, buffers, barriers)

    @pl.when(me < CONSUMERS)
    def computes():
        differentiate(program, buffers, barriers, me, interpret)
