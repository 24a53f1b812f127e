"""The library that launches chains of kernels, made known to XLA; needs no Triton."""

import ctypes
import functools
import logging
import sysconfig
from pathlib import Path

import jax

import jaxkern.gpu as package

LIBRARY = "libjaxkern_gpu.so"
TARGET = "jaxkern_launch_chain_4"


@functools.cache
def missing_library() -> str | None:
    """Why the handler is not known to XLA, or None; says so at the first question."""
    reason = load_library()
    if reason:
        logging.getLogger("jaxkern").warning(
            "jaxkern on a GPU: %s. Kernels are launched one by one.", reason
        )
    return reason


def library() -> Path | None:
    """Where it is; an editable install has its sources here and its library there."""
    installed = Path(sysconfig.get_path("platlib"), *package.__name__.split("."))
    places = (Path(folder) / LIBRARY for folder in (*package.__path__, installed))
    return next(filter(Path.exists, places), None)


def load_library() -> str | None:
    """Why it does not load, or None."""
    path = library()
    if path is None:
        return f"{LIBRARY} was not built: no compiler when jaxkern was installed"
    try:
        handler = getattr(ctypes.CDLL(str(path)), TARGET)
    except (OSError, AttributeError) as error:  # foreign, or older than this file
        return f"{LIBRARY} does not load: {error}; install jaxkern anew"
    try:
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler), platform="CUDA")
    except jax.errors.JaxRuntimeError as error:  # built for a newer jaxlib
        return f"{LIBRARY} is not for this jaxlib: {error}; install jaxkern anew"
    return None
