"""For tests of operators, this library's own and those of others.

`check_op` runs on an op all checks that every operator here passes; `case` and the
draws (`f32(4, 8)`, `i32`, `uniform`, ...) say on which operands and options.
`jaxkern.runtime.testing` has failures on demand and float64 oracles.
"""

from jaxkern.testing.check_op import Check, check_op, checks_of
from jaxkern.testing.checks import (
    Case,
    Spec,
    bf16,
    boolean,
    case,
    f16,
    f32,
    f64,
    i32,
    u8,
    uniform,
)

__all__ = [
    "Case",
    "Check",
    "Spec",
    "bf16",
    "boolean",
    "case",
    "check_op",
    "checks_of",
    "f16",
    "f32",
    "f64",
    "i32",
    "u8",
    "uniform",
]
