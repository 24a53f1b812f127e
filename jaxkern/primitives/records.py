"""References that take many operands as one record, and their options by one name.

    class Operands(NamedTuple):
        x: Float[Array, "... d"]
        weight: Float[Array, " d"] | None = None

    class Options(TypedDict):
        eps: float

    def norm_reference(o: Operands, **options: Unpack[Options]) -> ...

declares the op that `norm_reference(x, weight, *, eps)` would. Dims and options then
stand once for an op, its residuals and its gradients. Its primitive and its kernels
have the fields one after another and know of no record.
"""

import functools
import inspect
import itertools
import typing
from collections.abc import Callable
from typing import Any, Unpack


def flat(reference: Callable) -> Callable:
    """`reference` with the fields of its records as parameters, in their order.

    A result that is a record becomes a tuple. Without records it is `reference` itself.
    """
    hints = type_hints(reference)
    given = inspect.signature(reference)
    records: list[tuple[type | None, int]] = []  # and how many operands each takes
    parameters: list[inspect.Parameter] = []
    for q in given.parameters.values():
        hint, kind, fields = hints.get(q.name), q.kind, {}
        if is_record(hint):
            kind, fields = q.POSITIONAL_OR_KEYWORD, typing.get_type_hints(hint)
            records.append((hint, len(fields)))
        elif typing.get_origin(hint) is Unpack:
            kind = q.KEYWORD_ONLY
            fields = typing.get_type_hints(typing.get_args(hint)[0])
        elif kind is q.POSITIONAL_OR_KEYWORD:
            records.append((None, 1))
        own = [inspect.Parameter(n, kind, annotation=h) for n, h in fields.items()]
        parameters += own or [q]
    result = hints.get("return")
    if is_record(result):
        result = tuple[*typing.get_type_hints(result).values()]
    elif parameters == list(given.parameters.values()):
        return reference

    @functools.wraps(reference)
    def flattened(*arrays: Any, **options: Any) -> Any:
        left, operands = iter(arrays), []
        for record, count in records:
            part = itertools.islice(left, count)
            operands += part if record is None else [record(*part)]
        return reference(*operands, *left, **options)

    declared: Any = flattened
    fields = {q.name: hints.get(q.name, q.annotation) for q in parameters}
    declared.__annotations__ = fields | {"return": result}
    declared.__signature__ = given.replace(
        parameters=parameters, return_annotation=result
    )
    return declared


def type_hints(fn: Callable) -> dict[str, Any]:
    """What `typing.get_type_hints` gives, without its walk where nothing is a string.

    All references are read when the package is imported; the walk was a tenth of that.
    """
    hints = fn.__annotations__
    if any(isinstance(hint, str) or hint is None for hint in hints.values()):
        return typing.get_type_hints(fn)
    return hints


def is_record(hint: Any) -> bool:
    is_class = isinstance(hint, type) and issubclass(hint, tuple)
    return is_class and hasattr(hint, "_fields")
