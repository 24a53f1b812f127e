"""Masks for `attention`: which keys a query sees, as bool, as a bias, or by tiles.

A mask is bool, True where a key may be seen (attention's `mask`), or with a float dtype
0 there and -inf elsewhere (attention's `bias`). The order is [b, n, t, s]; masks of the
same kind combine by `&`, those of the other by `+`.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, UInt8

from jaxkern.primitives.check_arguments import check_arguments

SKIP, MIXED, FULL = 0, 1, 2  # tiles: no visible pair; some; all, so no mask is needed
HIDDEN = -1e30  # a bias at or below it hides a key: exp of it is 0


@check_arguments
def make_mask(
    q_len: int,
    kv_len: int,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    q_offset: int | Int[Array, ""] | Int[Array, " b"] | None = None,
    dtype: Any = jnp.bool_,
) -> Bool[Array, "*b t s"] | Float[Array, "*b t s"]:
    """Which keys a query sees by its position: attention's `causal` and `window`.

        mask[i, j] = (j <= p, if causal) and (p - window < j, if window)
        p = i + q_offset

    Args:
      q_len, kv_len: t queries and s keys.
      causal: queries see no key after their own position.
      window: number of keys, with causal the last ones, the query's own among them.
        mlx-native's `sdpa_sliding(W)` and `jax.nn`'s `local_window_size=W` are W + 1.
        (left, right): see `attention`.
      q_offset: position of query 0 among the keys, a number or `[b]`, may be traced.
        Default s - t: the last query sees the last key.
      dtype: bool, or a float dtype for 0 and -inf.

    Returns:
      `[t, s]`, or `[b, 1, t, s]` where q_offset is `[b]`.

    Raises:
      ValueError: window is below 1, or a pair that counts no keys.

    Example:
      >>> jaxkern.make_mask(2, 4, causal=True, window=2).astype(int)
      Array([[0, 1, 1, 0],
             [0, 0, 1, 1]], dtype=int32)
    """
    causal, window, shift = as_causal("make_mask", window, causal)
    offset = jnp.asarray(kv_len - q_len if q_offset is None else q_offset) + shift
    p = offset[..., None, None] + jnp.arange(q_len)[:, None]
    behind = p - jnp.arange(kv_len)  # [t s] or [b t s]
    visible = jnp.ones(behind.shape, bool)
    if causal:
        visible &= behind >= 0
    if window is not None:
        visible &= behind < window
    return as_mask(visible if offset.ndim == 0 else visible[:, None], dtype)


@check_arguments
def segment_mask(
    q_segment_ids: Int[Array, "b t"],
    kv_segment_ids: Int[Array, "b s"],
    *,
    dtype: Any = jnp.bool_,
) -> Bool[Array, "b 1 t s"] | Float[Array, "b 1 t s"]:
    """Packed sequences: a query sees the keys of its own segment.

        mask[b, 0, i, j] = q_segment_ids[b, i] == kv_segment_ids[b, j]

    Args:
      q_segment_ids, kv_segment_ids: `[b, t]` and `[b, s]`. An id of the keys that no
        query has marks padding.
      dtype: bool, or a float dtype for 0 and -inf.

    Returns:
      `[b, 1, t, s]`.

    Raises:
      TypeError: an argument is not of its kind or dtype.

    Example:
      >>> ids = jnp.array([[0, 0, 1]])
      >>> jaxkern.segment_mask(ids, ids)[0, 0].astype(int)
      Array([[1, 1, 0],
             [1, 1, 0],
             [0, 0, 1]], dtype=int32)
    """
    same = q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]
    return as_mask(same[:, None], dtype)


@check_arguments
def padding_mask(
    kv_lengths: Int[Array, " b"], kv_len: int, *, dtype: Any = jnp.bool_
) -> Bool[Array, "b 1 1 s"] | Float[Array, "b 1 1 s"]:
    """Keys behind the end of each sequence are hidden: attention's `kv_lengths`.

        mask[b, 0, 0, j] = j < kv_lengths[b]

    Args:
      kv_lengths: `[b]` int.
      kv_len: s keys.
      dtype: bool, or a float dtype for 0 and -inf.

    Returns:
      `[b, 1, 1, s]`.

    Raises:
      TypeError: an argument is not of its kind or dtype.

    Example:
      >>> jaxkern.padding_mask(jnp.array([1, 3]), 4)[:, 0, 0].astype(int)
      Array([[1, 0, 0, 0],
             [1, 1, 1, 0]], dtype=int32)
    """
    inside = jnp.arange(kv_len) < kv_lengths[:, None]
    return as_mask(inside[:, None, None], dtype)


@check_arguments
def block_mask(
    mask: Bool[Array, "... t s"] | Float[Array, "... t s"],
    *,
    block_q: int,
    block_kv: int,
) -> UInt8[Array, "... i j"]:
    """What each tile of `block_q` queries by `block_kv` keys needs of a mask.

        0  skip: no pair is visible (bool: all False; additive: all <= -1e30)
        1  mixed: the mask must be read
        2  full: the mask changes nothing (bool: all True; additive: all 0)

    A kernel that skips the 0 tiles and does not read the mask of the 2 tiles gives the
    same bits. (So does one for finite biases of -1e30, but in a row that has no others:
    there `attention` sees keys of equal bias, and this map none.) In a tile that
    reaches over the edge only the pairs that exist count.

    Args:
      mask: `[..., t, s]`, bool or additive.
      block_q, block_kv: size of a tile.

    Returns:
      uint8 `[..., ceil(t / block_q), ceil(s / block_kv)]`.

    Raises:
      TypeError: an argument is not of its kind or dtype.

    Example:
      >>> mask = jaxkern.make_mask(4, 4, causal=True)
      >>> jaxkern.block_mask(mask, block_q=2, block_kv=2)
      Array([[1, 0],
             [2, 1]], dtype=uint8)
    """
    is_bool = mask.dtype == jnp.bool_
    # a NaN is neither hidden nor nothing: its tile is mixed
    hidden = ~mask if is_bool else mask <= HIDDEN
    nothing = mask if is_bool else mask == 0
    *lead, t, s = mask.shape
    tiles = (-(-t // block_q), block_q, -(-s // block_kv), block_kv)
    edge = [(0, tiles[0] * block_q - t), (0, tiles[2] * block_kv - s)]
    pad = [(0, 0)] * len(lead) + edge

    def of_whole_tile(x):
        x = jnp.pad(x, pad, constant_values=True).reshape(*lead, *tiles)
        return jnp.all(x, axis=(-3, -1))

    return tile_kind(of_whole_tile(hidden), of_whole_tile(nothing))


@check_arguments
def make_block_mask(
    q_len: int,
    kv_len: int,
    *,
    block_q: int,
    block_kv: int,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    q_offset: int | Int[Array, ""] | Int[Array, " b"] | None = None,
) -> UInt8[Array, "... i j"]:
    """`block_mask(make_mask(...))` without the mask: work and memory per tile.

    Args:
      q_len, kv_len: t queries and s keys.
      block_q, block_kv: size of a tile, in queries and keys.
      causal, window, q_offset: see make_mask.

    Returns:
      uint8 `[i, j]`, or `[b, 1, i, j]` where q_offset is `[b]`.

    Raises:
      TypeError: an argument is not of its kind or dtype.
      ValueError: window is below 1, or a pair that counts no keys.

    Example:
      >>> jaxkern.make_block_mask(4, 4, block_q=2, block_kv=2, causal=True)
      Array([[1, 0],
             [2, 1]], dtype=uint8)
      >>> jaxkern.make_block_mask(1 << 17, 1 << 17, block_q=128, block_kv=128).shape
      (1024, 1024)
    """
    causal, window, shift = as_causal("make_block_mask", window, causal)
    offset = jnp.asarray(kv_len - q_len if q_offset is None else q_offset) + shift
    i = jnp.arange(0, q_len, block_q)[:, None]
    j = jnp.arange(0, kv_len, block_kv)
    offset = offset[..., None, None]
    # p - j takes every value from `least` to `most` in a tile
    least = offset + i - (jnp.minimum(j + block_kv, kv_len) - 1)
    most = offset + (jnp.minimum(i + block_q, q_len) - 1) - j
    hidden, nothing = jnp.zeros(least.shape, bool), jnp.ones(least.shape, bool)
    if causal:
        hidden, nothing = hidden | (most < 0), nothing & (least >= 0)
    if window is not None:
        hidden, nothing = hidden | (least >= window), nothing & (most < window)
    kind = tile_kind(hidden, nothing)
    return kind if kind.ndim == 2 else kind[:, None]


def tile_kind(hidden, nothing):
    kind = jnp.where(hidden, SKIP, jnp.where(nothing, FULL, MIXED))
    return kind.astype(jnp.uint8)


def as_mask(visible, dtype):
    if dtype == jnp.bool_:
        return visible
    return jnp.where(visible, 0, -jnp.inf).astype(dtype)


def check_window(op, window):
    if window is None:
        return
    if window < 1:
        raise ValueError(f"{op}: window is {window}. It counts keys: 1 or more.")
    if window != int(window) or window >= 2**31:
        raise ValueError(
            f"{op}: window is {window}. It counts keys: a whole number below 2**31, "
            "None for all."
        )


def as_causal(op, window, causal):
    """(causal, window of keys, shift) that show what `causal` and `window` do.

    A query sees from `left` keys before its position to `right` behind it, as a causal
    one does that stands `right` further on and has a window of left + right + 1.
    """
    if isinstance(window, Tracer | str | bytes):
        got = "a traced array" if isinstance(window, Tracer) else repr(window)
        raise TypeError(
            f"{op}: `window` must be a static int or (left, right), got {got}. Close "
            "over the number, or name it in static_argnames."
        )
    if not isinstance(window, tuple | list):
        window = int(window) if isinstance(window, np.integer) else window
        check_window(op, window)
        return causal, window, 0
    whole = all(
        x is None or (isinstance(x, int | np.integer) and 0 <= x < 2**30)
        for x in window
    )
    if len(window) != 2 or not whole:
        raise ValueError(
            f"{op}: window is {tuple(window)}. A pair counts the keys before and "
            "behind a query's own: two whole numbers below 2**30, None for all."
        )
    left, right = (None if x is None else int(x) for x in window)
    right = 0 if causal else right
    if right is None:
        return False, None if left is None else left + 1, 0
    return True, None if left is None else left + right + 1, right


def checked_visibility(op, causal, window, softcap, q_offset, kv_lengths, t, s):
    """(causal, window of keys, q_offset) of t queries over s keys; checks softcap too.

    None for q_offset where it is the default, or not read.
    """
    causal, window, shift = as_causal(op, window, causal)
    check_softcap(op, softcap)
    positioned = causal or window is not None
    if positioned and q_offset is None and kv_lengths is not None and t != s:
        raise ValueError(
            f"{op}: with kv_lengths and t != s the position of the queries is "
            "ambiguous. Pass q_offset: kv_lengths - t if they are the last tokens."
        )
    if shift:
        q_offset = (s - t if q_offset is None else q_offset) + shift
    if not positioned or (isinstance(q_offset, int) and q_offset == s - t):
        q_offset = None
    return causal, window, q_offset


def check_softcap(op, softcap):
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{op}: softcap is {softcap}. Leave it out for no cap.")
