"""Apple GPUs through the PJRT plugins of others: what runs there, and how it is known.

Everything here is lowered and op-checked; numerics verified on CPU; not executed on
Apple hardware. Where to look:

    plugins.py    what each plugin accepts
    wire.py       the module that a plugin receives
    findings.py   `check`: that module held against the plugin
    portable.py   rewrites of what a plugin would compute wrongly
"""

from jaxkern.lowering.apple import rows as _rows
from jaxkern.lowering.apple.findings import Finding, Report, check
from jaxkern.lowering.apple.plugins import PLATFORMS
from jaxkern.lowering.apple.portable import portable

__all__ = ["PLATFORMS", "Finding", "Report", "check", "portable"]
