"""Products with 8-bit floats with block scales: ours, the reference, XLA with bfloat16.

    python -m benchmarks fp8 [--kind "by row"] [--rows 1] [--shape 8x512]

See int_matmul.
"""

import functools

from benchmarks.quant.int_matmul import run
from jaxkern import quantize_fp8

KINDS = {
    "128 by 128": functools.partial(quantize_fp8, block=(128, 128)),
    "by row": functools.partial(quantize_fp8, block=(1, 0)),
}


def main(arguments: list[str]) -> int:
    return run("fp8", __doc__, KINDS, arguments)
