"""What runs on Apple platforms: every op its reference, rewritten for the plugin."""

import functools

from jaxkern.lowering.apple.plugins import PLATFORMS
from jaxkern.lowering.apple.portable import portable
from jaxkern.primitives.kernel_primitive import REWRITES

REWRITES.update({name: functools.partial(portable, platform=name) for name in PLATFORMS})
