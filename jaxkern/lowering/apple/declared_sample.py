"""A small call of an op as its public function declares it, where none is written."""

import inspect
import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern as jk
from jaxkern.primitives.check_arguments import declared
from jaxkern.primitives.declared_dims import Annotated

Call = tuple[Callable, tuple]  # function and its arguments
LEADING, SIZE = (2, 3), 4  # of `...`, and of every dim that has a name


class Draw:
    """Random float32 arrays, a new one at each call, the same ones in each process."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __call__(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.generator.standard_normal(shape), jnp.float32)


def declared_sample(name: str, draw: Draw) -> Call:
    """The public function of an op and arguments: all arrays, options as they are.

    Args:
      name: of the op and of its public function.
      draw: float32 numbers of a shape.

    Raises:
      ValueError: the op has no public function of its name, an argument that is no
        array, or an array that is not of floats: what it means is not declared.
    """
    where = "add a call of it to jaxkern/lowering/apple/samples.py"
    fn = getattr(jk, name, None)
    if fn is None:
        raise ValueError(f"{name}: no public function has this name: {where}.")
    hints, arguments = typing.get_type_hints(fn), []
    for q in inspect.signature(fn).parameters.values():
        kind = declared(fn, q.name, hints.get(q.name))
        array = None if kind is None else kind.array
        if array is not None and array.is_float and q.kind is not q.KEYWORD_ONLY:
            arguments.append(draw(*shape_of(array)))
        elif q.default is q.empty:
            raise ValueError(f"{name}: `{q.name}` is no array of floats: {where}.")
        elif q.kind is not q.KEYWORD_ONLY:
            arguments.append(q.default)
    return fn, tuple(arguments)


def shape_of(array: Annotated) -> tuple[int, ...]:
    sizes = tuple(
        math.prod(int(f) if f.isdigit() else SIZE for f in label.lstrip("#").split("*"))
        for label in array.labels
    )
    return LEADING * array.has_leading + sizes
