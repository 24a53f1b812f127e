"""What `cpu_ops` times: an operator on given operands."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    op: str  # the record that its figures belong to
    name: str
    f: Callable
    operands: tuple
    flops: float = 0.0
    bytes_read: float | None = None  # where not all operands are read
    whole: bool = True  # C++ kernels do all of it


def normal(*shape: int, dtype="float32", scale: float = 1.0):
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    return jnp.asarray(scale * rng.normal(size=shape), dtype)
