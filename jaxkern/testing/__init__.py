"""For tests and measurements of operators, this library's own and those of others.

`check_op` runs on an op all checks that every operator here passes; `case` and the
draws (`f32(4, 8)`, `i32`, `uniform`, ...) say on which operands and options.
`benchmark` times a function beside what its device can do.
`jaxkern.runtime.testing` has failures on demand and float64 oracles.
"""

from jaxkern.testing.benchmark import Measurement, benchmark
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
    "Measurement",
    "Spec",
    "benchmark",
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
