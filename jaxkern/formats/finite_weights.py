"""Whether the weights of a file are finite, seen from the bytes as they lie in it.

Of floats every number is looked at, of blocks their scales: a block has a weight that
is not finite only if a scale is not.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxkern.primitives.quant.block_formats import FORMATS

# where all these bits are set a float is NaN or infinite; 8 bits have no infinity
BROKEN = {
    "F32": (np.dtype("<u4"), 0x7F800000),
    "F16": (np.dtype("<u2"), 0x7C00),
    "BF16": (np.dtype("<u2"), 0x7F80),
    "F8_E4M3": (np.dtype("u1"), 0x7F),
    "F8_E8M0": (np.dtype("u1"), 0xFF),
}
SIGNED = ("F32", "F16", "BF16", "F8_E4M3")
SCALES = {"d": "F16", "m": "F16", "dmin": "F16", "d[4]": "F32", "e[1]": "F8_E8M0"}
NOT_FINITE = (
    "has weights that are not finite (NaN or infinity), of which a model can only make "
    "NaN: the file is damaged, or was written from a model that was"
)
AT_ONCE = 1 << 18  # numbers, whose bits stay in a cache


MOST_WAITING = 4  # tensors, each of which stays in memory until it is looked at


class FiniteCheck:
    """Looks at tensors beside what loads them, on a thread of its own.

    A tensor that is not finite raises its error when a later one is given, or at the
    end.
    """

    def __init__(self) -> None:
        self.looked_at: set[str] = set()
        self.waiting: deque[tuple[Future[bool], Exception]] = deque()
        self.thread = ThreadPoolExecutor(1)

    def look(self, name: str, array: np.ndarray, qtype: str, error: Exception) -> None:
        if name in self.looked_at:
            return
        self.looked_at.add(name)
        self.waiting.append((self.thread.submit(all_finite, array, qtype), error))
        while len(self.waiting) > MOST_WAITING or self.waiting[0][0].done():
            self.take_first()
            if not self.waiting:
                return

    def take_first(self) -> None:
        found, error = self.waiting.popleft()
        if not found.result():
            raise error

    def finish(self) -> None:
        """Waits until all are looked at."""
        while self.waiting:
            self.take_first()
        self.thread.shutdown()


def all_finite(array: np.ndarray, qtype: str) -> bool:
    """Whether a contiguous tensor of this type, a float's or a block's, is finite."""
    if qtype in BROKEN:
        return not any_broken(array.reshape(-1).view(BROKEN[qtype][0]), qtype)
    blocks = array.reshape(-1, FORMATS[qtype].bytes)
    if qtype == "IQ1_M":  # the scale is the high four bits of four words
        words = np.ascontiguousarray(blocks[:, 48:]).view("<u2") >> 12
        scales = words << np.array([0, 4, 8, 12], np.uint16)
        return not any_broken(scales.sum(1, dtype=np.uint16), "F16")
    for first, kind in scales_of(qtype):
        block: Any = {"names": ["x"], "formats": [BROKEN[kind][0]]}
        block |= {"offsets": [first], "itemsize": FORMATS[qtype].bytes}
        if any_broken(blocks.reshape(-1).view(np.dtype(block))["x"], kind):
            return False
    return True


def scales_of(qtype: str) -> Iterator[tuple[int, str]]:
    """First byte and kind of each float in a block."""
    first = 0
    for field in FORMATS[qtype].fields.split():
        size = int(field.partition("[")[2].rstrip("]") or 2)
        if field in SCALES:
            yield first, SCALES[field]
        first += size


def any_broken(numbers: np.ndarray, kind: str) -> bool:
    """NaN and inf are the largest numbers of either sign, if their bits are integers.

    Two passes over what is in a cache by then, at twice the rate of masking bits.
    """
    bits, broken = BROKEN[kind]
    negative = 1 << (8 * bits.itemsize - 1)
    for start in range(0, numbers.size, AT_ONCE):
        part = numbers[start : start + AT_ONCE]
        if part.max() >= negative | broken:
            return True
        if kind in SIGNED and part.view(f"i{bits.itemsize}").max() >= broken:
            return True
    return False
