"""Partial or interleaved rotation of the heads, each element read and written once.

Where every dim rotates in halves XLA's fusion is as fast and the row refuses.
"""

from typing import Any

import jax

from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import jit, tl, triton_call
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.rope.rope import first_rotated

ELEMENTS, NUM_WARPS = 4096, 4  # of one program


def unsupported(
    cos: Any, pairing: str, x: Any = None, dy: Any = None, **rest: Any
) -> str | None:
    """A reason in words, or None."""
    rotated = dy if x is None else x
    if pairing == "neox" and 2 * cos.shape[-1] == rotated.shape[-1]:
        return "XLA is as fast where every dim rotates in halves"
    return unsupported_anywhere(cos=cos, x=rotated)


@jit
def apply_rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    NUM_ROWS: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    FIRST: tl.constexpr,
    START: tl.constexpr,
    OFFSET: tl.constexpr,
    SIGN: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """Pairs (FIRST * i, FIRST * i + OFFSET), i < R, counted from dim START on.

    The dims of no pair are copied.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # of [t n]
    pair = tl.arange(0, PAIRS)[None, :]
    present = rows < NUM_ROWS
    inside = present & (pair < R)
    table = (rows // N).to(tl.int64) * R + pair
    cos = tl.load(cos_ptr + table, inside, 0.0, eviction_policy="evict_last")
    sin = tl.load(sin_ptr + table, inside, 0.0, eviction_policy="evict_last")
    cos, sin = cos.to(tl.float32), sin.to(tl.float32) * SIGN
    start = rows.to(tl.int64) * H + START
    if FIRST == 2:
        both = tl.arange(0, 2 * PAIRS)[None, :]
        mask = present & (both < 2 * R)
        xy = tl.load(x_ptr + start + both, mask, 0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(xy, [ROWS, PAIRS, 2]))
        turned = tl.join(a * cos - b * sin, b * cos + a * sin)
        turned = tl.reshape(turned, [ROWS, 2 * PAIRS])
        tl.store(y_ptr + start + both, turned, mask)
    else:
        at = start + pair
        a = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
        b = tl.load(x_ptr + at + OFFSET, inside, 0.0).to(tl.float32)
        tl.store(y_ptr + at, a * cos - b * sin, inside)
        tl.store(y_ptr + at + OFFSET, b * cos + a * sin, inside)
    if REST:
        passed = tl.arange(0, REST)[None, :] - START
        if FIRST == 2:
            unpaired = (passed < 0) | (passed >= 2 * R)
        else:
            between = (passed >= R) & ((passed < OFFSET) | (passed >= OFFSET + R))
            unpaired = (passed < 0) | between
        mask = present & unpaired & (passed < H - START)
        tl.store(y_ptr + start + passed, tl.load(x_ptr + start + passed, mask), mask)


def rotated(
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    sign: float,
    *,
    pairing: str,
    pair_offset: int,
    at_end: bool,
) -> jax.Array:
    *_, heads, h = x.shape
    rows, pairs = x.size // h if h else 0, cos.shape[-1]
    together = max(1, ELEMENTS // next_power_of_2(h))
    return triton_call(
        apply_rope_kernel,
        x,
        cos,
        sin,
        out=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        grid=(-(-rows // together),),
        num_warps=NUM_WARPS,
        NUM_ROWS=rows,
        N=heads,
        H=h,
        R=pairs,
        FIRST=2 if pairing == "interleaved" else 1,
        START=first_rotated(h, pairs, pair_offset, at_end),
        OFFSET=pair_offset,
        SIGN=sign,
        ROWS=together,
        PAIRS=next_power_of_2(pairs),
        REST=0 if 2 * pairs == h else next_power_of_2(h),
    )[0]


def apply_rope_fwd(x, cos, sin, **options):
    return rotated(x, cos, sin, 1.0, **options)


def apply_rope_bwd(cos, sin, dy, **options):
    return rotated(dy, cos, sin, -1.0, **options)
