"""Blocks of query rows, so that few scores exist at a time: MAX_SCORES_BYTES."""

import jax.numpy as jnp
from jax import lax

MAX_SCORES_BYTES = 2**28  # more than this goes through blocks of query rows
ROW_AXIS = {  # where t stands in what has one row per query
    "query": 1,
    "bias": 2,
    "mask": 2,
    "q_segment_ids": 1,
    "out": 1,
    "tail": 1,
    "lse": 1,
    "dout": 1,
    "dlse": 1,
}


def rows_at_once(query, key):
    """How many query rows have at most MAX_SCORES_BYTES of float32 scores."""
    b, t, n, _ = query.shape
    row_bytes = 4 * b * n * key.shape[1]
    if not isinstance(row_bytes, int):
        return t  # symbolic sizes: all rows at once
    return max(1, MAX_SCORES_BYTES // max(1, row_bytes))


def split_rows(rows, block):
    """((start, rows) stacked over blocks of t, what has no rows of its own).

    The last block is padded with zeros; lse = -inf keeps those rows out of all sums.
    """
    t = rows["query"].shape[1]
    starts = jnp.arange(0, t, block)
    has_rows = [
        name
        for name, x in rows.items()
        if x is not None and x.shape[ROW_AXIS[name]] == t
    ]

    def split(name, x):
        axis = ROW_AXIS[name]
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, len(starts) * block - t)
        x = jnp.pad(x, pad, constant_values=-jnp.inf if name == "lse" else 0)
        x = x.reshape(*x.shape[:axis], len(starts), block, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    blocks = {name: split(name, rows[name]) for name in has_rows}
    shared = {name: x for name, x in rows.items() if name not in has_rows}
    return (starts, blocks), shared


def join_rows(blocks, name, query):
    """The inverse of split for one result."""
    axis = ROW_AXIS[name]
    x = jnp.moveaxis(blocks, 0, axis)
    rows = x.shape[axis] * x.shape[axis + 1]  # -1 would need a size other than 0
    x = x.reshape(*x.shape[:axis], rows, *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, query.shape[1], axis=axis)
