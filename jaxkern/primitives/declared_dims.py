"""Reads the dims that a reference declares and checks operands against them.

Dims are the strings of jaxtyping: names, a leading `...` (the same leading dims in all
operands and results that have it), integers, products `k*g` (major factor first) and
`#b` (either 1 or b).
"""

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import AbstractArray

from jaxkern.primitives.records import type_hints


@dataclasses.dataclass(frozen=True)
class Annotated:
    """One operand or result as its jaxtyping annotation declares it."""

    name: str
    dims: tuple[str, ...]
    kind: str  # Float, Int, Bool ...
    dtypes: tuple[str, ...]  # none: any
    optional: bool

    @property
    def is_float(self) -> bool:
        return "float32" in self.dtypes

    @property
    def has_leading(self) -> bool:
        return self.dims[:1] == ("...",)

    @property
    def labels(self) -> tuple[str, ...]:
        return self.dims[1:] if self.has_leading else self.dims


def annotations(fn: Callable) -> tuple[tuple[Annotated, ...], tuple[Annotated, ...]]:
    """Operands and results of `fn` as its annotations declare them."""
    hints = type_hints(fn)
    operands = tuple(
        annotated(fn, q.name, hints.get(q.name))
        for q in inspect.signature(fn).parameters.values()
        if q.kind is q.POSITIONAL_OR_KEYWORD
    )
    returned = hints.get("return")
    several = typing.get_origin(returned) is tuple
    parts = typing.get_args(returned) if several else (returned,)
    return operands, tuple(annotated(fn, f"result {i}", a) for i, a in enumerate(parts))


def annotated(fn: Callable, name: str, hint: Any) -> Annotated:
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    arrays = [a for a in parts if a is not types.NoneType]
    if len(arrays) != 1 or not issubclass_safe(arrays[0], AbstractArray):
        raise TypeError(
            f"{fn.__name__}: annotate {name} with jaxtyping dims, got {hint}."
        )
    array = arrays[0]
    kind = array.__name__.split("[")[0]
    dtypes = tuple(array.dtypes) if isinstance(array.dtypes, list | tuple) else ()
    optional = types.NoneType in parts
    return Annotated(name, tuple(array.dim_str.split()), kind, dtypes, optional)


def without_residuals[**P](
    fwd: Callable[P, tuple], num_results: int = 1
) -> Callable[P, Any]:
    """The reference of an op whose `fwd` computes it: its first results alone.

    Operands, options and dims are those of `fwd`, so they stand once.

        rms_norm_reference = without_residuals(rms_norm_fwd_reference)
    """

    def reference(*args: P.args, **options: P.kwargs) -> Any:
        results = fwd(*args, **options)
        return results[0] if num_results == 1 else results[:num_results]

    functools.update_wrapper(reference, fwd)
    declared = typing.get_args(type_hints(fwd)["return"])[:num_results]
    returned = declared[0] if num_results == 1 else tuple[declared]
    reference.__name__ = fwd.__name__.replace("_fwd_reference", "_reference")
    reference.__qualname__ = reference.__name__
    reference.__annotations__ = {**fwd.__annotations__, "return": returned}
    reference.__signature__ = inspect.signature(fwd).replace(return_annotation=returned)
    return reference


def issubclass_safe(x: Any, kind: type) -> bool:
    return isinstance(x, type) and issubclass(x, kind)


def unwrapped(x: Any) -> Any:
    """The array that a parameter of Flax NNX, a variable of Keras and the like hold."""
    if isinstance(x, jax.Array) or not hasattr(type(x), "__jax_array__"):
        return x
    return x.__jax_array__()


def as_array(op: str, operand: Annotated, x: Any) -> jax.Array | None:
    """`x` as a JAX array of the declared kind, or None where that is allowed."""
    x = unwrapped(x)
    if x is None:
        if operand.optional:
            return None
        raise TypeError(f"{op}: `{operand.name}` is required, got None.")
    if not isinstance(x, jax.Array):
        if not isinstance(x, bool | int | float) and not hasattr(x, "__array__"):
            raise TypeError(
                f"{op}: `{operand.name}` must be an array, got {type(x).__name__}."
            )
        check_held(op, operand.name, x)
        x = jnp.asarray(x)
    if operand.dtypes and x.dtype.name not in operand.dtypes:
        raise TypeError(
            f"{op}: `{operand.name}` must have a dtype of kind {operand.kind}, got "
            f"{x.dtype.name}{list(x.shape)}."
        )
    return x


def check_held(op: str, name: str, x: Any) -> None:
    """Raises ValueError for integers that JAX would wrap: x64 mode is off, say."""
    given = np.asarray(x)
    if given.dtype.kind not in "iuO" or not given.size:
        return
    whole = isinstance(x, int)
    dtype = jax.dtypes.canonicalize_dtype(np.int64 if whole else given.dtype)
    if dtype != given.dtype:
        check_range(op, name, given.min(), dtype)
        check_range(op, name, given.max(), dtype)


def check_range(op: str, name: str, value: Any, dtype: Any) -> None:
    limits = np.iinfo(dtype)
    if not limits.min <= value <= limits.max:
        raise ValueError(f"{op}: `{name}` must fit in {limits.dtype}, got {value}.")


def per_sequence(
    op: str, name: str, x: Any, batch: tuple[int, ...]
) -> jax.Array | None:
    """A number for all sequences or one for each as an array `[b]`; None stays."""
    if x is None:
        return None
    x = jnp.asarray(x)
    if x.shape not in ((), batch):
        raise TypeError(
            f"{op}: `{name}` must be a number or one per sequence, {list(batch)}, got "
            f"shape {x.shape}."
        )
    return jnp.broadcast_to(x, batch)


def check_dims(
    signature: str, operands: Sequence[Annotated], arrays: Sequence[jax.Array | None]
) -> None:
    """Raises TypeError unless every dim has one size in all operands that name it.

    `signature` is the op as the message shows it: `rms_norm: ... d, d -> ... d`.
    """
    op = signature.split(":")[0]
    given = [(a, x) for a, x in zip(operands, arrays, strict=True) if x is not None]
    sizes: dict[str, tuple[str, int]] = {}
    leading: tuple[str, tuple[int, ...]] | None = None
    for operand, x in given:
        labels = operand.labels
        if x.ndim < len(labels) or (x.ndim > len(labels) and not operand.has_leading):
            raise TypeError(
                f"{op}: `{operand.name}` must have dims "
                f"[{' '.join(operand.dims)}], got shape {x.shape}."
            )
        if operand.has_leading:
            lead = x.shape[: x.ndim - len(labels)]
            first, expected = leading = leading or (operand.name, lead)
            if lead != expected:
                raise TypeError(
                    f"{op}: the leading dims are {expected} in `{first}` but "
                    f"{lead} in `{operand.name}`. Dims: {signature}."
                )
        for label, n in zip(labels[::-1], x.shape[::-1], strict=False):
            if label.isdigit() and n != int(label):
                raise TypeError(
                    f"{op}: `{operand.name}` must have dims "
                    f"[{' '.join(operand.dims)}], got shape {x.shape}."
                )
            if label.isdigit() or label.startswith("#"):
                continue  # broadcast dims wait until all others are known
            first, m = sizes.setdefault(label, (operand.name, n))
            if m != n:
                raise TypeError(
                    f"{op}: dim `{label}` is {m} in `{first}` but {n} in "
                    f"`{operand.name}`. Dims: {signature}."
                )
    for operand, x in given:
        for label, n in zip(operand.labels[::-1], x.shape[::-1], strict=False):
            if label.startswith("#") and n != 1:
                first, m = sizes.setdefault(label[1:], (operand.name, n))
                if n != m:
                    raise TypeError(
                        f"{op}: dim `{label[1:]}` is {m} in `{first}` but {n} in "
                        f"`{operand.name}`, where it may be 1. Dims: {signature}."
                    )
            elif "*" in label:
                known = math.prod(sizes[f][1] for f in label.split("*") if f in sizes)
                if (n % known if known else n) != 0:
                    raise TypeError(
                        f"{op}: dim `{label}` of `{operand.name}` is {n}, not a "
                        f"multiple of {known}. Dims: {signature}."
                    )


def check_static(op: str, static: dict[str, Any]) -> None:
    for name, value in static.items():
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"{op}: option `{name}` must be a static, hashable value, got "
                f"{type(value).__name__}. Arrays are operands, not options."
            ) from None


def axis_within(op: str, axis: int, ndim: int) -> int:
    """`axis` counted from the front, or a ValueError that names the op."""
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"{op}: `axis` must name one of the {ndim} dims of `x`, got {axis}."
        )
    return axis % ndim
