"""Kernels in an exported program: calls by names that XLA does not know by itself."""

import jax

from jaxkern.cpu.cpu_call import HANDLERS, library
from jaxkern.gpu.chain_library import TARGET, missing_library

# not on jax's list of stable calls
OWN_TARGETS = (
    "triton_kernel_call_ffi",
    "mosaic_gpu_v2",
    TARGET,
    *(f"jaxkern_{name}" for name in HANDLERS),
)
CHECKS = tuple(map(jax.export.DisabledSafetyCheck.custom_call, OWN_TARGETS))


def exported_kernels() -> tuple[jax.export.DisabledSafetyCheck, ...]:
    """Lets this process write and run programs of `jax.export` that call kernels.

    `jax.export` refuses a call whose target it does not know: `disabled_checks=` takes
    what this returns. A process that runs such a program calls this first, for XLA
    learns the names of the C++ kernels from it. The program is then tied to the version
    of jaxkern that made it; under `backend("xla")` it calls no kernel and is not.

    Returns:
      The checks that `jax.export.export` is to leave out: one for each kernel's name.

    Example:
      >>> from jaxkern import runtime
      >>> checks = runtime.exported_kernels()
      >>> f, x = jax.jit(jaxkern.softmax), jnp.zeros((2, 4))
      >>> exported = jax.export.export(f, disabled_checks=checks)(x)
      >>> jax.export.deserialize(exported.serialize()).call(x)[0]
      Array([0.25, 0.25, 0.25, 0.25], dtype=float32)
    """
    library()
    if jax.default_backend() == "gpu":
        missing_library()
    return CHECKS
