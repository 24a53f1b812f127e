"""What convolutions and pooling say of a window: layouts, strides, pads."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

Layout = Literal["NCHW", "NHWC"]
Pair = tuple[int, int]
Padding = int | Sequence[int] | Sequence[Pair] | str


def to_nchw(op: str, x: jax.Array, layout: str) -> jax.Array:
    if layout not in ("NCHW", "NHWC"):
        raise ValueError(f"{op}: `layout` must be 'NCHW' or 'NHWC', got {layout!r}.")
    return x if layout == "NCHW" else jnp.moveaxis(x, -1, -3)


def from_nchw(y: jax.Array, layout: str) -> jax.Array:
    return y if layout == "NCHW" else jnp.moveaxis(y, -3, -1)


def pair(op: str, name: str, value: Any, least: int = 1) -> Pair:
    """One number for both dims, or (vertical, horizontal)."""
    both = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(both) != 2 or not all(isinstance(n, int) and n >= least for n in both):
        raise ValueError(
            f"{op}: `{name}` must be one or two integers of at least {least}, got "
            f"{value!r}."
        )
    return both


def pads(
    op: str, padding: Padding, sizes: Sequence[int], reach: Pair, stride: Pair
) -> tuple[Pair, Pair]:
    """((top, bottom), (left, right)) for windows that reach over so many pixels."""
    if isinstance(padding, str):
        if padding not in ("SAME", "VALID"):
            raise ValueError(
                f"{op}: `padding` must be numbers, 'SAME' or 'VALID', got {padding!r}."
            )
        rows, columns = lax.padtype_to_pads(tuple(sizes), reach, stride, padding)
        return (rows[0], rows[1]), (columns[0], columns[1])
    if not isinstance(padding, int) and any(not isinstance(p, int) for p in padding):
        if len(padding) != 2:
            raise ValueError(f"{op}: `padding` must have two pairs, got {padding!r}.")
        rows, columns = (pair(op, "padding", p, 0) for p in padding)
        return rows, columns
    vertical, horizontal = pair(op, "padding", padding, 0)
    return (vertical, vertical), (horizontal, horizontal)


def check_fits(op: str, sizes: Sequence[int], reach: Pair, padding) -> None:
    padded = tuple(n + lo + hi for n, (lo, hi) in zip(sizes, padding, strict=True))
    if min(reach) < 1 or any(r > n for r, n in zip(reach, padded, strict=True)):
        raise ValueError(
            f"{op}: a window over {reach[0]} x {reach[1]} pixels does not fit an image "
            f"of {padded[0]} x {padded[1]}, its padding included."
        )


def shifts(x: jax.Array, axis: int, window: int, stride: int, padding: Pair, fill):
    """For each place in a window along one axis, x at that place of every window."""
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (*padding, 0)
    padded = lax.pad(x, jnp.asarray(fill, x.dtype), config)
    last = padded.shape[axis] - window
    return [
        lax.slice_in_dim(padded, k, k + last + 1, stride, axis) for k in range(window)
    ]
