"""Products with MXFP4, NVFP4 and MXFP8: ours, the reference, XLA with bfloat16.

    python -m benchmarks microscaled [--kind "mxfp4"] [--rows 1] [--shape 8x512]

See int_matmul.
"""

import functools

from benchmarks.quant.int_matmul import run
from jaxkern import quantize_microscaled

KINDS = {
    format: functools.partial(quantize_microscaled, format=format)
    for format in ("mxfp4", "nvfp4", "mxfp8")
}


def main(arguments: list[str]) -> int:
    return run("microscaled", __doc__, KINDS, arguments)
