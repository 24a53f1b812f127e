"""Products with row-major containers on NVIDIA GPUs, for any number of activations.

A few: `row_kernel.py` multiplies the codes as they are. More: `row_decode.py` writes
the weights once as bfloat16, and XLA multiplies. The kernels' modules of the containers
say how their arrays are read, as `Rows`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import sparse_call
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.triton.quant.activations import TERMS as TERMS_OF
from jaxkern.triton.quant.activations import in_terms, terms_of
from jaxkern.triton.quant.packed_products import multiply_decoded
from jaxkern.triton.quant.row_codes import BITS, UNITS
from jaxkern.triton.quant.row_decode import decoded
from jaxkern.triton.quant.row_kernel import row_product_kernel
from jaxkern.triton.quant.row_problem import RowProblem, Rows

ALIGNED = 16  # bytes of a row of codes
MOST = 64  # activations by terms, of one launch
FLOATS = ("float32", "bfloat16", "float16")


def refusal(w: Rows, **more: Any) -> str | None:
    """Why no kernel reads these weights, or None."""
    arrays = {"scales": w.scales, "zeros": w.offsets, "global_scale": w.factors}
    if reason := unsupported_anywhere(**arrays, **more):
        return reason
    given = [a for a in (w.codes, *arrays.values(), *more.values()) if a is not None]
    if not all(math.prod(a.shape) for a in given):
        return "there are no elements"
    for name, a in arrays.items():
        is_code = name == "scales" and w.kind != "float"
        if a is not None and not is_code and a.dtype.name not in FLOATS:
            return f"`{name}` is {a.dtype}"
    bits = BITS[w.format]
    unit = UNITS[bits]
    if w.columns % unit or w.columns * bits // 8 % ALIGNED:
        return (
            f"rows of {w.columns} columns of {bits} bits, no multiple of {unit} "
            f"columns and {ALIGNED} bytes"
        )
    group = min(w.group, w.columns)
    if group < w.columns and group % unit and (unit % group or group % 8):
        return f"groups of {w.group} columns beside units of {unit}"
    if bits == 2 and group % 16:
        return f"groups of {w.group} columns of 2 bits, no multiple of 16"
    return None


def refusal_of_product(x: Any, w: Rows, compute_dtype: Any) -> str | None:
    """Why no kernel multiplies, or None."""
    if reason := refusal(w, x=x):
        return reason
    if compute_dtype not in (None, jnp.float32, jnp.bfloat16):
        return f"compute_dtype is {compute_dtype}"
    if x.dtype.name not in TERMS_OF:
        return f"`x` is {x.dtype}"
    rows, terms = num_rows(x), terms_of(x, compute_dtype)
    if rows * terms > MOST and terms > 1:
        return f"{rows} activations of {terms} terms each, over {MOST} in all"
    return None


def refusal_of_routed(x: Any, ids: Any, w: Rows, compute_dtype: Any) -> str | None:
    """Why no kernel multiplies with experts that are named, or None."""
    if reason := refusal_of_product(x, w, compute_dtype):
        return reason
    if not math.prod(ids.shape):
        return "there are no elements"
    if w.rows % w.rows_of_scale:
        return f"scales of {w.rows_of_scale} rows of {w.rows}"
    slots = math.prod(ids.shape)
    if slots > MOST:
        return f"{slots} rows are routed, over {MOST}"
    return None


def refusal_of_rows(ids: Any, w: Rows, dtype: Any) -> str | None:
    """Why no kernel looks rows up, or None."""
    if jnp.dtype(dtype).name not in FLOATS:
        return f"`dtype` is {jnp.dtype(dtype)}"
    return refusal(w, ids=ids)


def refusal_of_weights(w: Rows, dtype: Any) -> str | None:
    """Why no kernel decodes all of them, or None."""
    if w.codes.ndim < 2:
        return "`codes` are one row"
    if jnp.dtype(dtype).name not in FLOATS:
        return f"`dtype` is {jnp.dtype(dtype)}"
    return refusal(w)


def most_by_codes(p: RowProblem) -> int:
    """Activations beyond which decoded weights are the faster."""
    return 16 if p.split else 32


def multiply(
    x: jax.Array,
    w: Rows,
    compute_dtype: Any,
    sizes: tuple[int, int] | None = None,
) -> jax.Array:
    """`[..., rows]` of x `[..., columns]`, in its dtype.

    `sizes` are warps of a program and steps of a batch, where a benchmark chooses them.
    """
    terms = terms_of(x, compute_dtype)
    p = problem_of(w, num_rows(x) * terms, sizes=sizes)
    if terms == 1 and p.activations > most_by_codes(p):
        return multiply_decoded(x, decoded(w, jnp.bfloat16), None, None, 0.0)
    y = launch(in_terms(x.reshape(-1, w.columns), terms), None, w, p, terms, x.dtype)
    return y.reshape(*x.shape[:-1], w.rows)


def multiply_routed(
    x: jax.Array,
    ids: jax.Array,
    w: Rows,
    compute_dtype: Any,
    sizes: tuple[int, int] | None = None,
) -> jax.Array:
    """`[..., k, rows]` of x `[..., columns]`, ids `[..., k]` and experts of weights."""
    terms, k = terms_of(x, compute_dtype), ids.shape[-1]
    rows = num_rows(x)
    p = problem_of(w, rows * terms, top_k=k, sizes=sizes)
    ids = ids.astype(jnp.int32).reshape(rows, 1, k)
    each = jnp.broadcast_to(ids, (rows, terms, k)).reshape(-1)
    y = launch(in_terms(x.reshape(rows, -1), terms), each, w, p, terms, x.dtype)
    return y.reshape(*x.shape[:-1], k, w.rows)


def problem_of(
    w: Rows,
    activations: int,
    *,
    top_k: int = 0,
    sizes: tuple[int, int] | None = None,
) -> RowProblem:
    experts = w.codes.shape[0] if w.codes.ndim == 3 else 1
    group = w.columns if w.scales.shape[-1] == 1 else w.group
    split = group < w.columns and group % (4 * UNITS[BITS[w.format]]) != 0
    together = 1 if top_k else min(activations, 8 if split else 32)
    shares, batch = sizes or sizes_of(w, together)
    return RowProblem(
        format=w.format,
        rows=w.rows,
        columns=w.columns,
        group=group,
        rows_of_scale=w.rows_of_scale,
        groups=w.scales.shape[-1],
        kind=w.kind,
        zero=w.zero,
        offsets=w.offset,
        activations=activations,
        together=together,
        top_k=top_k,
        experts=experts,
        shares=shares,
        batch=batch,
    )


def sizes_of(w: Rows, together: int) -> tuple[int, int]:
    """Warps of a program and steps of a batch, as measured.

    A batch of four steps where they are short and what they need leaves room for it.
    """
    steps = -(-w.columns // (4 * UNITS[BITS[w.format]]))
    many = together > 4 and w.format == "e4m3"
    batch = 4 if w.format in ("i8", "u8") or many else 2
    batch = batch if steps >= 16 else 2 if steps >= 2 else 1
    shares = 4
    while shares > 1 and shares * batch > steps:
        shares //= 2
    return shares, batch


def launch(
    x: jax.Array,
    ids: jax.Array | None,
    w: Rows,
    p: RowProblem,
    terms: int,
    dtype: Any,
) -> jax.Array:
    """y of the kernel; the terms of an activation are added up."""
    slots = p.activations * max(p.top_k, 1)
    [y] = sparse_call(
        row_product_kernel,
        (-(-p.rows // 16), -(-slots // p.together)),
        {
            "x_ptr": x,
            "ids_ptr": ids,
            "codes_ptr": w.codes,
            "scales_ptr": w.scales,
            "offsets_ptr": w.offsets,
            "factors_ptr": w.factors,
            "zeros_ptr": jnp.zeros(p.unit, x.dtype),
        },
        {
            "y_ptr": jax.ShapeDtypeStruct(
                (slots, p.rows), dtype if terms == 1 else jnp.float32
            )
        },
        {"P": p, "num_warps": p.shares},
    )
    assert y is not None
    if terms == 1:
        return y
    parts = y.reshape(-1, terms, max(p.top_k, 1), p.rows)
    return jnp.sum(parts, axis=1).astype(dtype)
