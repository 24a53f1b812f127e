"""Products with the norm before, and the gate or the addition after: ours and XLA.

    python -m benchmarks fused_products [--qtype Q4_K] [--rows 1] [--shape 8192x4096]

XLA's are the same operators with weights of bfloat16.
"""

import functools

import jax.numpy as jnp

import jaxkern
from benchmarks.quant.interleaved_matmul import (
    cases,
    compare,
    dense,
    options_of,
    packed,
)
from jaxkern import (
    quantized_matmul_add,
    quantized_rms_norm_matmul,
    quantized_swiglu,
)


def by_xla(f, *operands):
    with jaxkern.backend("xla"):
        return f(*operands)


def normed(x, norm, w):
    return quantized_rms_norm_matmul(x, norm, w)


def gated(x, norm, w):
    return quantized_swiglu(x, w, norm)


def added(x, residual, w):
    return quantized_matmul_add(x, w, residual)


def main(arguments: list[str]) -> int:
    options = options_of("fused_products", __doc__, arguments)
    if options is None:
        return 2
    for f, d, rows, x in cases(options):
        norm, residual = jnp.ones(d, x.dtype), jnp.ones((rows, f), x.dtype)
        plain = dense(f, d)
        weights = {"bfloat16": plain} | {
            q: packed(q, f, d) for q in options.qtype.split(",")
        }
        for op, other in ((normed, norm), (gated, norm), (added, residual)):
            xla = functools.partial(by_xla, op), [(x, other, w) for w in plain]
            for kind, ws in weights.items():
                calls = {
                    "ours": (op, [(x, other, w) for w in ws]),
                    "bfloat16 by XLA": xla,
                }
                title = f"{op.__name__} {kind} {f}x{d} M={rows}"
                compare(title, calls, ws[0].nbytes)
    return 0
