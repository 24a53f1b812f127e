"""Callbacks of JAX that take NumPy's arrays as they come.

Mosaic's interpreter calls Python back for every step of every thread, thousands of
times. JAX makes arrays of its own of the arguments first, which is half of the time.
"""

from typing import Any

import jax
import numpy as np
from jax._src import callback as callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory
from jax.core import Tracer


def called_back(*args: Any, callback: Any, **_: Any) -> Any:
    """`io_callback_impl` without a device; the copies are the callback's to keep."""
    return jax.tree.map(np.asarray, callback(*map(np.array, args)))


def as_int(x: Any) -> Any:
    """Part of a thread's place: a number, or what stands for one while JAX traces."""
    return x if isinstance(x, Tracer) else int(x)


def take_numpy() -> None:
    """For the rest of this process."""
    callbacks.io_callback_impl = called_back
    shared_memory._to_int = as_int
