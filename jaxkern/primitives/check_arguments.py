"""Checks the arguments of a public function against its annotations."""

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import AbstractArray, PRNGKeyArray

from jaxkern.primitives.declared_dims import (
    Annotated,
    annotated,
    as_array,
    check_range,
    issubclass_safe,
    unwrapped,
)
from jaxkern.primitives.however_cut import however_cut

NUMBERS = {bool: (bool, np.bool_), int: (int, np.integer), float: (float, np.floating)}
OWN = "jaxkern."
INTEGERS = ("Int", "Int32", "Integer", "UInt")  # `fn` knows which widths it can take
ANY_INTEGER = tuple(
    f"{sign}int{n}" for sign in ("", "u") for n in (2, 4, 8, 16, 32, 64)
)
NOT_NEGATIVE = (
    "eps",
    "eps_root",
    "value_eps",
)  # options that are bounded wherever they stand
LABELS = ("ignore_index",)  # options that are compared with int32
WRONG = (str, bytes, list, tuple, dict, set, types.NoneType, types.FunctionType)


@dataclasses.dataclass(frozen=True)
class Declared:
    """What an annotation allows: an array, classes of containers, numbers, a string."""

    array: Annotated | None
    classes: tuple[type, ...]
    numbers: tuple[type, ...]
    optional: bool
    is_key: bool = False
    text: bool = False

    def __str__(self) -> str:
        names = [as_written(cls) for cls in (*self.classes, *self.numbers)]
        names += ["str"] * self.text
        return " or ".join(["array"] * (self.array is not None) + names)

    def is_container(self, x: Any) -> bool:
        return any(cls in type(x).__mro__ for cls in self.classes)  # a protocol, too

    def is_name(self, x: Any) -> bool:
        """Whether the function is to say which names there are: x may be looked up."""
        others = self.array is not None or self.classes or self.numbers
        return not others and isinstance(x, Hashable) and not isinstance(x, Tracer)


def check_arguments[F: Callable](fn: F) -> F:
    """`fn` that first checks its arguments: each is what its annotation allows.

    A list for an array, another dtype, a traced option: one TypeError with the names of
    function and argument, before anything is computed. What has `__jax_array__` counts
    as the array that it gives, and a number that is held as an array as the number.
    What is annotated otherwise (trees, tuples) is left to `fn`, and so are the names
    among which an option chooses, and the dtype of a mask: `fn` knows what else it can
    have been meant for.
    """

    @functools.cache  # read at the first call: the import of all ops is to be short
    def names() -> list[str]:
        parameters = inspect.signature(fn).parameters.values()
        return [q.name for q in parameters if q.kind is not q.KEYWORD_ONLY]

    @functools.cache
    def known() -> dict[str, Declared]:
        hints = typing.get_type_hints(fn)
        found = {name: declared(fn, name, hint) for name, hint in hints.items()}
        return {n: d for n, d in found.items() if d is not None and n != "return"}

    def arrays() -> dict[str, Annotated | None]:
        return {n: d.array for n, d in known().items()}

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        def argument(name: str, x: Any) -> Any:
            kind, x = known().get(name), unwrapped(x)
            return x if kind is None else checked_argument(fn.__name__, name, kind, x)

        given = [argument(n, x) for n, x in zip(names(), args, strict=False)]
        named = {n: argument(n, x) for n, x in kwargs.items()}
        given += args[len(given) :]
        return however_cut(fn, given, named, names, arrays)

    checked.__module__ = "jaxkern"  # where users, and pickle, find it
    return typing.cast(F, checked)


def check_fields(record: Any) -> None:
    """Checks a frozen dataclass of options, in its `__post_init__`, as arguments are.

    A key is left to the function that takes the record: a dataclass with one is a
    pytree, which `vmap` also makes of axes.
    """
    for name, kind in fields_of(type(record)).items():
        if kind is not None and not kind.is_key:
            x = unwrapped(getattr(record, name))
            x = checked_argument(type(record).__name__, name, kind, x)
            object.__setattr__(record, name, x)


@functools.cache
def fields_of(cls: Any) -> dict[str, Declared | None]:
    """What the annotation of each field of a dataclass allows."""
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    return {
        field.name: declared(cls, field.name, hints[field.name]) for field in fields
    }


def as_written(cls: Any) -> str:
    """`Dropout(rate, key)`, but the name alone of what functions make of arrays."""
    name = cls.__name__
    if not dataclasses.is_dataclass(cls):
        return name
    kinds = fields_of(cls).values()
    needed = [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is field.default_factory  # both are missing
    ]
    if not needed or any(kind is not None and kind.array for kind in kinds):
        return name
    return f"{name}({', '.join(needed)})"


def declared(fn: Callable, name: str, hint: Any) -> Declared | None:
    """What `hint` allows, or None if that cannot be told by the type alone."""
    if hint in (PRNGKeyArray, PRNGKeyArray | None):
        return Declared(None, (), (), optional=hint != PRNGKeyArray, is_key=True)
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    parts = typing.get_args(hint) if union else (hint,)
    arrays = [p for p in parts if issubclass_safe(p, AbstractArray)]
    numbers = tuple(p for p in parts if p in NUMBERS)
    classes = tuple(p for p in parts if is_container(p))
    names = tuple(p for p in parts if is_text(p))
    known = (*arrays, *numbers, *classes, *names, types.NoneType)
    if len(known) == 1 or any(p not in known for p in parts):
        return None
    if not (arrays or numbers or names) and any(map(is_protocol, classes)):
        return None  # `fn` says which containers it reads
    every = [annotated(fn, name, array) for array in arrays]
    array = every[0] if every else None
    if len(every) > 1:
        kind = " or ".join(a.kind for a in every)
        dtypes = tuple(d for a in every for d in a.dtypes)
        array = dataclasses.replace(every[0], kind=kind, dtypes=dtypes)
    elif array is not None and array.kind == "Bool":
        array = dataclasses.replace(array, dtypes=())
    elif array is not None and array.kind in INTEGERS:
        array = dataclasses.replace(array, dtypes=ANY_INTEGER)
    optional = types.NoneType in parts
    return Declared(array, classes, numbers, optional, text=bool(names))


def is_container(part: Any) -> bool:
    """Whether part of an annotation is a class of ours that holds arrays."""
    if not isinstance(part, type) or OWN not in part.__module__:
        return False
    return dataclasses.is_dataclass(part) or is_protocol(part)


def is_protocol(part: type) -> bool:
    return typing.Protocol in part.__bases__


def is_text(part: Any) -> bool:
    """Whether part of an annotation is a string, or one of several."""
    words = typing.get_args(part) if typing.get_origin(part) is typing.Literal else ()
    return part is str or any(isinstance(word, str) for word in words)


def checked_argument(op: str, name: str, kind: Declared, x: Any) -> Any:
    if (x is None and kind.optional) or kind.is_container(x):
        return x
    if kind.text and (isinstance(x, str) or kind.is_name(x)):
        return x
    if kind.is_key:
        return checked_key(op, name, x)
    if kind.numbers and kind.array is None:
        x = as_number(op, name, kind, x)
    if isinstance(x, np.integer) and int in kind.numbers:
        x = int(x)  # so that options hash and compare as plain ones
    allowed = (*kind.numbers, *((int,) if float in kind.numbers else ()))
    if any(isinstance(x, NUMBERS[n]) for n in allowed):
        check_number(op, name, kind, x)
        return x
    if kind.array is not None and not (kind.classes and isinstance(x, WRONG)):
        return at_least_int32(kind.array, as_array(op, kind.array, x))
    if isinstance(x, Tracer):
        raise TypeError(
            f"{op}: `{name}` must be a static {kind}, got a traced array. Close over "
            "the number, or name it in static_argnames."
        )
    if kind.numbers and not isinstance(x, WRONG):
        return x  # another number, a concrete array, a symbolic size
    got = repr(x) if isinstance(x, str) else type(x).__name__
    if isinstance(x, int | float):
        got += f" {x}"
    raise TypeError(f"{op}: `{name}` must be {kind}, got {got}.")


def as_number(op: str, name: str, kind: Declared, x: Any) -> Any:
    """The number that an array holds; TypeError for several, or for a part of one."""
    if isinstance(x, jax.Array | np.ndarray) and not isinstance(x, Tracer):
        if x.ndim:
            raise TypeError(
                f"{op}: `{name}` must be {kind}, got an array of shape {x.shape}."
            )
        x = x.item()
    whole = int in kind.numbers and float not in kind.numbers
    if whole and isinstance(x, float) and not x.is_integer():
        raise TypeError(f"{op}: `{name}` must be {kind}, got {x}.")
    return x


def at_least_int32(declared: Annotated, x: jax.Array | None) -> jax.Array | None:
    """`x`, narrow integers in int32: what is counted from them would wrap in int8."""
    if x is None or "int32" not in declared.dtypes:
        return x
    narrow = jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 32
    return x.astype(jnp.int32) if narrow else x


def check_number(op: str, name: str, kind: Declared, x: Any) -> None:
    if name in NOT_NEGATIVE and not 0 <= x < math.inf:
        raise ValueError(f"{op}: `{name}` must be finite and not negative, got {x}.")
    of_integers = kind.array is not None and "int32" in kind.array.dtypes
    if isinstance(x, int) and (of_integers or name in LABELS):
        check_range(op, name, x, np.int32)


def checked_key(op: str, name: str, x: Any) -> Any:
    """`x` if it is one key of `jax.random.key`, or one of `jax.random.PRNGKey`."""
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        right = shape == ()
    else:
        raw = jax.eval_shape(jax.random.PRNGKey, 0)
        right = dtype == raw.dtype and shape == raw.shape
    if not right:
        got = type(x).__name__ if dtype is None else f"{dtype}{list(shape or ())}"
        raise TypeError(
            f"{op}: `{name}` must be one PRNG key, such as jax.random.key(0), got "
            f"{got}."
        )
    return x
