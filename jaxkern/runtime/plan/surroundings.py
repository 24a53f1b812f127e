"""What compiled code depends on beside its function: versions, settings, machine."""

import functools
import hashlib
import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

import jax

from jaxkern.cpu import cpu_call
from jaxkern.gpu import chain_library
from jaxkern.gpu.device import (
    assumed_capability,
    device_capability,
    driver_version,
    num_sms,
)
from jaxkern.lowering.apple.fused import assumed_version
from jaxkern.lowering.machine import machine, num_threads, versions
from jaxkern.lowering.tuned import every_op
from jaxkern.primitives.call import backend_context
from jaxkern.primitives.linear.policy import policy_context
from jaxkern.quick_import import IMPORTED
from jaxkern.runtime.plan.fingerprint import NotUnderstoodError, described

# settings of jax that say where and when to keep executables, or what to print
ASIDE = re.compile(
    "jax_(persistent_cache|compilation_cache|logging|log_|explain_cache|traceback|"
    "include_full_tracebacks|tracer_error|raise_persistent)"
)
# variables that jax, its plugins, XLA, Triton, LLVM and CUDA read
READ = re.compile(
    "(JAX|XLA|TF|TRITON|LLVM|MLIR|PTXAS|NVPTX|CUDA|NVIDIA|CUBLAS|CUDNN|MOSAIC|PALLAS|"
    "ROCM|HIP|HSA|LIBTPU|TPU|MPS|MLX|JAXKERN|DISABLE|ENABLE|ALLOW|USE|OMP)_|"
    "XLA_FLAGS|TF32"
)
# those of them that name folders of caches or one of several GPUs, or say what is
# printed, and those that Mosaic sets as it is imported
WHERE = re.compile(
    "TF_CPP_|JAX_(COMPILATION_CACHE|PERSISTENT_CACHE)|TRITON_(CACHE|DUMP|HOME)|"
    "(CUDA|NVIDIA)_VISIBLE_DEVICES|MOSAIC_GPU_(CUDA_ROOT|RUNTIME_LIB_PATH|NVSHMEM)"
)
PACKAGES = re.compile("(jax|triton|nvidia|numpy|ml_dtypes).*-info")


def surroundings() -> list[str]:
    """All that is the same for every call of this thread, as texts.

    The C++ libraries are loaded and made known to XLA, as lowering does.

    Raises:
      NotUnderstoodError: an op has a kernel that is not this package's, a mesh of
        several devices is in force, XLA reads its flags from a file, or a file of what
        is imported here has changed since.
    """
    device = jax.devices()[0]
    if jax.config.jax_default_device not in (None, device):
        raise NotUnderstoodError("`jax_default_device` is not the first device")
    if not jax.sharding.get_abstract_mesh().empty:
        raise NotUnderstoodError("a mesh is in force")
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("--"):
        raise NotUnderstoodError(f"XLA_FLAGS={flags}, the name of a file")
    check_rows()
    check_unchanged()
    contexts = backend_context.value, policy_context.value, assumed_version.get()
    capabilities = device_capability(), assumed_capability
    return [
        described([versions(), machine(device), num_threads(), sys.version]),
        described([device.client.platform_version, len(jax.devices())]),
        described([capabilities, num_sms(), driver_version()]),
        described([contexts, libraries()]),
        *settings(),
        *packages(),
        digest_of_sources(),
    ]


def libraries() -> list[str | None]:
    """What the C++ kernels run on, and why the chains of a GPU do not load."""
    chains = None
    if jax.default_backend() == "gpu" and chain_library.library():
        chains = chain_library.missing_library()
    kernels = cpu_call.library()
    return [kernels.instruction_set, kernels.missing, chains]


def settings() -> list[str]:
    """Those of jax, in this thread, and the variables of the environment."""
    values = jax.config.values
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


def check_unchanged() -> None:
    """Raises where a file was written after this process imported the package.

    What was imported is then perhaps not what the file says.
    """
    for path in (*packages(), *(file for _, file in sources())):
        status = os.stat(path)
        if max(status.st_mtime, status.st_ctime) > IMPORTED:
            raise NotUnderstoodError(f"{path}, changed since it was imported,")


@functools.cache
def packages() -> tuple[str, ...]:
    """Where what writes or runs machine code is installed, names with versions."""
    found = set()
    for folder in filter(os.path.isdir, sys.path):
        names = filter(PACKAGES.match, os.listdir(folder))
        found |= {os.path.abspath(os.path.join(folder, name)) for name in names}
    return tuple(sorted(found))


@functools.cache
def sources() -> tuple[tuple[str, str], ...]:
    """Folder and path of this package's modules, tables and libraries."""
    here = Path(__file__).parents[2]
    built = Path(sysconfig.get_path("platlib"), here.name)
    found = []
    for folder in dict.fromkeys((here, built)):
        for inner, _, files in os.walk(folder):
            names = (name for name in files if name.endswith((".py", ".so", ".json")))
            found += [(str(folder), os.path.join(inner, name)) for name in names]
    return tuple(sorted(found))


@functools.cache
def digest_of_sources() -> str:
    """SHA-256 of them: 4 MB, 20 ms."""
    digest = hashlib.sha256()
    for folder, path in sources():
        add(digest, path.removeprefix(folder).encode())
        with open(path, "rb") as file:
            add(digest, file.read())
    return digest.hexdigest()


def add(digest: Any, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
