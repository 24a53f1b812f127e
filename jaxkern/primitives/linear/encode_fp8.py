"""8-bit floats of a tensor and of its transpose: what the three products of a linear
layer read, whose sums all run along rows."""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.linear.scaled_float8 import codes_of


def encode_fp8_reference(
    x: Float[Array, "b t d"], scale: Float[Array, ""], *, form: str
) -> tuple[UInt8[Array, "b t d"], UInt8[Array, "d b t"]]:
    # turned before: codes would be turned as bytes, which XLA takes for no 8-bit floats
    return codes_of(x, scale, form), codes_of(jnp.moveaxis(x, 2, 0), scale, form)


encode_fp8_p = kernel_primitive(encode_fp8_reference)
