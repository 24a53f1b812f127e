"""Attention of a few queries over a latent cache, whose rows are key and value at once.

One program takes up to 64 rows, heads times queries, and a share of the tokens. The
value part of a row is a key and a value in one tile of shared memory, so it is read
once; the rotated part is a second, small product. Shares are merged as in
merge_shares.py. Programs of further heads read the same tokens at the same time,
from the L2 cache.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.attention.over_sequences import over_sequences
from jaxkern.gpu.device import next_power_of_2, num_sms
from jaxkern.gpu.triton_call import jit, max_shared_bytes, tl
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.triton.attention.decode.attention import FAR, MAX_QUERIES
from jaxkern.triton.attention.decode.decode_kernel import (
    added_weights,
    share_and_lse,
    share_of_keys,
    shown_scores,
)
from jaxkern.triton.attention.decode.decode_sizes import num_splits
from jaxkern.triton.attention.merge_shares import LOG2E, run_and_merge

MAX_VALUE_DIM = 512
MAX_REST = 128
MAX_ROWS = 64  # of a program


def unsupported(
    query: Any, latent: Any, value_dim: int, dout: Any = None, **rest: Any
) -> str | None:
    """A reason in words, or None."""
    del rest
    for name, x in (("query", query), ("latent", latent)):
        if x.dtype not in (jnp.bfloat16, jnp.float16):
            return f"`{name}` is {x.dtype}"
        if x.size == 0:
            return f"`{name}` is empty"
    if query.dtype != latent.dtype:
        return f"`query` is {query.dtype}, `latent` {latent.dtype}"
    _, t, _, h = query.shape
    if t > MAX_QUERIES:
        return f"{t} queries, more than {MAX_QUERIES}"
    if value_dim > MAX_VALUE_DIM or value_dim & (value_dim - 1) or value_dim < 16:
        return f"value_dim {value_dim} is no power of two from 16 to {MAX_VALUE_DIM}"
    if h - value_dim > MAX_REST:
        return f"{h - value_dim} dims behind the value, more than {MAX_REST}"
    return unsupported_anywhere()


def sizes_of(t: int, n: int, sequences: int) -> dict[str, int]:
    """Tokens of about 150 KB in flight beside the queries; finer where few programs."""
    rows = min(max(next_power_of_2(t * n), 16), MAX_ROWS)
    if max_shared_bytes() < 200 * 1024:
        block, stages = 16, 2
    elif rows == MAX_ROWS and t > 1:
        block, stages = 32, 3  # masks for each row need registers
    elif rows == MAX_ROWS or 2 * sequences >= num_sms():
        block, stages = 64, 2
    else:
        block, stages = 32, 4
    rule = {"ROWS": rows, "BLOCK": block, "num_warps": 4 if rows == 16 else 8}
    return rule | {"num_stages": stages}


@jit
def latent_attention_kernel(
    query_ptr,
    latent_ptr,
    kv_lengths_ptr,
    q_offset_ptr,
    out_ptr,
    lse_ptr,
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    S: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAR: tl.constexpr,
    LOG2E: tl.constexpr,
    SPLITS: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """As decode_attention_kernel, with one key head and rows in TILES programs."""
    program = tl.program_id(0)
    tile = program % TILES
    split = program // TILES % SPLITS
    b = (program // (TILES * SPLITS)).to(tl.int64)

    first, start, stop, position = share_of_keys(
        b, split, SPLITS, kv_lengths_ptr, q_offset_ptr, S, T, CAUSAL, WINDOW, FAR, BLOCK
    )

    # row r is query r // N of head r % N
    r = tile * ROWS + tl.arange(0, ROWS)
    present = r < T * N
    row = b * (T * N) + r
    p_at = position + r // N
    dims = tl.arange(0, HV)
    at_q = query_ptr + row[:, None] * H
    q = tl.load(at_q + dims[None, :], present[:, None], 0.0)
    if H > HV:
        rest = tl.arange(0, REST)
        q_rest_mask = present[:, None] & (rest < H - HV)[None, :]
        q_rest = tl.load(at_q + HV + rest[None, :], q_rest_mask, 0.0)

    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HV], tl.float32)
    for at in tl.range(start, stop, BLOCK):
        j = at + tl.arange(0, BLOCK)
        inside = (j >= first) & (j < stop)
        where = latent_ptr + (b * S + j)[:, None] * H
        x = tl.load(where + dims[None, :], inside[:, None], 0.0)
        z = tl.dot(q, tl.trans(x))
        if H > HV:
            rest_mask = inside[:, None] & (rest < H - HV)[None, :]
            x_rest = tl.load(where + HV + rest[None, :], rest_mask, 0.0)
            z = tl.dot(q_rest, tl.trans(x_rest), z)
        z = shown_scores(z, inside, j, p_at, T, SCALE, CAUSAL, WINDOW, SOFTCAP, LOG2E)
        p, shrink, total, top = added_weights(z, top, total)
        acc = tl.dot(p.to(x.dtype), x, acc * shrink[:, None])

    seen, total, lse = share_and_lse(top, total, SPLITS, LOG2E)
    to = row * SPLITS + split
    tl.store(lse_ptr + to, lse, present)
    # the merge reads no share without tokens
    if SPLITS > 1:
        present = present & seen
    out = acc / total[:, None]
    tl.store(out_ptr + to[:, None] * HV + dims[None, :], out, present[:, None])


def launch(
    query: jax.Array,
    latent: jax.Array,
    kv_lengths: jax.Array | None,
    q_offset: jax.Array | None,
    *,
    value_dim: int,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> tuple:
    b, t, n, h = query.shape
    s = latent.shape[1]
    sizes = sizes_of(t, n, b)
    tiles, block = -(-t * n // sizes["ROWS"]), sizes["BLOCK"]
    splits = num_splits(
        b * tiles,
        0,  # rows of the merge: the shares were measured without them
        s if window is None else min(s, window + t - 1 + block),
        block * h * latent.dtype.itemsize,
        b > 1 and kv_lengths is not None,
        {"BLOCK": block, "PER_SM": 1},
    )
    given = {
        "query_ptr": query,
        "latent_ptr": latent,
        "kv_lengths_ptr": kv_lengths,
        "q_offset_ptr": q_offset if causal or window is not None else None,
    }
    constants = {
        "T": t,
        "N": n,
        "H": h,
        "HV": value_dim,
        "S": s,
        "SCALE": scale,
        "CAUSAL": causal,
        "WINDOW": None if window is None else min(window, FAR),
        "SOFTCAP": softcap,
        "FAR": FAR,
        "LOG2E": LOG2E,
        "SPLITS": splits,
        "TILES": tiles,
        "REST": max(next_power_of_2(h - value_dim), 16),
    }
    return run_and_merge(
        latent_attention_kernel,
        b * tiles * splits,
        given,
        constants | sizes,
        jax.ShapeDtypeStruct((b, t, n, value_dim), query.dtype),
        None,
    )


def latent_attention_fwd(query, latent, kv_lengths, q_offset, **options):
    operands = query, latent, kv_lengths, q_offset
    return over_sequences(launch, (1,), (), *operands, **options)
