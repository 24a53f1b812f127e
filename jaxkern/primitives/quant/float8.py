"""8-bit floats by name: the JAX dtype, the largest finite value, the saturating cast.

| format | exponent, mantissa | largest | has |
|---|---|---|---|
| e4m3fn | 4, 3 | 448 | NaN, no infinity (OCP; what checkpoints call E4M3) |
| e4m3 | 4, 3 | 240 | NaN and infinity, as IEEE 754 would have them |
| e5m2 | 5, 2 | 57344 | NaN and infinity |

e4m3fn and e4m3 differ in the codes 0x78 to 0x7F alone, and those with the sign.
"""

import jax.numpy as jnp
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
    top = largest_float8(form)
    nearest = jnp.clip(x, -top, top).astype(FLOAT8[form])
    return lax.bitcast_convert_type(nearest, jnp.uint8)


def decode_float8(codes: UInt8[Array, "..."], form: str) -> Float[Array, "..."]:
    """The values of codes, in float32: exact."""
    return lax.bitcast_convert_type(codes, FLOAT8[form]).astype(jnp.float32)
