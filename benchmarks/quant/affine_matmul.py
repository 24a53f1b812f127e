"""Products with MLX's affine format: ours, the reference, XLA with bfloat16.

    python -m benchmarks affine_matmul [--kind "4 bits"] [--rows 1] [--shape 8x512]

See int_matmul.
"""

import functools

from benchmarks.quant.int_matmul import run
from jaxkern import quantize_affine

KINDS = {
    f"{bits} bits": functools.partial(quantize_affine, bits=bits, group_size=64)
    for bits in (2, 3, 4, 5, 6, 8)
}


def main(arguments: list[str]) -> int:
    return run("affine_matmul", __doc__, KINDS, arguments)
