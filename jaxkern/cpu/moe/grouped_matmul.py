"""Products with dense experts on a CPU; the kernel is linear/matmul_transpose_b.h.

XLA:CPU takes blocks of one group in a loop, and copies or widens the weight of each.
"""

import math

import jax
import jax.numpy as jnp

from jaxkern.cpu.cpu_call import FLOATS, cpu_call, library, refuses
from jaxkern.cpu.linear.matmul_transpose_b import FEW, NARROW
from jaxkern.primitives.moe.row_blocks import row_blocks


def unsupported(x, w, group_sizes, *, preferred_element_type=None) -> str | None:
    if preferred_element_type not in (None, *map(jnp.dtype, FLOATS)):
        return f"the result is {preferred_element_type}, not one of {', '.join(FLOATS)}"
    if not math.prod(group_sizes.shape):
        return "there are no groups"
    return refuses(x=x, w=w)


def slower(x, w, group_sizes, **_) -> str | None:
    del group_sizes
    if w.shape[2] == 1:
        return "`d` is 1: XLA gathers, without a loop"
    rows = x.shape[0] // w.shape[0]
    wide = library().instruction_set.startswith("avx512")
    if rows > FEW and w.dtype in NARROW and not wide:
        return f"{rows} rows an expert without AVX-512"
    return None


def grouped_matmul(x, w, group_sizes, *, preferred_element_type=None):
    blocks = row_blocks(group_sizes, x.shape[0])
    expert = jnp.where(blocks.grouped, blocks.group_of_row, -1)
    y = multiply_experts(x, expert[:, None], w, preferred_element_type or x.dtype)
    return y[:, 0]


def multiply_experts(x, ids, w, dtype) -> jax.Array:
    """w[ids[i, j]] x[i], or zeros for an id outside [0, e): `[t, k, f]` of `dtype`.

    x `[t, d]`, ids `[t, k]` int32, w `[e, f, d]`.
    """
    return cpu_call(
        "expert_matmul",
        jax.ShapeDtypeStruct((*ids.shape, w.shape[1]), dtype),
        x,
        ids,
        w,
        narrow=x.dtype == w.dtype,
    )
