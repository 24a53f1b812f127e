"""What Triton's interpreter does in Python for every element or call, done once.

It reduces by functions of one's own element by element, looks for the functions of the
language anew in every call of a function, makes a table of dtypes for each tensor, and
computes checks that it drops: most of the time of some kernels. The results have the
same bits.
"""

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge


@contextmanager
def quickly(interpreter: ModuleType) -> Iterator[None]:
    """In the block, Triton's interpreter, a module, takes the functions below."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_get_np_dtype", dtype_of(interpreter))
        patch.setattr(interpreter, "_patch_builtin", patch_of(interpreter))
        patch.setattr(interpreter.ReduceOps, "generic_reduce", reduced)
        builder = interpreter.interpreter_builder
        # a check beside every sum of integers, which nothing reads without `debug`
        options = dataclasses.replace(builder.options, sanitize_overflow=False)
        patch.setattr(builder, "options", options)
        yield


@functools.cache
def dtype_of(interpreter: ModuleType) -> Any:
    look_up = functools.cache(interpreter._get_np_dtype)

    def dtype(kind: Any) -> np.dtype:
        element = kind.scalar
        if isinstance(element, bridge.tl.pointer_type):  # it has no hash
            return np.dtype(np.uint64)
        return look_up(element)

    return dtype


@functools.cache
def patch_of(interpreter: ModuleType) -> Any:
    is_builtin = bridge.tl.core.is_builtin

    @functools.cache
    def names(package: Any) -> list[str]:
        """Of a package's functions, before the first of them is patched."""
        return [name for name, f in inspect.getmembers(package) if is_builtin(f)]

    def patch(package: Any, builder: Any, scope: Any) -> None:
        for name in names(package):
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    return patch


def reduced(self: Any, tensors: Any) -> list:
    """`ReduceOps.generic_reduce` with whole slices in the place of single elements.

    Each element is combined in the same order. A function that combines asks for no
    truth of its arguments: it would be one for all elements.
    """
    parts, axis = self.unravel(tensors, self.axis)
    kinds = [x.dtype for x in parts]
    slices = [np.moveaxis(x.handle.data, axis, 0) for x in parts]
    held = [x[0] for x in slices]
    for k in range(1, len(slices[0])):
        rows = [x[k] for x in slices]
        arguments = map(self.to_tensor, [*held, *rows], kinds * 2)
        found = self.combine_fn.fn(*arguments)
        found = found if isinstance(found, tuple) else (found,)
        held = [as_row(y, x) for y, x in zip(found, rows, strict=True)]
    if self.keep_dims:
        held = [np.expand_dims(x, axis) for x in held]
    return [self.to_tensor(x, kind) for x, kind in zip(held, kinds, strict=True)]


def as_row(y: Any, row: Any) -> Any:
    """What was combined, in the shape and dtype of a row."""
    numbers = np.asarray(y.handle.data if hasattr(y, "handle") else y)
    if numbers.size != row.size:
        numbers = np.broadcast_to(numbers, row.shape)
    return numbers.astype(row.dtype).reshape(row.shape)
