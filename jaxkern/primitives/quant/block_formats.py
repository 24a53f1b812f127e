"""The block formats of GGUF files in one table: what C++ and Python know of each.

The functions that unpack a block stand in `gguf_blocks.py` and `gguf_codebooks.py`. The
C++ kernels have their facts from here, in the header that
`jaxkern/cpu/quant/block_formats.py` writes.
"""

from typing import NamedTuple


class Codes(NamedTuple):
    """weight = scale * (code - zero) + offset, codes of `bits` unsigned bits in groups.

    Attributes:
      group: weights that share a scale.
      bits: of a code as it is stored.
      zero: the code of weight 0 before the offset, after the table if there is one.
      offset: each group has one.
      table: a code is the place of a number in a table of 16.
      units: what stays together where 16 rows are interleaved, in the order of the
        block: (bytes of a unit, number of units).
    """

    group: int
    bits: int
    zero: int
    offset: bool
    table: bool
    units: tuple[tuple[int, int], ...]


class BlockFacts(NamedTuple):
    """`elements` weights in `bytes` bytes.

    Attributes:
      fields: of a block, in order, with their bytes; two where there is no number.
      codes: of the formats that the C++ kernels know; None for the others.
    """

    elements: int
    bytes: int
    fields: str
    codes: Codes | None = None


FORMATS = {
    "F32": BlockFacts(1, 4, "f32"),
    "F16": BlockFacts(1, 2, "f16"),
    "BF16": BlockFacts(1, 2, "bf16"),
    "Q4_0": BlockFacts(
        32, 18, "d qs[16]", Codes(32, 4, 8, False, False, ((2, 1), (4, 4)))
    ),
    "Q4_1": BlockFacts(
        32, 20, "d m qs[16]", Codes(32, 4, 0, True, False, ((2, 2), (4, 4)))
    ),
    "Q5_0": BlockFacts(
        32, 22, "d qh[4] qs[16]", Codes(32, 5, 16, False, False, ((2, 1), (4, 5)))
    ),
    "Q5_1": BlockFacts(
        32, 24, "d m qh[4] qs[16]", Codes(32, 5, 0, True, False, ((2, 2), (4, 5)))
    ),
    "Q8_0": BlockFacts(
        32, 34, "d qs[32]", Codes(32, 8, 128, False, False, ((2, 1), (4, 8)))
    ),
    "Q2_K": BlockFacts(
        256, 84, "scales[16] qs[64] d dmin", Codes(16, 2, 0, True, False, ((4, 21),))
    ),
    "Q3_K": BlockFacts(
        256,
        110,
        "hmask[32] qs[64] scales[12] d",
        Codes(16, 3, 4, False, False, ((4, 27), (2, 1))),
    ),
    "Q4_K": BlockFacts(
        256, 144, "d dmin scales[12] qs[128]", Codes(32, 4, 0, True, False, ((4, 36),))
    ),
    "Q5_K": BlockFacts(
        256,
        176,
        "d dmin scales[12] qh[32] qs[128]",
        Codes(32, 5, 0, True, False, ((4, 44),)),
    ),
    "Q6_K": BlockFacts(
        256,
        210,
        "ql[128] qh[64] scales[16] d",
        Codes(16, 6, 32, False, False, ((4, 52), (2, 1))),
    ),
    "Q8_K": BlockFacts(256, 292, "d[4] qs[256] bsums[32]"),
    "IQ4_NL": BlockFacts(
        32, 18, "d qs[16]", Codes(32, 4, 128, False, True, ((2, 1), (4, 4)))
    ),
    "IQ4_XS": BlockFacts(
        256,
        136,
        "d scales_h scales_l[4] qs[128]",
        Codes(32, 4, 128, False, True, ((2, 2), (4, 33))),
    ),
    "MXFP4": BlockFacts(
        32, 17, "e[1] qs[16]", Codes(32, 4, 12, False, True, ((1, 1), (4, 4)))
    ),
    "NVFP4": BlockFacts(
        64, 36, "scales[4] qs[32]", Codes(16, 4, 12, False, True, ((4, 9),))
    ),
    "IQ1_S": BlockFacts(256, 50, "d qs[32] qh[16]"),
    "IQ1_M": BlockFacts(256, 56, "qs[32] qh[16] scales[8]"),
    "IQ2_XXS": BlockFacts(256, 66, "d qs[64]"),
    "IQ2_XS": BlockFacts(256, 74, "d qs[64] scales[8]"),
    "IQ2_S": BlockFacts(256, 82, "d qs[32] signs[32] qh[8] scales[8]"),
    "IQ3_XXS": BlockFacts(256, 98, "d qs[64] scales_and_signs[32]"),
    "IQ3_S": BlockFacts(256, 110, "d qs[64] qh[8] signs[32] scales[4]"),
    "TQ1_0": BlockFacts(256, 54, "qs[48] qh[4] d"),
    "TQ2_0": BlockFacts(256, 66, "qs[64] d"),
}

# those with C++ kernels, in the order of the enum there
KERNEL_FORMATS = {q: f.codes for q, f in FORMATS.items() if f.codes is not None}
