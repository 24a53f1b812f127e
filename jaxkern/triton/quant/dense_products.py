"""Products of one to four activations with bfloat16 weights, and what stands around.

    y = x w^T,  or  silu(x gate^T) * (x up^T);  x may be normalised, y added to another,
    gelu stand for silu and an operand for x up^T

A program has a few rows of the weights, of which it has all on their way before it
looks at x; the norm is a factor of the sums, of which each program makes its own. Rows
of some lengths and one activation are multiplied by `lane_products.py`, and more
activations than a few by XLA, on whose side the tensor cores are.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.bulk_ring import OLDEST_WITH_BULK_COPIES
from jaxkern.gpu.dependent_launch import let_next_begin, wait_for_those_ahead
from jaxkern.gpu.device import compute_capability, next_power_of_2
from jaxkern.gpu.peer_sum import MOST, send, turn_of
from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import jit, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.triton.quant.copied_products import copied_products_kernel, memory_of
from jaxkern.triton.quant.lane_products import lane_products_kernel
from jaxkern.triton.quant.packed_products import multiply_decoded

FEW = 4  # activations
FEWEST = 256  # columns
LEAST = 512  # columns that a program reads at a time, at least, where there are as many
LARGEST = 8192
WHOLE = 16384
RAGGED = 1024  # columns at a time where no such power of 2 divides them
ALIGNED = 8  # columns that a load has together
BY_LANES = {512: 1, 1024: 1, 2048: 2, 4096: 2}
"""Columns of rows that tensor cores multiply, and the warps that share one."""
LANE_ROWS = 2  # of a program of theirs
SUMMED = 2048  # columns of the longest of these rows that are summed over GPUs
BY_COPIES = {(2048, False): (4, 4), (2048, True): (2, 4)}
"""Rows of a program and its warps where bulk copies bring them, by their columns and
whether they are gated."""


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


def columns_at_once(d: int, is_plain: bool) -> int:
    """The next power of 2 where an eighth at most is too much; else the largest that
    divides d, or RAGGED. At most LARGEST, of plain rows WHOLE."""
    whole = next_power_of_2(d)
    longest = WHOLE if is_plain and d < whole else LARGEST
    if whole <= longest and 8 * d >= 7 * whole:
        return whole
    return min(d & -d, LARGEST) if d & -d >= min(d, LEAST) else RAGGED


def sizes_of(d: int, gated: bool, normalised: bool) -> dict[str, int]:
    """Rows of a program, its columns and warps: a thread has 64 to 128 weights on their
    way."""
    columns = columns_at_once(d, not gated and not normalised)
    rows = 1 if columns > LARGEST else 2 if columns >= 2048 else 4
    each = rows * (2 if gated else 1) * columns
    warps = min(8, max(1, each // (32 * 64)))
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": warps}


def sizes_by_lanes(
    x: Any, w: Any, others: tuple, is_summed: bool
) -> dict[str, int] | None:
    """Those of `lane_products.py`, or None where it does not do this, or slower.

    `others` are operands that it does not know, where they are there. What is summed
    over GPUs (`is_summed`) the other kernel sends itself.
    """
    d = w.shape[-1]
    if num_rows(x) > 1 or x.dtype != jnp.bfloat16 or d not in BY_LANES:
        return None
    if w.ndim == 3 or any(a is not None for a in others):
        return None
    if is_summed and d > SUMMED:
        return None
    warps = BY_LANES[d]
    places = next_power_of_2(8 * warps * LANE_ROWS + 32 * warps)
    return {"ROWS": LANE_ROWS, "num_warps": warps, "PLACES": places}


def may_be_summed(f: int, dtype: Any, residual: Any) -> bool:
    """Whether it looks like a part that `sum_over_devices` adds up."""
    return f <= MOST and dtype == jnp.float32 and residual is None


def sizes_by_copies(x: Any, w: Any, norm: Any, others: tuple) -> dict[str, int] | None:
    """Those of `copied_products.py`, or None likewise."""
    if compute_capability() < OLDEST_WITH_BULK_COPIES or norm is None:
        return None
    if num_rows(x) > 1 or (x.dtype, norm.dtype) != (jnp.bfloat16, jnp.float32):
        return None
    d, gated = w.shape[-1], w.ndim == 3
    if (d, gated) not in BY_COPIES or any(a is not None for a in others):
        return None
    rows, warps = BY_COPIES[d, gated]
    memory = memory_of(rows * (2 if gated else 1), warps, d)
    return {"ROWS": rows, "num_warps": warps, "RING": memory}


@jit
def read_rows(
    w_ptr,
    norm_ptr,
    at,
    column,
    D: tl.constexpr,
    FAR: tl.constexpr,
    GATED: tl.constexpr,
    CUT: tl.constexpr,
):
    """Columns of rows of w, where GATED of those that stand FAR behind, and the norm's.

    The weight of the norm comes with them, for behind the wait it would be in the way
    of x.
    """
    there = column < D
    norm = 1.0
    if CUT:
        beside = there[None, :]
        w = tl.load(w_ptr + at, beside, 0.0, eviction_policy="evict_first")
    else:
        w = tl.load(w_ptr + at, eviction_policy="evict_first")
    up = w
    if GATED:
        if CUT:
            up = tl.load(w_ptr + FAR + at, beside, 0.0, eviction_policy="evict_first")
        else:
            up = tl.load(w_ptr + FAR + at, eviction_policy="evict_first")
    if norm_ptr is not None:
        if CUT:
            norm = tl.load(norm_ptr + column, there, 0.0).to(tl.float32)
        else:
            norm = tl.load(norm_ptr + column).to(tl.float32)
    return w, up, norm


@jit
def read_columns(x_ptr, column, D: tl.constexpr, CUT: tl.constexpr):
    if CUT:
        x = tl.load(x_ptr + column, column < D, 0.0)
    else:
        x = tl.load(x_ptr + column)
    return x.to(tl.float32)


@jit
def add_columns(read, x, sums, NORM: tl.constexpr, GATED: tl.constexpr):
    """The sums with these columns of the rows; x's squares where there is a norm."""
    w, up, norm = read
    total, other, squares = sums
    if NORM:
        squares += x * x
        x *= norm
    total += w.to(tl.float32) * x[None, :]
    if GATED:
        other += up.to(tl.float32) * x[None, :]
    return total, other, squares


@jit
def three_sums(a, b, c, d, e, f):
    return a + d, b + e, c + f


@jit
def two_sums(a, b, c, d):
    return a + c, b + d


@jit
def sums_of_rows(sums, NORM: tl.constexpr, GATED: tl.constexpr):
    """Totals of the rows, [rows] each, all by one exchange between warps."""
    total, other, squares = sums
    if NORM:
        same = squares[None, :] + tl.zeros_like(total)
        if GATED:
            total, other, squares = tl.reduce((total, other, same), 1, three_sums)
        else:
            total, squares = tl.reduce((total, same), 1, two_sums)
    elif GATED:
        total, other = tl.reduce((total, other), 1, two_sums)
    else:
        total = tl.sum(total, 1)
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

    The first are read before the kernel ahead has ended, where AHEAD is READ. A
    residual is in the sum's first column, if that is all: else it would be read behind
    the sum. With LAYOUT y also goes to the mailboxes of `gpu/peer_sum.py`.
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
    NORM: tl.constexpr = norm_ptr is not None
    PLAIN: tl.constexpr = not NORM and not GATED and up_ptr is None
    ADDED_FIRST: tl.constexpr = PLAIN and residual_ptr is not None
    for m in tl.static_range(M):
        read = read_rows(w_ptr, norm_ptr, at, column, D, FAR, GATED, CUT)
        if AHEAD == 2 and m == 0:
            wait_for_those_ahead()
        added = tl.zeros([ROWS], tl.float32)
        if bias_ptr is not None:
            added += tl.load(bias_ptr + row, inside, 0.0).to(tl.float32)
        if residual_ptr is not None:
            added += tl.load(residual_ptr + m * F + row, inside, 0.0).to(tl.float32)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        sums = total, total, tl.zeros([COLUMNS], tl.float32)
        if ADDED_FIRST:
            first = tl.where((column == 0)[None, :], added[:, None], total)
            sums = first, total, sums[2]
        row_of_x = x_ptr + m * D
        for k in range(0, LAST, COLUMNS):
            behind = k + COLUMNS + column
            ahead = read_rows(
                w_ptr, norm_ptr, at + k + COLUMNS, behind, D, FAR, GATED, CUT
            )
            x = read_columns(row_of_x, k + column, D, False)
            sums = add_columns(read, x, sums, NORM, GATED)
            read = ahead
        x = read_columns(row_of_x, LAST + column, D, CUT)
        sums = add_columns(read, x, sums, NORM, GATED)
        y, gated, squares = sums_of_rows(sums, NORM, GATED)
        factor = 1.0
        if NORM:
            factor = tl.rsqrt(squares / D + EPS)
        y *= factor
        if GATED:
            y = activated(y, ACTIVATION) * (gated * factor)
        if up_ptr is not None:
            gate = activated(y, ACTIVATION)
            y = gate * tl.load(up_ptr + m * F + row, inside, 0.0).to(tl.float32)
        if not ADDED_FIRST:
            y += added
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
    given = {
        "x_ptr": x,
        "norm_ptr": norm,
        "w_ptr": w,
        "up_ptr": up,
        "bias_ptr": bias,
        "residual_ptr": residual,
        **dict.fromkeys(("own_ptr", "number_ptr", "mailboxes")),
    }
    out = {"y_ptr": jax.ShapeDtypeStruct((*x.shape[:-1], f), dtype or x.dtype)}
    constants: dict = {"F": f, "D": d}
    around = {"EPS": eps, "GATED": gated, "ACTIVATION": activation}
    lanes = sizes_by_lanes(x, w, (norm, up, bias), may_be_summed(f, dtype, residual))
    copies = sizes_by_copies(x, w, norm, (up, residual))
    if sizes is None and lanes:
        kernel, sizes = lane_products_kernel, lanes
        given = {name: given[name] for name in ("x_ptr", "w_ptr", "residual_ptr")}
    elif sizes is None and copies:
        kernel, sizes = copied_products_kernel, copies
        names = "x_ptr", "norm_ptr", "w_ptr", "bias_ptr"
        given = {name: given[name] for name in names}
        constants |= around
    else:
        kernel = few_products_kernel
        sizes = sizes_of(d, gated, norm is not None) | (sizes or {})
        constants |= around | {"M": num_rows(x), "LAYOUT": None}
    programs = -(-f // sizes["ROWS"])
    [y] = sparse_call(kernel, (programs,), given, out, constants | sizes)
    assert y is not None
    return y
