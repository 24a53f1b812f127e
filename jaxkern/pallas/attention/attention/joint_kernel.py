"""The kernel of five products: dq, dk and dv of 128 keys and the queries that see them.

joint_bwd.py has the idea. No barrier of a whole warpgroup is in the loop: threads write
what they hold, and what waits for it counts all of them.
"""

from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from jaxkern.pallas.attention.attention.gradient_blocks import CONSUMERS
from jaxkern.pallas.attention.attention.joint_consumer import Consumer
from jaxkern.pallas.attention.attention.joint_loader import add, load
from jaxkern.pallas.attention.attention.joint_tiles import Program
from jaxkern.pallas.attention.attention.problem import Problem


def joint_kernel(*operands: Any, c: Problem, interpret: bool):
    """dk and dv of KEYS keys, 64 in each consumer, and what they add to dq.

    `operands` are those of `Operands`, then buffers and barriers. CONSUMERS
    differentiate, one warpgroup loads and one adds dq to what is in memory.
    """
    me = lax.axis_index("warpgroup")
    program = Program(lax.axis_index("program"), operands, c, interpret)

    @pl.when(me == CONSUMERS)
    def loads():
        load(program)

    @pl.when(me == CONSUMERS + 1)
    def adds():
        add(program)

    @pl.when(me < CONSUMERS)
    def computes():
        Consumer(program, me).differentiate()
