"""What compiled code depends on beside the function: versions, settings, the machine."""

import functools
import hashlib
import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

import jax

from jaxkern.gpu.device import assumed_capability, device_capability, driver_version
from jaxkern.lowering.apple.fused import assumed_version
from jaxkern.lowering.machine import machine, num_threads, versions
from jaxkern.lowering.tuned import every_op
from jaxkern.primitives.call import backend_context
from jaxkern.primitives.linear.policy import policy_context
from jaxkern.runtime.plan.fingerprint import NotUnderstoodError, described

# settings of jax that say where and when to keep executables, or what to print
ASIDE = re.compile(
    "jax_(persistent_cache|compilation_cache|logging|log_|explain_cache|traceback|"
    "include_full_tracebacks|tracer_error|raise_persistent)"
)
# variables that jax, XLA, Triton, LLVM and CUDA read
READ = re.compile(
    "(JAX|XLA|TF|TRITON|LLVM|MLIR|PTXAS|NVPTX|CUDA|NVIDIA|CUBLAS|CUDNN|MOSAIC|PALLAS|"
    "JAXKERN|DISABLE|ENABLE|ALLOW|USE|OMP)_|XLA_FLAGS|TF32"
)
# those of them that name folders of caches or say what is printed, and those that Mosaic
# sets as it is imported
WHERE = re.compile(
    "TF_C(PP|LI)_|JAX_(COMPILATION_CACHE|PERSISTENT_CACHE)|TRITON_(CACHE|DUMP|HOME)|"
    "MOSAIC_GPU_(CUDA_ROOT|RUNTIME_LIB_PATH|NVSHMEM)"
)
PACKAGES = re.compile("(jax|triton|nvidia|numpy|ml_dtypes).*-info")


def surroundings() -> str:
    """All that is the same for every call of this thread, as text.

    Raises:
      NotUnderstoodError: an op has a kernel that is not this package's, or a mesh of
        several devices is in force.
    """
    device = jax.devices()[0]
    if jax.config.jax_default_device not in (None, device):
        raise NotUnderstoodError("`jax_default_device` is not the first device")
    if not jax.sharding.get_abstract_mesh().empty:
        raise NotUnderstoodError("a mesh is in force")
    check_rows()
    contexts = backend_context.value, policy_context.value, assumed_version.get()
    return "\n".join(
        (
            described([versions(), machine(device), num_threads(), sys.version]),
            described([device.client.platform_version, len(jax.devices())]),
            described([device_capability(), assumed_capability, driver_version()]),
            described(contexts),
            *settings(),
            *packages(),
            digest_of_sources(),
        )
    )


def settings() -> list[str]:
    """Those of jax, in this thread, and the variables of the environment."""
    values = jax.config.values  # in this thread
    names = sorted(name for name in values if not ASIDE.match(name))
    of_jax = [f"{name}={values[name]}" for name in names]
    variables = sorted(os.environ.items())
    return of_jax + [
        f"{name}={value}"
        for name, value in variables
        if READ.match(name) and not WHERE.match(name)
    ]


def check_rows() -> None:
    """Raises where an op may run a kernel whose sources are not known."""
    for p in every_op().values():
        for row in (row for rows in p.rows.values() for row in rows):
            module = getattr(row.kernel, "__module__", "")
            if not module.startswith("jaxkern."):
                raise NotUnderstoodError(f"a kernel of {p.name} from {module or row}")


@functools.cache
def packages() -> tuple[str, ...]:
    """Names and versions of what is installed and writes or runs machine code."""
    found = set()
    for folder in filter(os.path.isdir, sys.path):
        found |= {name for name in os.listdir(folder) if PACKAGES.match(name)}
    return tuple(sorted(found))


@functools.cache
def digest_of_sources() -> str:
    """SHA-256 of this package's modules and libraries: 4 MB, 20 ms."""
    here = Path(__file__).parents[2]
    built = Path(sysconfig.get_path("platlib"), here.name)
    digest = hashlib.sha256()
    for folder in dict.fromkeys((here, built)):
        for file in sorted(folder.rglob("*")):
            if file.suffix in (".py", ".so", ".json"):
                add(digest, str(file.relative_to(folder)).encode())
                add(digest, file.read_bytes())
    return digest.hexdigest()


def add(digest: Any, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
