"""What the kernels over rows of packed codes read, and what one launch is for."""

import dataclasses
from typing import Any

from jaxkern.triton.quant.row_codes import BITS, EXCESS, UNITS

LANES = 4  # of a row


@dataclasses.dataclass(frozen=True)
class Rows:
    """Weights as the kernels read them: `scale * (code - zero) + offset`.

    Attributes:
      codes: `[..., rows, bytes]`, of any integer dtype.
      scales: `[..., rows / rows_of_scale, groups]`, floats, or bytes of `kind`.
      offsets: as scales, or None; what they are says `offset`.
      factors: `[rows]`, another factor of each row, or None.
      format: of the codes, a key of `row_codes.BITS`.
      columns: of the weights.
      group: columns that share a scale.
      rows_of_scale: rows that share a scale.
      kind: "float", "e8m0" or "e4m3".
      offset: "", "bias" or "zero".
      zero: of all codes.
    """

    codes: Any
    scales: Any
    offsets: Any
    format: str
    columns: int
    group: int
    factors: Any = None
    rows_of_scale: int = 1
    kind: str = "float"
    offset: str = ""
    zero: int = 0

    @property
    def rows(self) -> int:
        return self.codes.shape[-2]


@dataclasses.dataclass(frozen=True)
class RowProblem:
    """The sizes of a launch, all known when it is compiled.

    Attributes:
      format: of the codes, a key of `BITS`.
      rows: of the weights, of one expert.
      columns: of the weights.
      group: columns that share a scale, `columns` or more where a row has one.
      rows_of_scale: rows that share a scale.
      groups: scales beside each other.
      kind: "float", "e8m0" or "e4m3": what a scale is.
      zero: of all codes, where no array has them.
      offsets: "" for none, "bias" or "zero": what stands in the array beside scales.
      activations: all of them.
      together: activations of a program.
      top_k: rows of weights of each activation, where ids name experts; else 0.
      experts: what ids are below.
      shares: warps of a program.
      batch: steps of a warp that are read together.
    """

    format: str
    rows: int
    columns: int
    group: int
    rows_of_scale: int
    groups: int
    kind: str
    zero: int
    offsets: str
    activations: int
    together: int
    top_k: int
    experts: int
    shares: int
    batch: int

    @property
    def unit(self) -> int:
        """Columns that a lane has of a row in one step."""
        return UNITS[BITS[self.format]]

    @property
    def step(self) -> int:
        return LANES * self.unit

    @property
    def words(self) -> int:
        """Of a unit."""
        return self.unit * BITS[self.format] // 32

    @property
    def row_words(self) -> int:
        return self.columns * BITS[self.format] // 32

    @property
    def split(self) -> bool:
        """The lanes of a row have scales of their own."""
        return self.group < self.columns and self.group % self.step != 0

    @property
    def eights(self) -> int:
        """Columns of sums, by eights."""
        beside = 2 if self.split else 8
        return 1 << max(-(-self.together // beside) - 1, 0).bit_length()

    @property
    def single(self) -> bool:
        """Only column 0 is read."""
        return self.together == 1 and not self.split

    @property
    def part(self) -> int:
        """Columns of a unit that share a scale."""
        return min(self.unit, self.group) if self.split else self.unit

    @property
    def steps_of_scale(self) -> int:
        """Steps of a batch whose sums are scaled together."""
        if self.split:
            return 1
        steps = self.batch if self.group >= self.columns else self.group // self.step
        return next(
            n for n in range(self.batch, 0, -1) if not (steps % n or self.batch % n)
        )

    @property
    def paired(self) -> bool:
        """Two neighbouring lanes have the same scale."""
        return not self.split or self.group % (2 * self.unit) == 0

    @property
    def constant(self) -> int:
        """What all codes are too large by, where offsets do not say it."""
        return EXCESS.get(self.format, 128) + (0 if self.offsets else self.zero)

    @property
    def correction(self) -> int:
        """What a sum of activations is multiplied by, where no array says it."""
        return 0 if self.offsets else -self.constant

    @property
    def factor(self) -> int:
        """What activations are multiplied by to be summed."""
        return 1 if self.offsets else self.correction

    @property
    def units(self) -> int:
        """Of a row."""
        return self.columns // self.unit

    @property
    def turns(self) -> int:
        """Batches of a warp."""
        return -(-self.columns // (self.step * self.batch * self.shares))

    @property
    def ragged(self) -> bool:
        return self.columns % (self.step * self.batch * self.shares) != 0

    @property
    def chunk(self) -> int:
        """Columns of which codes and activations are put in one order."""
        return 16 if BITS[self.format] == 2 else 8
