"""What makes `import jaxkern` short, and the tracing of whole models."""

import contextlib
import functools
import gc
import time
from collections.abc import Iterator
from typing import Any

import jaxtyping

IMPORTED = time.time()  # the first module of this package, seconds since 1970


@contextlib.contextmanager
def quick_import() -> Iterator[None]:
    """Imports in this block collect no garbage and make equal annotations once."""
    with no_collections(), equal_annotations_are_one():
        yield


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Collections would walk all of jax, a third of the import.

    Tracing and lowering two executables of 32 layers takes a sixth less without them,
    and no more memory.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # what was made stays: it is old at once, unless somebody froze objects
        if gc.get_freeze_count() < 1000:  # Python begins with some hundreds
            gc.freeze()
            gc.unfreeze()
        gc.enable()


@contextlib.contextmanager
def equal_annotations_are_one() -> Iterator[None]:
    """`Float[Array, " d"]` is the same class wherever it stands.

    jaxtyping makes a class of each. Of 2400 there are 400 different ones; the others
    cost a tenth of the import, and as much again when the process ends.
    """
    kind: Any = type(jaxtyping.Float)
    original = kind.__getitem__
    kind.__getitem__ = functools.cache(original)
    try:
        yield
    finally:
        kind.__getitem__ = original
