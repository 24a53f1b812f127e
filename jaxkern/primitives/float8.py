"""8-bit floats by name: the JAX dtype, the largest finite value, the saturating cast.

| format | exponent, mantissa | largest | has |
|---|---|---|---|
| e4m3fn | 4, 3 | 448 | NaN, no infinity (OCP; what checkpoints call E4M3) |
| e4m3 | 4, 3 | 240 | NaN and infinity, as IEEE 754 would have them |
| e5m2 | 5, 2 | 57344 | NaN and infinity |

e4m3fn and e4m3 differ in the codes 0x78 to 0x7F alone, and those with the sign.

Codes are read and written by their bits, which is as fast as the conversions of a
compiler, and runs where the 8-bit dtypes do not exist.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

FLOAT8 = {
    "e4m3fn": jnp.float8_e4m3fn,
    "e4m3": jnp.float8_e4m3,
    "e5m2": jnp.float8_e5m2,
}


def check_float8(op: str, form: str) -> None:
    if form not in FLOAT8:
        raise ValueError(
            f"{op}: `format` must be one of {', '.join(FLOAT8)}, got {form!r}."
        )


def largest_float8(form: str) -> float:
    return float(jnp.finfo(FLOAT8[form]).max)


def encode_float8(x: Float[Array, "..."], form: str) -> UInt8[Array, "..."]:
    """The nearest codes, ties to even; beyond the largest value, that value.

    A plain `astype(float8_e4m3fn)` makes NaN of what lies beyond. NaN stays NaN.
    """
    info, own = jnp.finfo(FLOAT8[form]), jnp.finfo(x.dtype)
    if own.nmant < 23:  # exact in float32
        return encode_float8(x.astype(jnp.float32), form)
    mantissa, lowest = int(info.nmant), int(info.minexp)
    cut = int(own.nmant) - mantissa  # bits that are rounded away
    word = lax.bitcast_convert_type(x, f"uint{own.bits}")
    size = word & (2 ** (own.bits - 1) - 1)
    nearest = (size + (2 ** (cut - 1) - 1) + ((size >> cut) & 1)) >> cut
    normal = nearest - ((lowest - int(own.minexp)) << mantissa)  # of the other bias
    is_small = jnp.abs(x) < 2.0**lowest
    steps = jnp.abs(jnp.where(is_small, x, 0)) * 2.0 ** (mantissa - lowest)
    code = jnp.where(is_small, jnp.round(steps).astype(word.dtype), normal)
    code = jnp.minimum(code, code_of(largest_float8(form), form))
    code = jnp.where(jnp.isnan(x), code_of(np.nan, form), code)
    return (code | (word >> (own.bits - 8) & 0x80)).astype(jnp.uint8)


def decode_float8(codes: UInt8[Array, "..."], form: str) -> Float[Array, "..."]:
    """The values of codes, in float32: exact."""
    info = jnp.finfo(FLOAT8[form])
    mantissa, lowest = int(info.nmant), int(info.minexp)
    word = codes.astype(jnp.int32)
    size = word & 0x7F
    # exponent and mantissa as in float32, of another bias
    bits = (size << (23 - mantissa)) + ((126 + lowest) << 23)
    normal = lax.bitcast_convert_type(bits, jnp.float32)
    small = size.astype(jnp.float32) * 2.0 ** (lowest - mantissa)
    y = jnp.where(size < 2**mantissa, small, normal)
    above = code_of(largest_float8(form), form) + 1  # infinity, else NaN
    y = jnp.where(size >= above, jnp.nan, y)
    if form != "e4m3fn":
        y = jnp.where(size == above, jnp.inf, y)
    return jnp.where(word > 0x7F, -y, y)


def code_of(value: float, form: str) -> int:
    """The code of a value that the format has, without its sign."""
    return int(np.array(value, FLOAT8[form]).view(np.uint8)) & 0x7F
