"""Public functions on explicit meshes, however their arrays are cut.

What stands around an op, a mask, say, or another order of heads, is plain JAX. On an
explicit mesh it refuses operands that are cut differently, or a result of which it
cannot tell how it is cut. There the function runs with automatic axes inside, and each
result is cut as the operands' dims of the same name are.
"""

import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import AbstractArray

from jaxkern.primitives.call import are_cut_by_type, mesh_of, with_automatic_axes
from jaxkern.primitives.declared_cuts import cut_names, names_of, spec_of
from jaxkern.primitives.declared_dims import Annotated, annotated, issubclass_safe

OURS = re.compile(r"[a-z]\w*: ")  # our errors begin with an operator
Known = Callable[[], Mapping[str, Annotated | None]]


def however_cut(
    fn: Callable,
    args: Sequence,
    kwargs: Mapping[str, Any],
    names: Callable[[], Sequence[str]],
    declared: Known,
) -> Any:
    """`fn(*args, **kwargs)`.

    `names` gives the names of positional arguments, `declared` what each array is.
    """
    try:
        return fn(*args, **kwargs)
    except Exception as error:  # JAX has several kinds for it, ValueError too
        leaves, tree = jax.tree.flatten((args, kwargs))
        at = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
        if OURS.match(str(error)) or not are_cut_by_type([leaves[i] for i in at]):
            raise
        named = {**dict(zip(names(), args, strict=False)), **kwargs}
        cut = cut_names(*declared_cuts(declared(), named))
        found = retried(fn, leaves, tree, at, cut)
        if found is None:
            raise error
        return found[0]


def retried(fn: Callable, leaves, tree, at: Sequence[int], cut) -> tuple | None:
    """(the result with automatic axes inside,), or None where it is refused again."""
    trees = []

    def flat(*arrays):
        every = list(leaves)
        for i, x in zip(at, arrays, strict=True):
            every[i] = x
        given, named = tree.unflatten(every)
        results, shape = jax.tree.flatten(fn(*given, **named))
        trees.append(shape)
        return results

    arrays = [leaves[i] for i in at]
    sizes = mesh_of(arrays).shape

    def cuts(results: Sequence) -> list[P]:
        known = declared_results(fn)
        if len(known) != len(results):
            return [P()] * len(results)
        return [
            spec_of(names_of(a, y.ndim), y.shape, cut, sizes)
            for a, y in zip(known, results, strict=True)
        ]

    try:
        out = jax.jit(lambda *x: with_automatic_axes(flat, x, [], cuts))(*arrays)
    except Exception:  # the first error says what the caller has done
        return None
    return (trees[0].unflatten(out),)


def declared_cuts(
    declared: Mapping[str, Annotated | None], named: Mapping[str, Any]
) -> tuple[list[Annotated], list[P]]:
    """What is declared of the arrays among the arguments, and how each is cut."""
    found, specs = [], []
    for name, x in named.items():
        a = declared.get(name)
        if a is not None and isinstance(x, jax.Array):
            found.append(a)
            specs.append(jax.typeof(x).sharding.spec)
    return found, specs


def declared_results(fn: Callable) -> list[Annotated]:
    """What is declared of the results; none where it is no array or tuple of them."""
    returned = typing.get_type_hints(fn)["return"]
    several = typing.get_origin(returned) is tuple
    parts = typing.get_args(returned) if several else (returned,)
    if not all(issubclass_safe(part, AbstractArray) for part in parts):
        return []
    return [annotated(fn, f"result {i}", part) for i, part in enumerate(parts)]
