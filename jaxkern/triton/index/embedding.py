"""Gradient of an embedding: dtable[r] = sum of dy[i] over all i with ids[i] = r.

The ids are sorted once with their positions, so equal ids stand side by side. A program
sums such a run in float32 and writes its row; all other rows are zeros. A run is cut
at every PIECE positions and a second kernel adds the parts, so a frequent id costs no
more than a rare one. The order of every sum is fixed: the same bits in every run.
Bytes: dy once and dtable once, where a scatter-add has a float32 table besides, filled
with zeros and rounded at the end.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import jit, like, tl, triton_call
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.index.embedding import nearest_rows

PIECE = 128  # positions
TOGETHER = 8  # rows that are loaded at once
LEAST = 2**23  # elements of a table; into a smaller one a scatter-add is as fast


def unsupported(table: Any, **named: Any) -> str | None:
    """A reason in words, or None."""
    if table.size < LEAST:
        return f"XLA is as fast with a table of fewer than {LEAST} elements"
    return unsupported_anywhere(table=table)


@jit
def run_sums_kernel(
    ids_ptr,
    order_ptr,
    dy_ptr,
    zeros_ptr,
    dtable_ptr,
    heads_ptr,
    tails_ptr,
    N: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum over each run of equal ids, or over its part within a piece."""
    place = tl.program_id(0)
    mine = tl.load(ids_ptr + place)
    begins = (place == 0) | (tl.load(ids_ptr + place - 1, place > 0, 0) != mine)
    if (mine < V) & (begins | (place % PIECE == 0)):
        piece = place // PIECE
        end = tl.minimum((piece + 1) * PIECE, N)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < D
        total = tl.zeros([BLOCK], tl.float32)
        at = place
        count = ROWS
        while count == ROWS:
            places = at + tl.arange(0, ROWS)
            same = tl.load(ids_ptr + places, places < end, V) == mine
            rows = tl.load(order_ptr + places, same, 0).to(tl.int64)[:, None]
            mask = same[:, None] & inside[None, :]
            dy = tl.load(dy_ptr + rows * D + columns[None, :], mask, 0.0)
            total += tl.sum(dy.to(tl.float32), 0)
            count = tl.sum(same.to(tl.int32), 0)
            at += count
        goes_on = (at == end) & (tl.load(ids_ptr + end, end < N, V) == mine)
        part = piece.to(tl.int64) * D + columns
        if not begins:
            tl.store(tails_ptr + part, total, inside)
        elif goes_on:
            tl.store(heads_ptr + part, total, inside)
        else:
            tl.store(dtable_ptr + mine.to(tl.int64) * D + columns, total, inside)


@jit
def join_runs_kernel(
    ids_ptr,
    heads_ptr,
    tails_ptr,
    partial_ptr,
    dtable_ptr,
    N: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of the runs that begin in a piece and go on beyond it."""
    piece = tl.program_id(0)
    after = (piece + 1) * PIECE
    mine = tl.load(ids_ptr + after - 1, after < N, V)
    before = tl.load(ids_ptr + piece * PIECE - 1, piece > 0, V)
    goes_on = tl.load(ids_ptr + after, after < N, V) == mine
    if (mine < V) & goes_on & (before != mine):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < D
        head = piece.to(tl.int64) * D + columns
        total = tl.load(heads_ptr + head, inside, 0.0)
        at = piece + 1
        count = ROWS
        while count == ROWS:
            pieces = at + tl.arange(0, ROWS)
            same = tl.load(ids_ptr + pieces * PIECE, pieces < PIECES, V) == mine
            mask = same[:, None] & inside[None, :]
            tails = pieces.to(tl.int64)[:, None] * D + columns[None, :]
            total += tl.sum(tl.load(tails_ptr + tails, mask, 0.0), 0)
            count = tl.sum(same.to(tl.int32), 0)
            at += count
        tl.store(dtable_ptr + mine.to(tl.int64) * D + columns, total, inside)


def embedding_bwd(
    ids: jax.Array, table: jax.Array, dy: jax.Array, *, out_of_bounds: str
) -> jax.Array:
    v, d = table.shape
    n = ids.size
    rows, inside = nearest_rows(ids, v)
    if out_of_bounds == "zeros":
        rows = jnp.where(inside, rows, v)  # no row: sorted to the end and left out
    places = lax.iota(jnp.int32, n)
    found, order = lax.sort((rows.reshape(n), places), num_keys=1, is_stable=True)
    block = min(next_power_of_2(d), 1024)
    pieces, stripes = -(-n // PIECE), -(-d // block)
    parts = jax.ShapeDtypeStruct((pieces, d), jnp.float32)
    sizes = {"N": n, "V": v, "D": d, "PIECE": PIECE, "ROWS": TOGETHER, "BLOCK": block}
    num_warps = max(1, block * TOGETHER // 2048)
    dtable, heads, tails = triton_call(
        run_sums_kernel,
        found,
        order,
        dy,
        jnp.zeros_like(table),
        out=[like(table), parts, parts],
        grid=(n, stripes),
        aliases=((3, 0),),
        num_warps=num_warps,
        **sizes,
    )
    (dtable,) = triton_call(
        join_runs_kernel,
        found,
        heads,
        tails,
        dtable,
        out=[like(table)],
        grid=(pieces, stripes),
        aliases=((3, 0),),
        num_warps=num_warps,
        PIECES=pieces,
        **sizes,
    )
    return dtable
