"""8-bit floats of a tensor and of its transpose: what the three products of a linear
layer read, whose sums all run along rows."""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.linear.scaled_float8 import codes_of


def encode_fp8_reference(
    x: Float[Array, "b t d"], scale: Float[Array, ""], *, form: str
) -> tuple[UInt8[Array, "b t d"], UInt8[Array, "d b t"]]:
    codes = codes_of(x, scale, form)
    return codes, jnp.moveaxis(codes, 2, 0)


encode_fp8_p = kernel_primitive(encode_fp8_reference)
