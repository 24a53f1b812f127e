"""Products of a few activations with bfloat16 weights, by dense_products.py."""

import jax

from jaxkern.triton.quant.dense_products import FEW, launch, refusal
from jaxkern.triton.quant.packed_products import num_rows


def unsupported(
    x, w, *, compute_dtype, precision, preferred_element_type
) -> str | None:
    del precision, preferred_element_type
    if compute_dtype is not None:
        return f"compute_dtype is {compute_dtype}"
    return refusal(x, w)


def slower(x, w, *, compute_dtype, precision, preferred_element_type) -> str | None:
    """More are products of XLA's alone."""
    del w, compute_dtype, precision, preferred_element_type
    return f"{num_rows(x)} activations, over {FEW}" if num_rows(x) > FEW else None


def linear(x, w, *, compute_dtype, precision, preferred_element_type):
    del compute_dtype, precision
    if num_rows(x) > FEW:
        dims = (((x.ndim - 1,), (1,)), ((), ()))
        return jax.lax.dot_general(
            x, w, dims, preferred_element_type=preferred_element_type
        )
    return launch(x, w, dtype=preferred_element_type)
