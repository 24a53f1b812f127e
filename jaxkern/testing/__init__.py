"""For tests and measurements of operators, this library's own and those of others.

`check_op` runs on an op all checks that every operator here passes; `case` and the
draws (`f32(4, 8)`, `i32`, `uniform`, ...) say on which operands and options.
`benchmark` times a function beside what its device can do; `autotune` times what each
op in it can run, and writes the table that `jaxkern.tuned` reads.
`jaxkern.runtime.testing` has failures on demand and float64 oracles.
"""

from jaxkern.testing.autotune import autotune
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
from jaxkern.testing.tuning import TunedCall, Tuning

__all__ = [
    "Case",
    "Check",
    "Measurement",
    "Spec",
    "TunedCall",
    "Tuning",
    "autotune",
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
