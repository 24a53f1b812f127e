"""How a consumer of the kernel of five products writes to shared memory.

Threads write what they hold, and none waits for another.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jaxlib.mlir.dialects import nvvm

from jaxkern.pallas.attention.attention.gradient_blocks import BLOCK
from jaxkern.pallas.attention.attention.problem import ROWS
from jaxkern.pallas.attention.attention.rows import LINES, thread_order
from jaxkern.pallas.attention.attention.wgmma import WGMMA, tiled


def integers(x):
    """x as int32; astype would clamp it first."""
    dtype = jnp.dtype(jnp.int32)
    result = plgpu.ShapeDtypeStruct(x.shape, dtype, layout=WGMMA)

    def convert(_, x):
        return x.astype(ir.IntegerType.get_signless(32), is_signed=True)

    # what it decorates takes no context, which a type checker does not see
    inline: Any = plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=result)
    return inline(convert)(x)


def show_others() -> None:
    """What this thread wrote, to the tensor cores and the copy engine."""
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)


def store_slopes(x, ref, interpret: bool) -> None:
    """A matrix for WGMMA; no thread waits for another, as in `ref[...] = x`."""

    def store(_, x, ref):
        x.store_tiled(ref, swizzle=128)
        show_others()

    if interpret:
        ref[...] = x
    else:
        kinds = WGMMA, plgpu.RefType(tiled(ROWS, BLOCK))
        # what it decorates takes no context, which a type checker does not see
        inline: Any = plgpu.inline_mgpu(arg_types=kinds)
        inline(store)(x, ref)


def store_integers(x, ref, interpret: bool) -> None:
    """x in thread_order: each thread 16 bytes at a time, beside those of the next."""

    def store(_, x, ref):
        pairs = list(x.registers.flat)
        fours = [utils.vector_concat(pairs[n : n + 2]) for n in range(0, len(pairs), 2)]
        mgpu.FragmentedArray(
            _registers=np.array(fours, object),
            _layout=mgpu.WGStridedFragLayout(LINES, 4),
            _is_signed=True,
        ).store_untiled(ref)
        show_others()

    if interpret:
        ref[...] = thread_order(x.astype(jnp.int32))
    else:
        inline: Any = plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
        inline(store)(integers(x), ref)
