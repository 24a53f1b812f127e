"""Weights, products, rows and experts of interleaved blocks, by packed_products.py."""

import math

import jax.numpy as jnp

from jaxkern.triton.quant.packed_products import (
    TILE,
    decoded,
    multiply,
    multiply_routed,
    refusal,
    refusal_of_routed,
    unsupported_tiles,
)

FLOATS = ("float32", "bfloat16", "float16")


def unsupported(x, tiles, *, qtype, compute_dtype) -> str | None:
    return refusal(x, tiles, qtype, compute_dtype)


def interleaved_matmul(x, tiles, *, qtype, compute_dtype):
    return multiply(x, tiles, qtype, compute_dtype)


def unsupported_weights(tiles, *, qtype, dtype) -> str | None:
    if jnp.dtype(dtype).name not in FLOATS:
        return f"`dtype` is {jnp.dtype(dtype)}"
    return unsupported_tiles(tiles, qtype)


def dequantize_interleaved(tiles, *, qtype, dtype):
    w = decoded(tiles.reshape(-1, tiles.shape[-1]), qtype, dtype)
    return w.reshape(*tiles.shape[:-1], TILE, w.shape[-1])


def unsupported_embedding(ids, tiles, *, qtype, dtype) -> str | None:
    if jnp.dtype(dtype).name not in FLOATS:
        return f"`dtype` is {jnp.dtype(dtype)}"
    if not math.prod(ids.shape):
        return "there are no elements"
    return unsupported_tiles(tiles, qtype, ids=ids)


def interleaved_embedding(ids, tiles, *, qtype, dtype):
    return decoded(tiles, qtype, dtype, ids)


def unsupported_id(x, ids, tiles, *, qtype, compute_dtype) -> str | None:
    return refusal_of_routed(x, ids, tiles, qtype, compute_dtype)


def interleaved_matmul_id(x, ids, tiles, *, qtype, compute_dtype):
    return multiply_routed(x, ids, tiles, qtype, compute_dtype)
