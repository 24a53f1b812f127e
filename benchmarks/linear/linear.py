"""Products of a few activations with weights of bfloat16: ours and XLA.

python -m benchmarks linear [--rows 1] [--shape 8192x4096] [--out DIR]
"""

import functools

import jaxkern
from benchmarks._records import OURS
from benchmarks._rows import Rows
from benchmarks.quant.interleaved_matmul import (
    cases,
    compare,
    dense,
    keep,
    options_of,
)


def by(name, x, w):
    with jaxkern.backend(name):
        return jaxkern.linear(x, w)


def main(arguments: list[str]) -> int:
    options = options_of("linear", __doc__, arguments)
    if options is None:
        return 2
    kept = Rows("linear", "one activation, bfloat16", "us", options.out)
    for f, d, rows, x in cases(options):
        given = [(x, w) for w in dense(f, d)]
        calls = {
            name: (functools.partial(by, backend), given)
            for name, backend in (("ours", "triton"), ("XLA", "xla"))
        }
        size = given[0][1].nbytes
        seconds = compare(f"{f}x{d} M={rows}", calls, size)
        keep(kept, ("", f, d, rows), {"ours": OURS}, seconds, size)
    return 0
