"""GGUF's ternary formats: weight = d * t, t one of -1, 0 and 1.

TQ1_0 packs five digits in a byte, as a fraction of 256: the byte is ceil(n * 256 / 243)
for n = sum of digit i * 3**(4 - i), so the digits come out one by one as what three
times the fraction has before the point. TQ2_0 spends two bits on each.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt8

from jaxkern.primitives.quant.block_fields import Unpacked, bit_fields, f16


def _tq1_0(b):  # five digits a byte in qs[48], four in qh[4]; d
    runs = (
        _digits(b[..., :32], 5),
        _digits(b[..., 32:48], 5),
        _digits(b[..., 48:52], 4),
    )
    code = jnp.concatenate(runs, axis=-1) - 1
    return Unpacked(code[..., None, :], f16(b[..., 52:]))


def _digits(b: UInt8[Array, "... n"], count: int) -> Int[Array, "... n*count"]:
    """The first digit of all bytes, then the second, and so on."""
    fraction = [b.astype(jnp.int32)]
    for _ in range(count - 1):
        fraction.append(fraction[-1] * 3 & 255)
    return jnp.concatenate([f * 3 >> 8 for f in fraction], axis=-1)


def _tq2_0(b):  # qs[64] d
    code = bit_fields(b[..., :64], 2, every=32, shape=(1, 256)) - 1
    return Unpacked(code, f16(b[..., 64:]))


UNPACK_TERNARY = {"TQ1_0": _tq1_0, "TQ2_0": _tq2_0}
