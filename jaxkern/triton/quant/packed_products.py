"""Products with interleaved rows of GGUF blocks on NVIDIA GPUs, for any number of rows.

One activation goes to a kernel that takes in the norm before and the gate or the
addition after; before Hopper up to eight do. More go to several_products.py, unless it
says that writing the weights once as bfloat16 takes less: then XLA multiplies.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.bulk_ring import OLDEST_WITH_BULK_COPIES, ring_bytes
from jaxkern.gpu.device import compute_capability, next_power_of_2, num_sms
from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import max_shared_bytes, sparse_call
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.quant.interleaved_tensor import ROWS as TILE
from jaxkern.primitives.quant.interleaved_tensor import tile_width
from jaxkern.triton.quant.activations import (
    TERMS,
    gated,
    in_terms,
    normalised,
    terms_of,
)
from jaxkern.triton.quant.block_codes import BYTES, STEP
from jaxkern.triton.quant.decode_kernel import decode_tiles_kernel
from jaxkern.triton.quant.fixed_point_codes import FORMATS, bytes_of_step
from jaxkern.triton.quant.fixed_point_kernel import (
    bytes_of_sums,
    fixed_point_kernel,
)
from jaxkern.triton.quant.fixed_point_x import bytes_of_x
from jaxkern.triton.quant.product_kernel import packed_product_kernel
from jaxkern.triton.quant.several_products import is_read_packed, multiply_several

FEW = 8  # activations by terms, as many as a matrix instruction has columns for
COLUMNS = 64  # of one launch
SLOTS = 64  # rows of experts, each of which is read for itself
NORM_BYTES = 65_536  # of shared memory for activations
# of one activation the sums of groups are taken once, not by a second product
SUMMED = ("Q4_K", "Q5_K")
# warps; steps of each that come by bulk copies; how many of these before x
STEPS_ON_THEIR_WAY: dict[str, tuple[int, int, int]] = {
    **dict.fromkeys(FORMATS, (16, 3, 1)),
    "Q8_0": (8, 4, 2),
}
TOGETHER = 16  # tiles of the result whose sums a program keeps
PLAIN_BYTES = 1024  # of shared memory that the compiler may want


def refusal(
    x: Any, tiles: Any, qtype: str, compute_dtype: Any, **more: Any
) -> str | None:
    """Why no kernel runs, or None."""
    if reason := unsupported_tiles(tiles, qtype, x=x, **more):
        return reason
    if compute_dtype not in (None, jnp.float32, jnp.bfloat16):
        return f"compute_dtype is {compute_dtype}"
    if not math.prod(x.shape):
        return "there are no elements"
    if x.dtype.name not in TERMS:
        return f"`x` is {x.dtype}"
    rows, terms = num_rows(x), terms_of(x, compute_dtype)
    if rows * terms > COLUMNS and terms > 1:
        return f"{rows} activations of {terms} terms each, over {COLUMNS} in all"
    return None


def unsupported_tiles(tiles: Any, qtype: str, **more: Any) -> str | None:
    """Why no kernel reads these weights, or None."""
    if reason := unsupported_anywhere(**more):
        return reason
    if qtype not in BYTES:
        return f"{qtype} has no kernel, only {', '.join(BYTES)}"
    return None if math.prod(tiles.shape) else "there are no elements"


def multiply(
    x: jax.Array,
    tiles: jax.Array,
    qtype: str,
    compute_dtype: Any,
    *,
    norm: jax.Array | None = None,
    residual: jax.Array | None = None,
    eps: float = 0.0,
    up: jax.Array | None = None,
    activation: str | None = None,
) -> jax.Array:
    """`[..., u, 16]` of x `[..., k]` and tiles `[u, bytes]`, gated `[2, u, bytes]`.

    With `up` `[..., u, 16]` the tiles are those of the gate.
    """
    terms, rows = terms_of(x, compute_dtype), num_rows(x)
    units = math.prod(tiles.shape[:-1])
    if not is_read_packed(rows, terms, units, x.shape[-1], qtype):
        w = decoded(tiles.reshape(-1, tiles.shape[-1]), qtype)
        y = multiply_decoded(x, w, norm, residual, eps, up, activation)
        return y.reshape(*x.shape[:-1], -1, TILE)
    if rows * terms > most_at_once(terms):
        around = norm, residual, eps, up, activation
        return multiply_several(x, tiles, qtype, terms, *around)
    dtype = x.dtype  # of the result, also where float32 is multiplied as bfloat16
    narrow = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    if terms == 1 and norm is None and is_for_fixed_point(narrow, tiles, qtype):
        x = x.astype(jnp.bfloat16)
    gate: dict = dict(up=up, activation=activation)
    return launch(x, tiles, qtype, terms, norm, residual, eps, dtype=dtype, **gate)


def most_at_once(terms: int) -> int:
    """Activations by terms of the kernel that takes in what stands around a product.

    Each of its programs reads and normalises all of them, which those of
    several_products.py share: on Hopper two are faster there.
    """
    is_hopper = compute_capability() >= OLDEST_WITH_BULK_COPIES
    return 1 if terms == 1 and is_hopper else FEW


def launch(
    x: jax.Array,
    tiles: jax.Array,
    qtype: str,
    terms: int,
    norm: jax.Array | None,
    residual: jax.Array | None,
    eps: float,
    ids: jax.Array | None = None,
    dtype: Any = None,
    up: jax.Array | None = None,
    activation: str | None = None,
) -> jax.Array:
    """`multiply` by the kernel for few activations, in `dtype` or that of x.

    With ids `[activations, k]` and tiles `[experts, u, bytes]`: `[slots, u, 16]`.
    """
    dtype = dtype or x.dtype
    if ids is None and is_for_fixed_point(x, tiles, qtype):
        around = norm, residual, eps, up, activation
        return fixed_point(x, tiles, qtype, *around, dtype)
    rows, k = num_rows(x), x.shape[-1]
    *_, units, tile_bytes = tiles.shape
    shape = (*x.shape[:-1], units, TILE)
    if ids is not None:
        shape = (ids.size, units, TILE)
    copies, padded = next_power_of_2(rows * terms), next_power_of_2(max(k, 8 * STEP))
    if norm is not None and 2 * padded * copies > NORM_BYTES:
        x, norm = normalised(x, norm, eps, terms), None
    x = x.reshape(rows, k)
    if norm is None:
        x = in_terms(x, terms)
        rows = rows if ids is None else 1  # of a program
    both, steps = ids is None and tiles.ndim == 3, -(-k // STEP)
    shares, parts = sizes_of(qtype, units, steps, both, norm is not None)
    shares = min(shares, next_power_of_2(steps))  # x in shared memory ends there
    summed = rows * terms == 1 and ids is None and qtype in SUMMED
    summed = summed and 4 * padded <= NORM_BYTES
    [y] = sparse_call(
        packed_product_kernel,
        (units if both else -(-units // parts), 1 if ids is None else ids.size),
        {
            "x_ptr": x,
            "ids_ptr": None if ids is None else ids.reshape(-1).astype(jnp.int32),
            "norm_ptr": norm,
            "tiles_ptr": tiles,
            "up_ptr": up,
            "residual_ptr": residual,
        },
        {"y_ptr": jax.ShapeDtypeStruct(shape, dtype)},
        {
            "ROWS": rows,
            "TERMS": terms,
            "K": k,
            "NUM_BLOCKS": tile_bytes // (TILE * BYTES[qtype]),
            "TILES": units,
            "TILE_PAIRS": tile_bytes // 8,
            "FORMAT": qtype,
            "EPS": eps,
            "GATED": both,
            "ACTIVATION": activation,
            "PARTS": parts,
            "SHARES": shares,
            "PADDED": padded,
            "COPIES": copies,
            "WORDS": padded if summed else padded // 2 * copies,
            "TOP_K": 1 if ids is None else ids.shape[-1],
            "EXPERTS": 1 if ids is None else tiles.shape[0],
            "SUMMED": summed,
            "num_warps": shares * parts,
        },
    )
    assert y is not None
    return y


def fixed_point_formats() -> tuple[str, ...]:
    """Formats of which this GPU multiplies one activation by whole numbers."""
    return FORMATS if compute_capability() >= OLDEST_WITH_BULK_COPIES else ()


def is_for_fixed_point(x: Any, tiles: jax.Array, qtype: str) -> bool:
    """Whether one activation is multiplied by whole numbers."""
    k = x.shape[-1]
    return (
        qtype in fixed_point_formats()
        and num_rows(x) == 1
        and x.dtype != jnp.float32
        and k % STEP == 0
        and tiles.shape[-1] == k // STEP * bytes_of_step(qtype)
        and sizes_of_fixed_point(qtype, k, tiles.ndim == 3) is not None
    )


def fixed_point(
    x: jax.Array,
    tiles: jax.Array,
    qtype: str,
    norm: jax.Array | None,
    residual: jax.Array | None,
    eps: float,
    up: jax.Array | None,
    activation: str | None,
    dtype: Any,
) -> jax.Array:
    """`multiply` of one activation by whole numbers, in `dtype`."""
    k, units, both = x.shape[-1], tiles.shape[-2], tiles.ndim == 3
    sizes = sizes_of_fixed_point(qtype, k, both)
    assert sizes is not None
    warps, depth, early = sizes
    padded = next_power_of_2(max(k, 8 * STEP))
    programs = min(units, num_sms())
    at_once = min(next_power_of_2(-(-units // programs)), TOGETHER)
    [y] = sparse_call(
        fixed_point_kernel,
        (programs,),
        {
            "x_ptr": x,
            "norm_ptr": norm,
            "tiles_ptr": tiles,
            "up_ptr": up,
            "residual_ptr": residual,
        },
        {"y_ptr": jax.ShapeDtypeStruct((*x.shape[:-1], units, TILE), dtype)},
        {
            "K": k,
            "TILES": units,
            "FORMAT": qtype,
            "EPS": eps,
            "GATED": both,
            "ACTIVATION": activation,
            "PADDED": padded,
            "PROGRAMS": programs,
            "ROUND": at_once,
            "DEPTH": depth,
            "FIRST": early,
            "RING": memory_of(qtype, k, both, at_once, warps, depth),
            "num_warps": warps,
        },
    )
    assert y is not None
    return y


def memory_of(
    qtype: str, k: int, both: bool, tiles: int, warps: int, depth: int
) -> int:
    """Bytes of shared memory that a program has for itself."""
    x = bytes_of_x(next_power_of_2(max(k, 8 * STEP)), qtype)
    sums = bytes_of_sums(tiles * (1 + both), warps)
    return ring_bytes(warps, depth, bytes_of_step(qtype), x + sums)


def sizes_of_fixed_point(qtype: str, k: int, both: bool) -> tuple[int, int, int] | None:
    """Warps, steps of each on their way, and how many of these are asked for before x.

    As measured, or as many as there is memory for; None where there is too little.
    """
    warps, depth, early = STEPS_ON_THEIR_WAY[qtype]
    most = max_shared_bytes() - PLAIN_BYTES
    while depth > 1 and memory_of(qtype, k, both, TOGETHER, warps, depth) > most:
        warps, depth = (8, depth) if warps > 8 and depth < 3 else (warps, depth - 1)
    return (warps, depth, early) if depth > 1 else None


def refusal_of_routed(
    x: Any, ids: Any, tiles: Any, qtype: str, compute_dtype: Any
) -> str | None:
    """Why no kernel multiplies with experts that are named, or None."""
    if reason := refusal(x, tiles, qtype, compute_dtype, ids=ids):
        return reason
    if not ids.size:
        return "there are no elements"
    if ids.size > SLOTS:
        return f"{ids.size} rows are routed, over {SLOTS}"
    return None


def multiply_routed(
    x: jax.Array, ids: jax.Array, tiles: jax.Array, qtype: str, compute_dtype: Any
) -> jax.Array:
    """`[..., k, u, 16]` of x `[..., d]`, ids `[..., k]` and tiles of experts."""
    terms = terms_of(x, compute_dtype)
    y = launch(x, tiles, qtype, terms, None, None, 0.0, ids)
    return y.reshape(*ids.shape, *y.shape[1:])


def sizes_of(
    qtype: str, units: int, steps: int, both: bool, normed: bool
) -> tuple[int, int]:
    """Warps a tile and tiles a program, as measured.

    Eight warps for a tile where tiles are few and rows long; a norm, which every
    program takes for itself, and short rows of many bytes want four.
    """
    if both:
        return 2, 2
    short = steps <= 16 and (normed or qtype == "Q8_0")
    return (8 if units <= 512 and not short else 4), 1


def decoded(
    tiles: jax.Array,
    qtype: str,
    dtype: Any = jnp.bfloat16,
    ids: jax.Array | None = None,
) -> jax.Array:
    """The weights `[16 u, k]`, or those of the rows ids `[...]`, by a kernel."""
    u, tile_bytes = tiles.shape
    k, warps = tile_width("interleaved_matmul", qtype, tile_bytes), 4
    shape = (u * TILE,) if ids is None else ids.shape
    flat = None if ids is None else ids.reshape(-1).astype(jnp.int32)
    [w] = sparse_call(
        decode_tiles_kernel,
        ((u if flat is None else flat.shape[0]) * -(-k // (STEP * warps)),),
        {"ids_ptr": flat, "tiles_ptr": tiles},
        {"w_ptr": jax.ShapeDtypeStruct((*shape, k), dtype)},
        {
            # for ids alone: whole weights of the same width share a kernel
            "TILES": 0 if flat is None else u,
            "K": k,
            "NUM_BLOCKS": tile_bytes // (TILE * BYTES[qtype]),
            "TILE_PAIRS": tile_bytes // 8,
            "FORMAT": qtype,
            "WARPS": warps,
            "num_warps": warps,
        },
    )
    assert w is not None
    return w


def multiply_decoded(x, w, norm, residual, eps, up=None, activation=None) -> jax.Array:
    """Many activations and bfloat16 weights `[f, k]`: products by XLA."""
    result = x.dtype
    if norm is not None:
        x = normalised(x, norm, eps, 1)
    # rounded once by the product: in float32 it takes a fifth longer
    sums = jnp.promote_types(result, jnp.bfloat16)
    y = jnp.matmul(x.astype(jnp.bfloat16), w.T, preferred_element_type=sums)
    if activation is not None:
        y = gated(y, up, activation)
    if residual is not None:
        y = y.astype(jnp.float32) + residual.reshape(y.shape).astype(jnp.float32)
    return y.astype(result)
