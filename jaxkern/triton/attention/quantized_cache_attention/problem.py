"""What one launch of the decode kernel over quantised caches is for."""

import dataclasses
import math
from typing import Any, ClassVar

from jaxkern.triton.attention.decode.attention import FAR
from jaxkern.triton.attention.quantized_cache_attention.formats import Cache
from jaxkern.triton.attention.quantized_cache_attention.layouts import (
    Part,
    Places,
    offsets_of,
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The sizes of a launch, all known when it is compiled.

    Attributes:
      queries, tokens: of a sequence.
      key_heads: key heads; each serves `group` heads of queries.
      keys, values: what the kernel knows of the caches.
      key_type, value_type: in which their levels meet the tensor cores.
      key_entries, value_entries: of their tables; 0 without one.
      scale, causal, window, softcap: the options of attention.
      rows, tiles: a program has one of the tiles, of `rows` queries times group.
      heads, shares: a program has a warp for each of so many key heads and shares of
        the tokens.
      block, stages: tokens of a block, and blocks that a warp has room for.
      region: bytes of shared memory that a warp has.
      shared: bytes of a program, the tables included.
    """

    FAR: ClassVar[int] = FAR  # positions are clipped to it
    LOG2E: ClassVar[float] = math.log2(math.e)
    UNIT: ClassVar[float] = 256.0  # the largest coordinate of a query in float16
    WEIGHT: ClassVar[float] = 32768.0  # the largest weight in float16

    queries: int
    tokens: int
    key_heads: int
    group: int
    keys: Cache
    values: Cache
    key_type: Any
    value_type: Any
    key_entries: int
    value_entries: int
    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    rows: int
    tiles: int
    heads: int
    shares: int
    block: int
    stages: int
    region: int
    shared: int

    @property
    def warps(self) -> int:
        return self.heads * self.shares

    @property
    def parts(self) -> tuple[Part, ...]:
        """Of keys, then of values, as `Places` names them."""
        return self.keys.parts + self.values.parts

    @property
    def at(self) -> Places:
        """Where the parts of a block begin in the room of their warp."""
        return offsets_of(self.block, self.parts)

    @property
    def places(self) -> tuple[int, ...]:
        """`at` by numbers."""
        return dataclasses.astuple(self.at)
