"""swiglu of gate and up in one array, and the gradients of both in one pass.

    s = sigmoid(alpha z), y = z s (u + offset)
    dgate = dy (u + offset) s (1 + alpha z (1 - s)), dup = dy z s

z and u are gate and up within their bounds. A program takes a tile of ROWS by BLOCK
elements. Of a packed operand `[rows, 2 * f]` both halves and both gradients are rows of
one array; gate and up of their own are one row.
"""

from collections.abc import Sequence
from typing import Any

import jax

from jaxkern.gpu.device import WARP, next_power_of_2
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported

ELEMENTS = 2048  # of a tile, 8 of them a thread: a load of 16 bytes
FEW = 2**22  # elements of a result that the L2 cache holds
MEASURED = 2**26  # elements of y, from which on the forward kernel was measured


def slower_primal(gate_up: Any, **_: Any) -> str | None:
    """Why "auto" leaves the gated product to XLA, or None."""
    if gate_up.size < 2 * MEASURED:
        return f"fewer than {MEASURED} elements were not measured"
    return None


def slower_bwd(dy: Any, **_: Any) -> str | None:
    """Why "auto" leaves the gradients to XLA, or None."""
    if dy.size < FEW:
        return f"{dy.size} elements, fewer than {FEW}, stay in the L2 cache"
    return None


@jit
def own_tile(
    NUM_ROWS: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows, columns and which of them are."""
    stripes: tl.constexpr = (F + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    first = (program // stripes).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)[:, None]
    column = (program % stripes).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, column, (row < NUM_ROWS) & (column < F)


@jit
def within(z, u, LIMIT: tl.constexpr):
    """Gate and up within their bounds, and where they were beyond."""
    z_beyond, u_beyond = z > LIMIT, tl.abs(u) > LIMIT
    z = tl.where(z_beyond, LIMIT, z)
    u = tl.where(u_beyond, tl.where(u > 0, LIMIT, -LIMIT), u)
    return z, u, z_beyond, u_beyond


@jit
def packed_swiglu_kernel(
    gate_up_ptr,
    y_ptr,
    NUM_ROWS: tl.constexpr,
    F: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, inside = own_tile(NUM_ROWS, F, ROWS, BLOCK)
    at = gate_up_ptr + row * (2 * F) + column
    z = tl.load(at, inside, 0.0).to(tl.float32)
    u = tl.load(at + F, inside, 0.0).to(tl.float32)
    if LIMIT is not None:
        z, u, _, _ = within(z, u, LIMIT)
    y = z / (1 + tl.exp(-ALPHA * z)) * (u + UP_OFFSET)
    tl.store(y_ptr + row * F + column, y, inside)


@jit
def swiglu_bwd_kernel(
    gate_ptr,
    up_ptr,
    dy_ptr,
    dgate_ptr,
    dup_ptr,
    NUM_ROWS: tl.constexpr,
    F: tl.constexpr,
    APART: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """APART: elements from a row of gate to the next; without `up_ptr` the row of up
    lies behind that of the gate."""
    row, column, inside = own_tile(NUM_ROWS, F, ROWS, BLOCK)
    at = row * APART + column
    z = tl.load(gate_ptr + at, inside, 0.0).to(tl.float32)
    if up_ptr is not None:
        u = tl.load(up_ptr + at, inside, 0.0).to(tl.float32)
    else:
        u = tl.load(gate_ptr + F + at, inside, 0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * F + column, inside, 0.0).to(tl.float32)
    if LIMIT is not None:
        z, u, z_beyond, u_beyond = within(z, u, LIMIT)
    s = 1 / (1 + tl.exp(-ALPHA * z))
    dgate = dy * (u + UP_OFFSET) * s * (1 + ALPHA * z * (1 - s))
    dup = dy * z * s
    if LIMIT is not None:
        dgate = tl.where(z_beyond, 0.0, dgate)
        dup = tl.where(u_beyond, 0.0, dup)
    if dgate_ptr is not None:
        tl.store(dgate_ptr + at, dgate, inside)
        if up_ptr is None:
            tl.store(dgate_ptr + F + at, dup, inside)
    if dup_ptr is not None:
        tl.store(dup_ptr + at, dup, inside)


def tile(rows: int, f: int) -> dict[str, int]:
    """The widest block of which as good as nothing lies beyond a row."""
    widths = (ELEMENTS, ELEMENTS // 2, ELEMENTS // 4)
    whole = [n for n in widths if f % n == 0]
    block = whole[0] if whole else min(next_power_of_2(f), ELEMENTS // 2)
    together = max(1, min(ELEMENTS // block, next_power_of_2(rows)))
    warps = max(1, together * block // (8 * WARP))
    return {"BLOCK": block, "ROWS": together, "num_warps": warps}


def packed_swiglu(gate_up: jax.Array, **options: Any) -> jax.Array | None:
    *leading, width = gate_up.shape
    y = jax.ShapeDtypeStruct((*leading, width // 2), gate_up.dtype)
    rows = gate_up.size // width if width else 0
    sizes = tile(rows, width // 2)
    [result] = sparse_call(
        packed_swiglu_kernel,
        (programs_of(rows, width // 2, sizes),),
        {"gate_up_ptr": gate_up},
        {"y_ptr": y},
        {
            "NUM_ROWS": rows,
            "F": width // 2,
            **{name.upper(): x for name, x in options.items()},
            **sizes,
        },
    )
    return result


def programs_of(rows: int, f: int, sizes: dict[str, int]) -> int:
    return -(-rows // sizes["ROWS"]) * -(-f // sizes["BLOCK"])


def gradients(
    gate: jax.Array,
    up: jax.Array | None,
    dy: jax.Array,
    dgate: Any,
    dup: Any,
    options: dict[str, Any],
) -> tuple[jax.Array | None, ...]:
    """Those of gate and up, of these shapes and dtypes; of a packed gate it is one."""
    f = dy.size if up is not None else dy.shape[-1]
    rows = dy.size // f if f else 0
    sizes = tile(rows, f)
    return sparse_call(
        swiglu_bwd_kernel,
        (programs_of(rows, f, sizes),),
        {"gate_ptr": gate, "up_ptr": up, "dy_ptr": dy},
        {"dgate_ptr": dgate, "dup_ptr": dup},
        {
            "NUM_ROWS": rows,
            "F": f,
            "APART": f if up is not None else 2 * f,
            **{name.upper(): x for name, x in options.items()},
            **sizes,
        },
    )


def swiglu_bwd(
    gate: jax.Array,
    up: jax.Array,
    dy: jax.Array,
    *,
    wanted: Sequence[bool],
    **options: Any,
) -> tuple[jax.Array | None, ...]:
    dgate, dup = (
        like(x) if w else None for x, w in zip((gate, up), wanted, strict=True)
    )
    return gradients(gate, up, dy, dgate, dup, options)


def packed_swiglu_bwd(
    gate_up: jax.Array, dy: jax.Array, **options: Any
) -> jax.Array | None:
    return gradients(gate_up, None, dy, like(gate_up), None, options)[0]
