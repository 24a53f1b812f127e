"""How the logits of a row lie in a cluster, and which rows cannot."""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.gpu.device import compute_capability, num_sms
from jaxkern.pallas.rows.plan import DTYPES

WARPS = 4  # of a warpgroup
LANES = 32
WARPGROUPS = 2
STEP = 4  # lines that a warp reads at once
BINS = 256
COPIES = 4  # of a bin, or lanes would wait for each other
NOWHERE = LANES // COPIES  # more of them: a place for each lane that counts nothing
RESIDENT = 64 * 1024  # bytes of logits: three programs run on a multiprocessor
SHARED = 208 * 1024  # bytes of logits that one program can hold


class Plan(NamedTuple):
    """Each warp of a cluster has lines side by side, in the order of the row."""

    n: int
    v: int
    width: int  # logits of a line, of which a lane has up to 16 bytes
    cluster: int
    spacing: int  # of the dtype's numbers, as floats of 32 bits

    @property
    def lines(self) -> int:
        return self.v // self.width

    @property
    def warps(self) -> int:
        return self.cluster * WARPGROUPS * WARPS

    @property
    def lines_of_warp(self) -> int:
        """The last warps may have fewer."""
        return STEP * -(-self.lines // (self.warps * STEP))

    @property
    def chunks(self) -> int:
        """That the lines of a warp come in."""
        return math.gcd(self.lines_of_warp // STEP, 2)

    @property
    def held(self) -> tuple[int, int, int]:
        """What a program has in shared memory."""
        return WARPGROUPS * WARPS, self.lines_of_warp, self.width

    @property
    def piece(self) -> tuple[int, int]:
        """What a warpgroup computes at once: a line of each warp."""
        return WARPS, self.width

    @property
    def layout(self) -> Any:
        tiling = fa.Tiling((self.piece, (self.width // LANES,)))
        return plgpu.Layout.TILED(tiling, (-3,), (-2,), -1)

    @property
    def fixed(self) -> int:
        """Bits behind the point of a weight: so many sum up below 2**32."""
        logits = WARPGROUPS * WARPS * self.lines_of_warp * self.width // COPIES
        return 31 - (logits - 1).bit_length()


def in_each_warp(size: int) -> Any:
    """The layout of `[size]` of which each warp holds all."""
    each = max(size // LANES, 1)
    copies = LANES * each // size
    lanes = (fa.Replicated(copies), -2) if copies > 1 else (-2,)
    tiling = fa.Tiling(((size,), (each,)))
    return plgpu.Layout.TILED(tiling, (fa.Replicated(WARPS),), lanes, -1)


def by_thread(size: int) -> Any:
    """The layout of `[128, size]` of which each thread has a row."""
    rows = WARPS * LANES
    tiling = fa.Tiling(((rows, size), (LANES, size)))
    return plgpu.Layout.TILED(tiling, (-4,), (-2,), -1)


def line_width(v: int, bytes_of_element: int) -> int:
    """Logits of a line, or 0."""
    most = LANES * 16 // bytes_of_element
    return next((w for w in (most, most // 2, most // 4) if w >= 64 and v % w == 0), 0)


def plan(n: int, v: int, dtype: Any) -> Plan | None:
    """The smallest cluster of which many run at once; for few rows the largest."""
    size = jnp.dtype(dtype).itemsize
    width, spacing = line_width(v, size), 2 ** (23 - jnp.finfo(dtype).nmant)
    if not width:
        return None
    few = 8 * n <= 2 * num_sms()
    sizes = (8,) if few else (2, 4, 8)
    for room, cluster in itertools.product((RESIDENT, SHARED), sizes):
        c = Plan(n, v, width, cluster, spacing)
        warps, lines, _ = c.held
        if warps * lines * width * size <= room:
            return c
    return None


def refusal(logits: jax.ShapeDtypeStruct | jax.Array) -> str | None:
    """Why these rows cannot be held, or None."""
    if compute_capability() != 90:
        return f"the compute capability is {compute_capability()}, not 90 (Hopper)"
    if logits.dtype not in DTYPES:
        return f"`logits` is none of {', '.join(jnp.dtype(t).name for t in DTYPES)}"
    if not logits.size:
        return "there are no rows"
    v, size = logits.shape[-1], logits.dtype.itemsize
    if not line_width(v, size):
        return f"a row has {v} logits, no multiple of 64"
    if plan(logits.size // v, v, logits.dtype) is None:
        return f"no cluster of 8 holds {v} logits"
    return None
