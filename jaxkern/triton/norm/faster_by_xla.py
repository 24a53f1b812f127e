"""Rows of norms that XLA's reductions are faster for, as measured on an H200.

What is measured stands in docs/design/fused_norms.md: XLA by more than 5 % at all sizes
tried in a region. Elements have 2 bytes where a region says nothing else. Of rms_norm
and rms_norm_add few short rows are not among them, of which XLA takes a tenth of a
microsecond less alone: those of a decode step are kernels of its chain.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxkern.gpu.rows import num_rows
from jaxkern.triton.norm.split_rows import vector_of

ALL = 2**63 - 1  # rows or columns


class Region(NamedTuple):
    """Numbers of rows and of columns, both from the first to the last."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    aligned: bool | None = None  # rows begin at multiples of 16 bytes; None: either
    itemsize: int = 2

    def has(self, x: Any) -> bool:
        if self.aligned not in (None, vector_of(x) == 1):
            return False
        sizes = zip((num_rows(x), x.shape[-1]), (self.rows, self.columns), strict=True)
        inside = all(first <= n <= last for n, (first, last) in sizes)
        return inside and x.dtype.itemsize == self.itemsize


SHORT, LONG, LONGER = (1025, 8192), (16385, ALL), (32769, ALL)
FEW_LONG = (
    Region((17, 66), LONG),
    Region((67, 132), (16384, 32768)),
    Region((1, 264), LONGER, aligned=False),
)
FORWARD = {
    "rms_norm": (
        Region((4096, ALL), (2049, 4096), aligned=False),
        Region((67, ALL), LONGER, aligned=False),
    ),
    "layer_norm": (
        Region((2, 66), SHORT, itemsize=4),
        Region((17, 66), (49153, ALL), itemsize=4),
        Region((4096, ALL), (2049, 4096), aligned=False),
    ),
    "rms_norm_add": (
        Region((10, 16), LONGER, aligned=False),
        Region((67, ALL), LONGER, aligned=False),
    ),
    "gated_rms_norm": (
        Region((2, 40), SHORT),
        Region((41, 66), (2049, 4096), aligned=False),
        Region((1, 1), LONGER, aligned=False),
        Region((528, ALL), (49153, ALL)),
    ),
}
BACKWARD = {
    "rms_norm": (Region((2, 4), SHORT), *FEW_LONG),
    "layer_norm": (
        Region((2, 40), (1025, 4096), itemsize=4),
        Region((41, 1024), (2049, 4096), aligned=False, itemsize=4),
        Region((17, 66), LONG, itemsize=4),
        Region((67, 264), LONGER, aligned=False, itemsize=4),
    ),
    "rms_norm_add": FEW_LONG,
    "gated_rms_norm": (
        Region((17, 66), LONG),
        Region((1, 16), LONGER, aligned=False),
        Region((1, 1), (49153, ALL)),
    ),
    "rms_norm_mul": (
        Region((2, 2), (16385, 32768), aligned=False),
        Region((1, 16), LONGER, aligned=False),
    ),
}


def slower_at_some_sizes(op: str) -> Callable[..., str | None]:
    """The `slower` of an op's kernels."""

    def slower(x: Any, dy: Any = None, **_: Any) -> str | None:
        regions = (FORWARD if dy is None else BACKWARD).get(op, ())
        if any(region.has(x) for region in regions):
            return f"having {num_rows(x)} rows of {x.shape[-1]} columns"
        return None

    return slower
