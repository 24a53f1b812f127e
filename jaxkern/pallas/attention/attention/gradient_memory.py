"""Shared memory and barriers of the two backward kernels on Hopper."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.gpu.device import num_sms
from jaxkern.pallas.attention.attention.gradient_blocks import (
    BLOCK,
    CONSUMERS,
    KEYS,
    NARROW,
    P_SLOTS,
    STAGES,
)
from jaxkern.pallas.attention.attention.pairs import bias_tiles, pair_bytes
from jaxkern.pallas.attention.attention.problem import ROWS, Problem
from jaxkern.pallas.attention.attention.wgmma import tiled

SHARED_BYTES = 232_448 - 2048  # of a program; the rest is for barriers
HALVES_STAGES = 4  # two for each consumer, see Share


def matrix(dtype, block: int, *shape: int):
    """Shared memory of 16 bits; `block` is the least number of rows contracted over."""
    transforms = tiled(block, shape[-1], contract_rows=True)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def slots(stages: int, arrivals: int):
    return plgpu.Barrier(num_barriers=stages, num_arrivals=arrivals)


def keys_plan(h: int, hv: int, bias_bytes: int) -> dict[str, int]:
    """KEYS of a program, BLOCK_Q walked over, STAGES of them; by what fits.

    dk and dv of 64 keys take (h + hv) / 2 registers of a consumer, S and dP of a block
    32 each. With 64 keys a program the consumers share them.
    """
    more = NARROW < h + hv <= 320 and not bias_bytes
    keys = KEYS if h + hv <= 320 else ROWS
    return dict(KEYS=keys, BLOCK_Q=BLOCK, STAGES=STAGES + more)


def whole_programs(c: Problem, programs: int) -> int:
    """How many of the programs of the kernel that holds keys are no halves.

    With a window they take equally long, but for those of the last keys. A round of the
    multiprocessors that they do not fill is shared out in halves.
    """
    if c.window is None or c.group % 2:
        return programs
    return programs - programs % num_sms()


def keys_scratch(
    c: Problem, dtype, bias: Any, halves: bool, KEYS: int, BLOCK_Q: int, STAGES: int
):
    """(buffers, barriers, whether the bias comes through shared memory)."""
    wide = KEYS == ROWS
    ring = STAGES, BLOCK_Q
    held = (ROWS,) if wide else (CONSUMERS, ROWS)
    used = 2 * (KEYS + STAGES * BLOCK_Q) * (c.h + c.hv) + 8 * STAGES * BLOCK_Q
    exchange = P_SLOTS * KEYS * BLOCK_Q
    used += 2 * exchange if wide else 0
    tile = STAGES * BLOCK_Q * KEYS * pair_bytes(bias)
    copied = 0 < tile <= SHARED_BYTES - used
    # float16 rounds dS as finely as weights of 16 bits: it then has both errors
    unrounded = dtype == jnp.float16 and used + 2 * exchange <= SHARED_BYTES
    buffers = [
        matrix(dtype, BLOCK_Q, *held, c.h),
        matrix(dtype, BLOCK_Q, *held, c.hv),
        matrix(dtype, BLOCK_Q, *ring, c.h),
        matrix(dtype, BLOCK_Q, *ring, c.hv),
        plgpu.SMEM(ring, jnp.float32),
        plgpu.SMEM(ring, jnp.float32),
    ]
    consumers = () if wide else (CONSUMERS,)
    tiles = None
    if copied:
        tiles = bias_tiles(bias.dtype, STAGES, *consumers, BLOCK_Q, ROWS)
    if not wide:
        copies = 4 + CONSUMERS * copied
        full, free = slots(STAGES, copies), slots(STAGES, CONSUMERS)
        float32: Any = jnp.dtype(jnp.float32)
        sums = bias_tiles(float32, ROWS, max(c.h, c.hv)) if halves else None
        barriers = slots(CONSUMERS, 2), full, free, plgpu.Barrier(), plgpu.Barrier()
        return (*buffers, tiles, sums), barriers, copied
    kind: Any = jnp.dtype(jnp.float32 if unrounded and not copied else jnp.float16)
    exchanged = bias_tiles(kind, P_SLOTS, ROWS, BLOCK_Q)
    free, one = slots(STAGES, CONSUMERS), slots(P_SLOTS, 1)
    rings = slots(STAGES, 2 + copied), free, slots(STAGES, 2), free, one, one
    return (
        (*buffers, exchanged, tiles),
        (slots(CONSUMERS, 1), *rings, plgpu.Barrier()),
        copied,
    )


def queries_scratch(c: Problem, dtype, bias: Any, want_slopes: bool, apart: bool):
    """As keys_scratch. What is wide has one stage of values, or of both.

    `apart`: with buffers of their own for `out` and dq.
    """
    size = pair_bytes(bias)
    tile = c.block_q * BLOCK
    narrow = c.h + c.hv <= NARROW
    used = 2 * c.block_q * (c.h + c.hv) * (1 + apart)
    used += tile * bias.dtype.itemsize if want_slopes else 0
    rings = [(size > 0, n, n) for n in ((4, 3, 2) if narrow else (2,))]
    rings += [(size > 0, 2, 1), (size > 0, 1, 1), (False, 1, 1)]

    def fits(copied, k_stages, v_stages):
        ring = 2 * BLOCK * (k_stages * c.h + v_stages * c.hv)
        return used + ring + v_stages * tile * size * copied <= SHARED_BYTES

    copied, k_stages, v_stages = next(ring for ring in rings if fits(*ring))
    pair = CONSUMERS, ROWS
    buffers = (
        matrix(dtype, BLOCK, *pair, c.h),
        matrix(dtype, BLOCK, *pair, c.hv),
        matrix(dtype, BLOCK, *pair, c.hv) if apart else None,
        matrix(dtype, BLOCK, k_stages, BLOCK, c.h),
        matrix(dtype, BLOCK, v_stages, BLOCK, c.hv),
        bias_tiles(bias.dtype, v_stages, *pair, BLOCK) if copied else None,
        matrix(dtype, BLOCK, *pair, c.h) if apart else None,
        bias_tiles(bias.dtype, *pair, BLOCK) if want_slopes else None,
    )
    beside = 1 + CONSUMERS * copied  # copies of values and of the bias
    one = slots(CONSUMERS, 1)
    of_queries = slots(CONSUMERS, 2 + apart), one, one
    if k_stages == v_stages:  # one ring: they come and go with the keys
        rings = slots(k_stages, 1 + beside), slots(k_stages, CONSUMERS), None, None
    else:
        rings = (
            slots(k_stages, 1),
            slots(k_stages, CONSUMERS),
            slots(v_stages, beside),
            slots(v_stages, CONSUMERS),
        )
    return buffers, (*of_queries, *rings), copied
