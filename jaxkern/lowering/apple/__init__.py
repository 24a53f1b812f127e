"""Apple GPUs through the PJRT plugins of others: what runs there, and how it is known.

Everything here is lowered and op-checked; numerics verified on CPU; not executed on
Apple hardware. Where to look:

    plugins.py       what each plugin accepts
    wire.py          the module that a plugin receives
    findings.py      `check`: that module held against the plugin
    portable.py      rewrites of what a plugin would compute wrongly
    fused.py         MLX's own kernels, with jax-mps
    fused_affine.py  those of its affine format
    rows.py          what runs where
"""

from jaxkern.lowering.apple.findings import Finding, Report, check
from jaxkern.lowering.apple.fused import assume_jax_mps
from jaxkern.lowering.apple.plugins import PLATFORMS
from jaxkern.lowering.apple.portable import portable

__all__ = ["PLATFORMS", "Finding", "Report", "assume_jax_mps", "check", "portable"]
