"""Calls a C++ kernel from JAX, through XLA's foreign function interface.

The kernels are one shared library, built when jaxkern is installed. Where it is absent,
because there was no compiler, `missing` says so and every op runs its reference.
"""

import ctypes
import functools
import logging
import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import jaxkern.cpu as package

LIBRARY = "libjaxkern_cpu.so"
HANDLERS = (
    "quantized_matmul",
    "quantized_matmul_add",
    "quantized_matmul_id",
    "rms_norm_matmul",
    "quantized_embedding",
    "attention",
    "argmax",
    "top_k",
    "sample",
    "norm",
    "norm_gradient",
    "delta_rule",
    "matmul_transpose_b",
    "affine_matmul",
    "linear_cross_entropy",
    "linear_cross_entropy_gradient",
    "causal_conv",
    "causal_conv_gradient",
    "softmax",
    "softmax_gradient",
    "rope",
    "affine_matmul_id",
    "expert_matmul",
    "state_space",
)
FLOATS = ("float32", "bfloat16", "float16")  # what kernels read and write


class Library:
    """The shared library, loaded and known to XLA.

    Attributes:
      missing: why no kernel can run, or None.
      instruction_set: of the kernels that this machine runs, such as "avx512vnni".
    """

    def __init__(self) -> None:
        self.missing: str | None = None
        self.instruction_set = "none"
        # an editable install has its sources here and its library there
        installed = Path(sysconfig.get_path("platlib"), *package.__name__.split("."))
        found = [
            path
            for folder in (*package.__path__, installed)
            if (path := Path(folder) / LIBRARY).exists()
        ]
        if not found:
            self.missing = (
                "the C++ kernels were not built: no compiler when jaxkern was installed"
            )
            return
        try:
            library = ctypes.CDLL(str(found[0]))
            for name in HANDLERS:
                handler = getattr(library, f"jaxkern_{name}")
                jax.ffi.register_ffi_target(
                    f"jaxkern_{name}", jax.ffi.pycapsule(handler), platform="cpu"
                )
            library.jaxkern_instruction_set.restype = ctypes.c_char_p
            self.instruction_set = library.jaxkern_instruction_set().decode()
        except (OSError, AttributeError) as error:  # foreign, or older than this file
            self.missing = f"the C++ kernels do not load: {error}; install jaxkern anew"


@functools.cache
def library() -> Library:
    """Loaded at the first question; says once if it is missing."""
    loaded = Library()
    if loaded.missing:
        logging.getLogger("jaxkern").warning(
            "jaxkern on a CPU: %s. Every op runs its reference.", loaded.missing
        )
    return loaded


def missing() -> str | None:
    """Why no C++ kernel can run here, or None."""
    return library().missing


def refuses(**operands: Any) -> str | None:
    """Why no kernel can read operands of these shapes and dtypes, or None."""
    for name, x in operands.items():
        if x is None:
            continue
        if x.dtype not in FLOATS:
            return f"`{name}` is {x.dtype}, not one of {', '.join(FLOATS)}"
        if math.prod(x.shape) == 0:
            return f"`{name}` is empty"
    return missing()


def cpu_call(
    name: str,
    results: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    *operands: jax.Array,
    **attributes: Any,
) -> Any:
    """Calls the handler `jaxkern_<name>`.

    Under `vmap` each operand gets a batch dim in front, of size 1 where it is not
    mapped; the handler walks over it, so one call stays one call.
    """
    call = jax.ffi.ffi_call(f"jaxkern_{name}", results, vmap_method="expand_dims")
    return call(*operands, **attributes)
