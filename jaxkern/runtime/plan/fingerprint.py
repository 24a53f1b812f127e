"""What a traced and compiled call depends on, as text, without tracing it.

`described` writes a value so that two texts are equal only if the values are, in any
process. What it does not know to write so, an object of another package among them, it
refuses: nothing is found by a text that leaves something out.
"""

import dataclasses
import enum
import functools
import hashlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

KNOWN = ("jaxkern", "jax", "jaxlib", "numpy", "ml_dtypes", "builtins")


class NotUnderstoodError(ValueError):
    """A value that `described` cannot write."""


def described(value: Any) -> str:
    """A static value: numbers, texts, dtypes, functions by name, records of these."""
    kind = type(value)
    if value is None or kind in (bool, int, str, bytes):
        return repr(value)
    if kind is float:
        return value.hex()
    if isinstance(value, enum.Enum):
        return f"{name_of(kind)}.{value.name}"
    if isinstance(value, np.dtype | np.generic | np.ndarray):
        return described_numbers(value)
    if inspect.isclass(value) or inspect.isfunction(value):
        return name_of(value)
    return f"{name_of(kind)}({', '.join(parts_of(value))})"


def described_numbers(value: Any) -> str:
    if isinstance(value, np.dtype):
        return f"dtype {value}"
    if value.dtype.hasobject:
        raise NotUnderstoodError("an array of objects")
    digest = hashlib.sha256(value.tobytes()).hexdigest()
    return f"{value.dtype}{value.shape} {digest}"


def parts_of(value: Any) -> Iterator[str]:
    """What a container or a record of this package is made of."""
    kind = type(value)
    if isinstance(value, functools.partial):
        yield from map(described, (value.func, value.args, value.keywords))
    elif kind in (tuple, list) or hasattr(kind, "_fields"):
        yield from map(described, value)
    elif kind is dict:
        yield from (f"{described(k)}: {described(v)}" for k, v in value.items())
    elif kind in (set, frozenset):
        yield from sorted(map(described, value))
    elif dataclasses.is_dataclass(value):
        compared = (f for f in dataclasses.fields(value) if f.compare)
        yield from (f"{f.name}={described(getattr(value, f.name))}" for f in compared)
    else:
        raise NotUnderstoodError(f"a {kind.__module__}.{kind.__qualname__}")


def name_of(thing: Any) -> str:
    """Of a function or class of a package whose version is known, if it is found so."""
    module, name = thing.__module__, thing.__qualname__
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    known = module.partition(".")[0] in KNOWN or thing is functools.partial
    if not known or found is not thing:
        raise NotUnderstoodError(f"{module}.{name}")
    return f"{module}.{name}"


def described_function(function: Any) -> str:
    """A jitted function: what it wraps, what it donates, options, shardings."""
    if (how := getattr(function, "_jit_info", None)) is None:
        raise NotUnderstoodError("a function that is not jitted, or by another jax")
    told = {k: str(v) for k, v in how._asdict().items() if not k.startswith("fun_")}
    return described((function.__wrapped__, told))


def described_operands(operands: Any) -> str:
    """Arrays in a pytree by shape, dtype and where they lie; their numbers are free."""
    leaves, tree = jax.tree.flatten(operands)
    return f"{described_tree(tree)} {' '.join(map(described_array, leaves))}"


def described_tree(tree: jax.tree_util.PyTreeDef) -> str:
    if (node := tree.node_data()) is None:
        return "*"
    kind, static = node
    if kind is type(None):
        return "None"
    inner = ", ".join(map(described_tree, tree.children()))
    return f"{name_of(kind)}[{described(static)}]({inner})"


def described_array(x: Any) -> str:
    """One on the default device, or the shape of one; of numbers or of random keys.

    One of numpy goes there as jax puts it: with 32 bits but for `jax_enable_x64`.
    """
    if type(x) is np.ndarray or isinstance(x, np.generic):
        return described_numpy(x)
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        raise NotUnderstoodError(f"an operand that is a {type(x).__name__}")
    where = ""
    if x.sharding is not None:
        if x.sharding.device_set != {jax.devices()[0]}:
            raise NotUnderstoodError("an array on another device, or on several")
        layout = getattr(x, "format", x.sharding)
        where = f"{layout} {getattr(x, 'committed', '')}"
    # an array of keys has no `weak_type`
    return f"{x.dtype}{x.shape} {getattr(x, 'weak_type', False)} {where}"


def described_numpy(x: np.ndarray | np.generic) -> str:
    try:
        seen = jax.typeof(x)
    except TypeError as error:  # of texts, objects or records
        raise NotUnderstoodError(f"a numpy array of {x.dtype}") from error
    return f"numpy {seen.dtype}{seen.shape} {seen.weak_type}"
