"""Products with bfloat16 and float16 weights on a CPU; see matmul_transpose_b.h.

XLA:CPU widens such a weight to float32 in memory before it multiplies.
"""

import math

import jax
import jax.numpy as jnp

from jaxkern.cpu.cpu_call import FLOATS, cpu_call, library, missing

NARROW = ("bfloat16", "float16")
FEW, SOME, MANY = 8, 32, 128  # rows of x that meet one weight


def refusal(x, w, compute_dtype) -> str | None:
    """Why the kernel cannot multiply operands of these shapes and dtypes, or None."""
    if w.dtype not in NARROW:
        return f"`w` is {w.dtype}, not one of {', '.join(NARROW)}"
    if x.dtype not in FLOATS:
        return f"`x` is {x.dtype}, not one of {', '.join(FLOATS)}"
    if (dtype := product_dtype(x, w, compute_dtype)) not in (w.dtype, jnp.float32):
        return f"products of {dtype} with weights of {w.dtype}"
    if not math.prod(x.shape) * math.prod(w.shape):
        return "there are no elements"
    return missing()


def product_dtype(x, w, compute_dtype) -> jnp.dtype:
    """To which the operands are rounded."""
    return compute_dtype or jnp.promote_types(x.dtype, w.dtype)


def unsupported(
    x, w, *, compute_dtype, precision, preferred_element_type=None
) -> str | None:
    del precision  # the products are exact, the sums float32, under any
    if preferred_element_type not in (None, *map(jnp.dtype, FLOATS)):
        return f"the result is {preferred_element_type}, not one of {', '.join(FLOATS)}"
    return refusal(x, w, compute_dtype)


def slower(
    x, w, *, compute_dtype, precision, preferred_element_type=None
) -> str | None:
    del precision, preferred_element_type
    rows = math.prod(x.shape[:-1]) // math.prod(w.shape[:-2])
    if rows > FEW and not library().instruction_set.startswith("avx512"):
        return f"{rows} rows without AVX-512"
    # XLA multiplies bfloat16 by bfloat16 without widening them where rows are many
    both = w.dtype == product_dtype(x, w, compute_dtype) == jnp.bfloat16
    return f"{rows} rows" if rows > (SOME if both else MANY) else None


def multiply(x, w, dtype, compute_dtype) -> jax.Array:
    """x `[..., rows, d]` times w `[..., f, d]`: `[..., rows, f]` of `dtype`."""
    return cpu_call(
        "matmul_transpose_b",
        jax.ShapeDtypeStruct((*x.shape[:-1], w.shape[-2]), dtype),
        x,
        w,
        narrow=product_dtype(x, w, compute_dtype) == w.dtype,
    )


def matmul_transpose_b(x, w, *, compute_dtype, precision, preferred_element_type):
    del precision
    *lead, n, t, d = x.shape
    rows = x.reshape(*lead, w.shape[-3], -1, d)  # those of a group lie side by side
    y = multiply(rows, w, preferred_element_type or x.dtype, compute_dtype)
    return y.reshape(*lead, n, t, w.shape[-2])
