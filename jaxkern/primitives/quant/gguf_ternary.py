"""GGUF's ternary formats: weight = d * t, t one of -1, 0 and 1.

TQ1_0 packs five digits in a byte, as a fraction of 256: the byte is ceil(n * 256 / 243)
for n = sum of digit i * 3**(4 - i), so the digits come out one by one as what three
times the fraction has before the point. TQ2_0 spends two bits on each.
"""

import jax.numpy as jnp
import numpy as np

from jaxkern.primitives.quant.block_fields import Unpacked, bit_fields, f16


def _places(first: int, count: int, digits: int) -> list[tuple[int, int]]:
    """(byte, power of 3) of each weight: the first digit of all, then the next."""
    return [(first + i, 3**k) for k in range(digits) for i in range(count)]


PLACES = np.array(_places(0, 32, 5) + _places(32, 16, 5) + _places(48, 4, 4))


def _tq1_0(b):  # five digits a byte in qs[48], four in qh[4]; d
    fraction = b[..., PLACES[:, 0]].astype(jnp.int32) * PLACES[:, 1] & 255
    code = (fraction * 3 >> 8) - 1
    return Unpacked(code[..., None, :], f16(b[..., 52:]))


def _tq2_0(b):  # qs[64] d
    code = bit_fields(b[..., :64], 2, every=32, shape=(1, 256)) - 1
    return Unpacked(code, f16(b[..., 64:]))


UNPACK_TERNARY = {"TQ1_0": _tq1_0, "TQ2_0": _tq2_0}
