"""How a file stores a decoder's weights, where files of one model differ."""

from dataclasses import dataclass
from typing import Literal

Shapes = dict[str, tuple[int, ...]]
"""Tensors by their names behind "blk.<layer>."."""

ExpertForm = Literal["stacked", "single", "fused", "columns", "alternating", "mxfp4"]
"""How experts lie.

| stacked | gate, up and down of `[e, f, d]` each |
| single | a tensor for each expert |
| fused | gate and up as `[e, 2*f, d]`, all rows of gate first |
| columns | gate and up as `[e, d, 2*f]`, all columns of gate first; down transposed |
| alternating | gate and up as `[e, d, 2*f]`, columns of gate and up by turns |
| mxfp4 | likewise, in groups of MXFP4 as `[e, 2*f, d]` |
"""


@dataclass(frozen=True)
class Layout:
    """One kind of file.

    Attributes:
      experts: see `ExpertForm`.
      one_gate_up: gate and up of a dense block are one tensor.
      flat_taps: a convolution is `[d, w]`, not `[d, 1, w]`.
      rates: how fast a state decays is -exp(a_log), named ssm_a.
      correction_row: the correction of a router is `[1, e]`, not `[e]`.
      plus: what norms are stored less.
      mixer_norm, ffn_norm, output_norm: names of norms.
      bare_ffn_norm: that name is the whole one, without `.weight`.
    """

    experts: ExpertForm = "stacked"
    one_gate_up: bool = False
    flat_taps: bool = False
    rates: bool = False
    correction_row: bool = False
    plus: float = 0.0
    mixer_norm: str = "attn_norm"
    ffn_norm: str = "ffn_norm"
    output_norm: str = "output_norm"
    bare_ffn_norm: bool = False

    @property
    def norms(self) -> tuple[str, str]:
        """Tensors of the norms before a mixer, and before a feed-forward block."""
        end = "" if self.bare_ffn_norm else ".weight"
        return f"{self.mixer_norm}.weight", f"{self.ffn_norm}{end}"

    def taps(self, channels: int, width: int) -> tuple[int, ...]:
        """Shape of a convolution."""
        return (channels, width) if self.flat_taps else (channels, 1, width)

    def groups(self, many: int, width: int) -> tuple[int, ...]:
        """Shape of a norm of so many channels in groups."""
        return (many, width // many) if self.rates else (width,)

    @property
    def decay(self) -> str:
        """Name of how fast a state decays."""
        return "ssm_a" if self.rates else "ssm_a_log"
