"""How rows lie in clusters of multiprocessors: lines, chunks, slots; what cannot."""

import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.gpu.device import compute_capability, num_sms
from jaxkern.gpu.rows import num_rows

WARPS = 4  # of a warpgroup
LANES = 32
VECTOR = 8  # elements of a thread side by side
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
SHARED = 224 * 1024  # bytes of chunks


class Plan(NamedTuple):
    """How rows of d elements lie in a cluster."""

    n: int
    d: int
    width: int  # elements of a line: the copy engine takes 256 at most
    cluster: int
    clusters: int
    consumers: int
    pieces: int  # that a consumer has of a chunk
    slots: int

    @property
    def piece(self) -> tuple[int, int]:
        """What a warpgroup computes at once: 8 elements a thread."""
        return WARPS * LANES * VECTOR // self.width, self.width

    @property
    def share(self) -> int:
        """Lines of a chunk that are one consumer's."""
        return self.piece[0] * self.pieces

    @property
    def chunk(self) -> tuple[int, int]:
        return self.share * self.consumers, self.width

    @property
    def lines(self) -> int:
        return self.d // self.width

    @property
    def most_lines(self) -> int:
        """Of a row that a program has; the last one of a cluster may have fewer."""
        return -(-self.lines // self.cluster)

    @property
    def fewest_lines(self) -> int:
        return self.lines - (self.cluster - 1) * self.most_lines

    @property
    def chunks(self) -> int:
        """That a program has of a row."""
        return -(-self.most_lines // self.chunk[0])

    @property
    def tails(self) -> tuple[int, int]:
        """Lines of the last chunk, of most programs and of the last one."""
        before = (self.chunks - 1) * self.chunk[0]
        return self.most_lines - before, self.fewest_lines - before

    @property
    def ragged(self) -> bool:
        return self.tails != (self.chunk[0], self.chunk[0])

    @property
    def partners(self) -> int:
        """Sums of a row that the cluster exchanges."""
        return self.cluster * self.consumers * self.piece[0]

    @property
    def layout(self) -> Any:
        lines, width = self.piece
        if lines == WARPS:
            tiling = fa.Tiling(((lines, width), (VECTOR,)))
            return plgpu.Layout.TILED(tiling, (-3,), (-2,), -1)
        tiling = fa.Tiling(((lines, width), (lines // WARPS, width), (VECTOR,)))
        return plgpu.Layout.TILED(tiling, (-5,), (-3, -2), -1)

    @property
    def exchanged(self) -> Any:
        """Each warp holds all sums."""
        each = max(self.partners // LANES, 1)
        copies = LANES * each // self.partners
        lanes = (fa.Replicated(copies), -2) if copies > 1 else (-2,)
        tiling = fa.Tiling(((self.partners,), (each,)))
        return plgpu.Layout.TILED(tiling, (fa.Replicated(WARPS),), lanes, -1)


def line_width(d: int) -> int:
    """Elements of a line, or 0."""
    return next((w for w in (256, 128, 64) if d % w == 0), 0)


def plan(n: int, d: int, bytes_of_element: int, consumers: int = 4) -> Plan | None:
    """The smallest cluster that holds a row and a chunk of the next, or None.

    `bytes_of_element` counts all tensors that are loaded.
    """
    width = line_width(d)
    if not width:
        return None
    for cluster, pieces in itertools.product((1, 2, 4), (2, 1)):
        c = Plan(n, d, width, cluster, num_clusters(cluster), consumers, pieces, 0)
        slots = SHARED // (c.chunk[0] * width * bytes_of_element)
        if slots > c.chunks and min(c.tails) > 0:
            return c._replace(slots=slots, clusters=min(c.clusters, n))
    return None


def num_clusters(cluster: int) -> int:
    """That run at once, which decides: a second wave doubles the time.

    Clusters of 4 share a part of the device that has 14 to 18 multiprocessors.
    """
    clusters = num_sms() // cluster
    return clusters if cluster <= 2 else clusters * 7 // 8


def refusal(*inputs: Any) -> str | None:
    """Why rows of these shapes and dtypes cannot be walked, or None."""
    x = inputs[-1]
    if compute_capability() != 90:
        return f"the compute capability is {compute_capability()}, not 90 (Hopper)"
    if any(i.dtype not in DTYPES for i in inputs):
        return f"a dtype is none of {', '.join(jnp.dtype(t).name for t in DTYPES)}"
    d = x.shape[-1]
    if not x.size:
        return "there are no rows"
    if not line_width(d):
        return f"a row has {d} elements, no multiple of 64"
    if plan(x.size // d, d, sum(i.dtype.itemsize for i in inputs)) is None:
        return f"no cluster of 4 holds {d} elements and a part of the next row"
    return None


def few_rows(x: Any) -> str | None:
    """Then XLA, which shares a row among more multiprocessors, is faster."""
    rows = num_rows(x)
    if 4 * rows < num_sms():
        return f"{rows} rows leave half of the GPU idle or more"
    return None
