"""What a delta rule fixes for its kernels."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Constants:
    """`C` in the kernels of the gated delta rule and of Kimi delta attention.

    Attributes:
      T: tokens; a chunk has 64.
      NUM_HEADS, GROUP: value heads, and how many of them share a key head.
      H, HV: dims of a key head and of a value head.
      BLOCK_H, BLOCK_V: how many of these a program has at a time.
      SCALE: of queries.
    """

    T: int
    NUM_HEADS: int
    GROUP: int
    H: int
    HV: int
    BLOCK_H: int
    BLOCK_V: int
    SCALE: float

    @property
    def CHUNKS(self) -> int:
        return -(-self.T // 64)

    @property
    def NUM_KEY_HEADS(self) -> int:
        return self.NUM_HEADS // self.GROUP
