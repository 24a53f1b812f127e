"""Runs kernels of jaxkern.triton in Triton's interpreter, on this machine's CPU.

A process that does so is started with TRITON_INTERPRET=1: kernels are then not compiled
when they are decorated. The interpreter cuts float32 to bfloat16, where a GPU rounds.
What a kernel reads or writes must lie in its operands: anything else is an error.
"""

import atexit
import functools
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from tests.triton.quick_interpreter import quickly

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
alone = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
starts_it = pytest.mark.skipif(INTERPRETED, reason="this is that process")


@functools.cache
def interpreter_process() -> subprocess.Popen:
    """Forks a process for each file of tests; ends with this one.

    What other packages add to pytest is a sixth of the time that the start takes.
    """
    asked = {
        "TRITON_INTERPRET": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OPENBLAS_NUM_THREADS": "1",  # a process of several threads must not fork
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.triton.interpreter_process"],
        env=os.environ | asked,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)
    return process


def check_in_its_own_process(
    file: str, count: int | str = "", marks: str = "not full"
) -> None:
    """Kernels must not have been decorated when the interpreter is asked for."""
    process = interpreter_process()
    assert process.stdin is not None and process.stdout is not None
    with tempfile.NamedTemporaryFile("r") as printed:
        process.stdin.write(f"{file}\t{printed.name}\t{marks}\n")
        process.stdin.flush()
        code, text = process.stdout.readline().strip(), printed.read()
    assert code == "0" and f"{count} passed" in text, text


class Host:
    """An array as the interpreter wants a tensor: memory with an address."""

    def __init__(self, array: np.ndarray):
        self.array = array

    @property
    def dtype(self):
        return self.array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "Host":
        return self

    def cpu(self) -> "Host":
        return self

    def new_empty(self, size, device=None) -> "Host":
        return Host(self.array)

    def set_(self, storage, offset, size, stride) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> None:
        return None

    def copy_(self, other) -> None:
        """The memory is the same."""


def call(
    kernel, *operands, out, grid, aliases=(), in_place=True, **constants
) -> list[jax.Array]:
    """`triton_call`, also under vmap; what a kernel leaves unwritten is NaN or 255."""
    for launch_option in ("num_warps", "num_stages", "max_registers"):
        constants.pop(launch_option, None)
    if "AHEAD" in kernel.arg_names:
        constants.setdefault("AHEAD", 0)

    def run(*operands):
        given = [np.array(x) for x in operands]
        shared = {k: given[i] for i, k in aliases} if in_place else {}
        results = [
            shared[k] if k in shared else unwritten(o.shape, o.dtype)
            for k, o in enumerate(out)
        ]
        names = [n for n in kernel.arg_names if n not in constants]
        pointers = map(Host, [*given, *results])
        with bounded_by([*given, *results]):
            kernel[grid](**dict(zip(names, pointers, strict=True)), **constants)
        return results

    shapes = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in out]
    return jax.pure_callback(run, shapes, *operands, vmap_method="sequential")


def as_mask(mask: Any) -> Any:
    """The interpreter makes int32 of a tile and a scalar that are both bool."""
    if mask.data.dtype == bool:
        return mask
    interpreter = importlib.import_module("triton.runtime.interpreter")
    return interpreter.TensorHandle(mask.data.astype(bool), bridge.tl.int1)


@contextmanager
def bounded_by(arrays: list[np.ndarray]) -> Iterator[None]:
    """In the block, an access outside of all arrays raises."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    starts = np.sort(np.array([x.ctypes.data for x in arrays], np.uint64))
    ends = {x.ctypes.data: x.ctypes.data + x.nbytes for x in arrays}
    stops = np.array([ends[int(start)] for start in starts], np.uint64)
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def check(pointers, mask=None):
        at = np.ravel(pointers.data).astype(np.uint64)
        at = at if mask is None else at[np.ravel(mask.data).astype(bool)]
        size = np.uint64(max(pointers.get_element_ty().primitive_bitwidth, 8) // 8)
        of = np.searchsorted(starts, at, side="right") - 1
        outside = (of < 0) | (at + size > stops[of])
        if outside.any():
            raise IndexError(f"{outside.sum()} of {at.size} outside of every operand")

    def checked_load(self, ptrs, mask, *rest, **named):
        check(ptrs, mask)
        return load(self, ptrs, as_mask(mask), *rest, **named)

    def checked_store(self, ptrs, value, mask, *rest, **named):
        check(ptrs, mask)
        return store(self, ptrs, value, as_mask(mask), *rest, **named)

    def checked_rmw(self, op, ptr, val, mask, *rest, **named):
        check(ptr, mask)
        return rmw(self, op, ptr, val, mask, *rest, **named)

    def checked_cas(self, ptr, *rest, **named):
        check(ptr)
        return cas(self, ptr, *rest, **named)

    builder.create_masked_load, builder.create_atomic_rmw = checked_load, checked_rmw
    builder.create_masked_store, builder.create_atomic_cas = checked_store, checked_cas
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_atomic_rmw = load, rmw
        builder.create_masked_store, builder.create_atomic_cas = store, cas


def unwritten(shape, dtype) -> np.ndarray:
    y = np.empty(shape, dtype)
    y.reshape(-1).view(np.uint8)[:] = 255
    return y


def as_index(tensor) -> int:
    """Triton 3.6 takes `int` of an array of one element, which NumPy 2.5 refuses."""
    return int(tensor.handle.data.item())


def with_index(patch):
    """`patch` of the interpreter, after which a scalar tensor bounds a loop."""

    @functools.wraps(patch)
    def patched(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = as_index

    return patched


@contextmanager
def interpreted(in_place: bool = True) -> Iterator[None]:
    """In the block, launchers that use `sparse_call` run here.

    Without `in_place` aliased results have memory of their own, as XLA may give them.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    compiled_call, patch = bridge.triton_call, interpreter._patch_lang_tensor
    bridge.triton_call = functools.partial(call, in_place=in_place)
    interpreter._patch_lang_tensor = with_index(patch)
    try:
        with quickly(interpreter):
            yield
    finally:
        bridge.triton_call = compiled_call
        interpreter._patch_lang_tensor = patch


class WithoutLayouts:
    """Gluon as Triton, for kernels that share no memory and name layouts alone."""

    def __getattr__(self, name: str) -> Any:
        return getattr(bridge.tl, name)

    def layout(self, *parts: Any) -> None:
        return None

    BlockedLayout = SliceLayout = layout

    def num_warps(self) -> int:
        return 1

    def arange(self, start: int, end: int, layout: None) -> Any:
        return bridge.tl.arange(start, end)

    def convert_layout(self, x: Any, layout: None) -> Any:
        return x


@contextmanager
def without_layouts(*modules: ModuleType) -> Iterator[None]:
    """In the block, the Gluon functions of these files can be interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name, f in list(vars(module).items()):
                if type(f).__name__ == "GluonJITFunction":
                    kernel = bridge.jit(f.fn)
                    # which the interpreter knows by their names in Triton alone
                    kernel.rewrite().__annotations__ = f.fn.__annotations__
                    patch.setattr(module, name, kernel)
            patch.setattr(module, "gl", WithoutLayouts())
        yield
