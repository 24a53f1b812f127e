"""Products of one to four activations with bfloat16 weights, and what stands around.

    y = x w^T,  or  silu(x gate^T) * (x up^T);  x may be normalised, y added to another,
    gelu stand for silu and an operand for x up^T

A program has a few rows of the weights, of which it has all on their way before it
looks at x; the norm is a factor of the sums, of which each program makes its own. More
activations are multiplied by XLA, on whose side the tensor cores are.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.dependent_launch import let_next_begin, wait_for_those_ahead
from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.peer_sum import send, turn_of
from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import jit, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.triton.quant.packed_products import multiply_decoded

FEW = 4  # activations
FEWEST = 256  # columns
LEAST = 512  # columns that a program reads at a time, at least, where there are as many
LARGEST = 8192
RAGGED = 1024  # columns at a time where no such power of 2 divides them
ALIGNED = 8  # columns that a load has together


def refusal(x: Any, w: Any, **more: Any) -> str | None:
    """Why no kernel runs, or None."""
    if reason := unsupported_anywhere(x=x, **more):
        return reason
    if w.dtype != jnp.bfloat16:
        return f"`w` is {w.dtype}, not bfloat16"
    if not math.prod((*x.shape, *w.shape)):
        return "there are no elements"
    d = w.shape[-1]
    if d < FEWEST or d % ALIGNED:
        return f"rows of {d} columns, fewer than {FEWEST} or no multiple of {ALIGNED}"
    if num_rows(x) > FEW and x.dtype != jnp.bfloat16:
        return f"{num_rows(x)} activations of {x.dtype}, over {FEW}"
    return None


def multiply(
    x: jax.Array,
    w: jax.Array,
    *,
    norm: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    eps: float = 0.0,
    up: jax.Array | None = None,
    activation: str | None = None,
) -> jax.Array:
    """`[..., f]` of x `[..., d]` and w `[f, d]`, or `[2, f, d]` where it is gated.

    With `up` `[..., f]` w has the rows of the gate.
    """
    if num_rows(x) <= FEW:
        around: dict = dict(norm=norm, bias=bias, residual=residual)
        return launch(x, w, **around, eps=eps, up=up, activation=activation)
    flat = w.reshape(-1, w.shape[-1])
    if bias is not None:
        added = bias.astype(jnp.float32)
        added = added if residual is None else added + residual.astype(jnp.float32)
        residual = jnp.broadcast_to(added, (*x.shape[:-1], len(bias)))
    return multiply_decoded(x, flat, norm, residual, eps, up, activation)


def columns_at_once(d: int) -> int:
    """The next power of 2 where an eighth at most is too much; else the largest that
    divides d, or RAGGED. At most LARGEST."""
    whole = next_power_of_2(d)
    if whole <= LARGEST and 8 * d >= 7 * whole:
        return whole
    return min(d & -d, LARGEST) if d & -d >= min(d, LEAST) else RAGGED


def sizes_of(d: int, gated: bool) -> dict[str, int]:
    """Rows of a program and its warps: a thread has 64 to 128 weights on their way."""
    columns = columns_at_once(d)
    rows = 2 if columns >= 2048 else 4
    each = rows * (2 if gated else 1) * columns
    return {"ROWS": rows, "num_warps": min(8, max(1, each // (32 * 64)))}


@jit
def read_rows(
    w_ptr,
    at,
    column,
    D: tl.constexpr,
    FAR: tl.constexpr,
    GATED: tl.constexpr,
    CUT: tl.constexpr,
):
    """Columns of rows of w, and where GATED of those that stand FAR behind."""
    if CUT:
        there = (column < D)[None, :]
        w = tl.load(w_ptr + at, there, 0.0, eviction_policy="evict_first")
    else:
        w = tl.load(w_ptr + at, eviction_policy="evict_first")
    up = w
    if GATED:
        if CUT:
            up = tl.load(w_ptr + FAR + at, there, 0.0, eviction_policy="evict_first")
        else:
            up = tl.load(w_ptr + FAR + at, eviction_policy="evict_first")
    return w, up


@jit
def add_columns(
    w,
    up,
    x_ptr,
    norm_ptr,
    column,
    total,
    other,
    squares,
    GATED: tl.constexpr,
    LESS_THAN: tl.constexpr,
):
    """The sums with these columns of the rows; x's squares where there is a norm.

    LESS_THAN is what columns are below, or 0 where all of them are there.
    """
    there = None
    if LESS_THAN:
        there = column < LESS_THAN
    x = tl.load(x_ptr + column, there).to(tl.float32)
    if LESS_THAN:
        x = tl.where(there, x, 0.0)
    if norm_ptr is not None:
        squares += x * x
        x *= tl.load(norm_ptr + column, there).to(tl.float32)
        if LESS_THAN:
            x = tl.where(there, x, 0.0)
    total += w.to(tl.float32) * x[None, :]
    if GATED:
        other += up.to(tl.float32) * x[None, :]
    return total, other, squares


@jit
def activated(y, ACTIVATION: tl.constexpr):
    """silu(y), or gelu(y) by its tanh: y times the sigmoid of y, or of a polynomial."""
    z = y
    if ACTIVATION == "gelu_tanh":
        z = 1.5957691216057308 * y * (1 + 0.044715 * y * y)
    return y / (1 + tl.exp(-z))


@jit
def few_products_kernel(
    x_ptr,
    norm_ptr,
    w_ptr,
    up_ptr,
    bias_ptr,
    residual_ptr,
    own_ptr,
    number_ptr,
    mailboxes,
    y_ptr,
    M: tl.constexpr,
    F: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAYOUT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """ROWS rows of w for M activations, COLUMNS at a time, the next ones on their way.

    The first are read before the kernel ahead has ended, where AHEAD is READ. With
    LAYOUT y also goes to the mailboxes of `gpu/peer_sum.py`.
    """
    if AHEAD:
        let_next_begin()
    rank, turn = 0, 0
    if LAYOUT is not None:
        rank, turn = tl.load(own_ptr), turn_of(own_ptr, number_ptr, LAYOUT)
    if AHEAD == 1:
        wait_for_those_ahead()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < F
    column = tl.arange(0, COLUMNS)
    at = tl.minimum(row, F - 1).to(tl.int64)[:, None] * D + column[None, :]
    FAR: tl.constexpr = F * D
    LAST: tl.constexpr = (D - 1) // COLUMNS * COLUMNS
    CUT: tl.constexpr = D % COLUMNS != 0
    BELOW: tl.constexpr = D if CUT else 0
    for m in tl.static_range(M):
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        other = tl.zeros([ROWS, COLUMNS], tl.float32)
        squares = tl.zeros([COLUMNS], tl.float32)
        w, up = read_rows(w_ptr, at, column, D, FAR, GATED, CUT)
        if AHEAD == 2 and m == 0:
            wait_for_those_ahead()
        row_of_x = x_ptr + m * D
        for k in range(0, LAST, COLUMNS):
            next_w, next_up = read_rows(
                w_ptr, at + k + COLUMNS, k + COLUMNS + column, D, FAR, GATED, CUT
            )
            total, other, squares = add_columns(
                w, up, row_of_x, norm_ptr, k + column, total, other, squares, GATED, 0
            )
            w, up = next_w, next_up
        last = LAST + column
        total, other, squares = add_columns(
            w, up, row_of_x, norm_ptr, last, total, other, squares, GATED, BELOW
        )
        factor = 1.0
        if norm_ptr is not None:
            factor = tl.rsqrt(tl.sum(squares, 0) / D + EPS)
        y = tl.sum(total, 1) * factor
        if GATED:
            y = activated(y, ACTIVATION) * (tl.sum(other, 1) * factor)
        if up_ptr is not None:
            gate = activated(y, ACTIVATION)
            y = gate * tl.load(up_ptr + m * F + row, inside, 0.0).to(tl.float32)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + row, inside, 0.0).to(tl.float32)
        if residual_ptr is not None:
            y += tl.load(residual_ptr + m * F + row, inside, 0.0).to(tl.float32)
        if LAYOUT is not None:
            send(mailboxes, m * F + row, y, inside, rank, turn, LAYOUT)
        tl.store(y_ptr + m * F + row, y.to(y_ptr.dtype.element_ty), inside)


def launch(
    x: jax.Array,
    w: jax.Array,
    *,
    norm: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    eps: float = 0.0,
    up: jax.Array | None = None,
    activation: str | None = None,
    dtype: Any = None,
    sizes: dict[str, int] | None = None,
) -> jax.Array:
    """`multiply` by the kernel. `sizes` is for a benchmark to choose."""
    *_, f, d = w.shape
    gated = w.ndim == 3
    sizes = sizes or sizes_of(d, gated)
    [y] = sparse_call(
        few_products_kernel,
        (-(-f // sizes["ROWS"]),),
        {
            "x_ptr": x,
            "norm_ptr": norm,
            "w_ptr": w,
            "up_ptr": up,
            "bias_ptr": bias,
            "residual_ptr": residual,
            **dict.fromkeys(("own_ptr", "number_ptr", "mailboxes")),
        },
        {"y_ptr": jax.ShapeDtypeStruct((*x.shape[:-1], f), dtype or x.dtype)},
        {
            "M": num_rows(x),
            "F": f,
            "D": d,
            "EPS": eps,
            "GATED": gated,
            "ACTIVATION": activation,
            "COLUMNS": columns_at_once(d),
            "LAYOUT": None,
            **sizes,
        },
    )
    assert y is not None
    return y
