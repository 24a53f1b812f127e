"""`check`: what in a function an Apple plugin would refuse, or compute wrongly.

A hard finding stops the plugin's compiler or changes the result. A soft one depends on
values, which the module does not know.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax.numpy as jnp
from jax.extend.mlir import ir

from jaxkern.lowering.apple.plugins import FUSED_TARGETS, PLUGINS, Plugin
from jaxkern.lowering.apple.portable import exact_terms
from jaxkern.lowering.apple.wire import (
    Module,
    below,
    element_types,
    export,
    place,
    symbol,
    text,
)

WORDING = (
    "lowered and op-checked; numerics verified on CPU; not executed on Apple hardware"
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that a plugin refuses or computes wrongly.

    Attributes:
      severity: "hard" or "soft".
      what: the operation, dtype or target.
      why: what the plugin does with it.
      cure: what to write instead.
      places: where it comes from, with the number of times.
    """

    severity: Literal["hard", "soft"]
    what: str
    why: str
    cure: str
    places: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        at = "".join(f"\n    {n} x at {where}" for where, n in self.places)
        return f"{self.severity}: {self.what}: {self.why}. {self.cure}{at}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What a function is made of on a platform, and what stands against it.

    Attributes:
      plugin: whose table was asked.
      operations: how often each runs, a loop's body once; composites and custom calls
        by their own names.
      dtypes: element types.
      findings: hard ones first.
    """

    plugin: Plugin
    operations: Counter[str]
    dtypes: frozenset[str]
    findings: tuple[Finding, ...]

    @property
    def hard(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "hard")

    @property
    def fused(self) -> int:
        """Fused calls, such as `mps.sdpa`."""
        return sum(self.fused_kinds.values())

    @property
    def fused_kinds(self) -> dict[str, int]:
        """Fused calls of each kind, by name."""
        kinds = sorted(self.operations.items())
        return {op: n for op, n in kinds if op in FUSED_TARGETS}

    def __str__(self) -> str:
        total = sum(self.operations.values())
        kinds = ", ".join(f"{n} {op}" for op, n in self.fused_kinds.items())
        head = (
            f"{self.plugin.platform} ({self.plugin.version}): {total} operations of "
            f"{len(self.operations)} kinds, {self.fused} fused calls"
            f"{kinds and f' ({kinds})'}; dtypes {' '.join(sorted(self.dtypes))}"
        )
        lines = [str(f) for f in self.findings] or ["nothing found"]
        return "\n".join([head, *lines, f"({WORDING})"])

    __repr__ = __str__


def check(f: Callable, *args: Any, platform: str = "mps", **kwargs: Any) -> Report:
    """Lowers `f(*args, **kwargs)` for an Apple plugin and asks what it would refuse.

    Nothing runs, no plugin need be installed and no Apple hardware is there: what is
    checked is the portable module that the plugin's compiler would receive, against the
    table that was read out of the plugin.

    Args:
      f: any function that `jax.jit` takes: an op, a model, a gradient.
      args, kwargs: arrays or `jax.ShapeDtypeStruct`.
      platform: "mps", "metal", "mtl" or "METAL".

    Returns:
      A `Report`; print it, or read `hard` and `findings`.

    Raises:
      ValueError: unknown platform, or something that JAX itself cannot lower for it,
        such as a callback to the host.
    """
    if platform not in PLUGINS:
        raise ValueError(
            f"check: `platform` must be one of {tuple(PLUGINS)}, got {platform!r}."
        )
    exported = export(f, *args, platform=platform, **kwargs)
    return check_module(exported.mlir_module_serialized, PLUGINS[platform])


def check_module(artifact: bytes, plugin: Plugin) -> Report:
    """`check` of a portable artifact, such as `Exported.mlir_module_serialized`."""
    module = Module(artifact)
    found: dict[Finding, Counter[str]] = {}
    dtypes: set[str] = set()
    for _, op in module.operations(lambda name: name not in plugin.composites):
        dtypes.update(element_types(op))
        for finding in findings_of(op, plugin, module):
            found.setdefault(finding, Counter())[place(op)] += 1
    ordered = sorted(found.items(), key=lambda item: item[0].severity)
    return Report(
        plugin,
        module.count(title, lambda name: name not in plugin.composites),
        frozenset(dtypes),
        tuple(
            dataclasses.replace(finding, places=tuple(places.most_common()))
            for finding, places in ordered
        ),
    )


def title(op: Any) -> str:
    if op.name == "stablehlo.composite":
        return text(op, "name")
    if op.name == "stablehlo.custom_call":
        return text(op, "call_target_name")
    return op.name


def findings_of(op: Any, plugin: Plugin, module: Module) -> Iterator[Finding]:
    """What stands against one operation."""
    dialect, _, name = op.name.partition(".")
    known = name in plugin.operations or name in ("composite", "custom_call")
    if dialect == "stablehlo" and not known:
        yield unknown(op.name, plugin)
    elif dialect not in ("stablehlo", "func", "sdy"):
        yield unknown(op.name, plugin)
    if name == "custom_call" and title(op) not in plugin.targets:
        yield unknown(f"custom call {title(op)}", plugin)
    for dtype in sorted(set(element_types(op)) - plugin.dtypes):
        yield Finding(
            "hard",
            f"dtype {dtype}",
            f"{plugin.version} has none such",
            "Use float32, or integer words for a packed format.",
        )
    for operation, rule in (TRAPS[trap] for trap in plugin.traps if trap in TRAPS):
        if name == operation:
            yield from rule(op, module)


def unknown(what: str, plugin: Plugin) -> Finding:
    if not plugin.has_table:
        return Finding(
            "soft",
            what,
            "not among what the other Apple plugins accept",
            "No table of this plugin is known.",
        )
    return Finding(
        "hard",
        what,
        f"not in the table of {plugin.version}",
        "Write it with other operations, or run it on the CPU.",
    )


# The traps: each takes an operation and yields what is wrong with it.


def scatter_of_one(op: Any, _: Module) -> Iterator[Finding]:
    if len(op.results) > 1:
        yield Finding(
            "hard",
            "scatter of several operands",
            "it takes one",
            "Scatter them one by one.",
        )


def scatter_inside(op: Any, module: Module) -> Iterator[Finding]:
    if not is_bounded(op.operands[1], module):
        yield Finding(
            "soft",
            "scatter with indices that are not clamped",
            "an update outside of the operand is written over a neighbour, not dropped",
            "Clamp the indices, and send what is to be dropped to a spare row.",
        )


THROUGH = "reshape broadcast_in_dim convert concatenate transpose pad slice".split()
BOUNDED = ("stablehlo.clamp", "stablehlo.iota", "stablehlo.constant")


def is_bounded(value: Any, module: Module) -> bool:
    """Was the value clamped, or is it known to be an index?"""
    if isinstance(value.owner, ir.Block):
        function, k = value.owner.owner.operation, value.arg_number
        calls = module.calls.get(function, ())
        return bool(calls) and all(is_bounded(c.operands[k], module) for c in calls)
    op = value.owner.operation
    if op.name == "func.call":
        *_, returned = below(module.functions[symbol(op, "callee")])
        return is_bounded(returned.operands[list(op.results).index(value)], module)
    if op.name in BOUNDED or title(op) == "chlo.top_k":
        return True
    if op.name == "stablehlo.sort":  # moves what it is given
        return is_bounded(op.operands[list(op.results).index(value)], module)
    through = op.name.removeprefix("stablehlo.") in THROUGH
    return through and all(is_bounded(x, module) for x in op.operands)


def sort_by_one_key(op: Any, _: Module) -> Iterator[Finding]:
    read = {value for inner in below(op) for value in inner.operands}
    if any(argument in read for argument in op.regions[0].blocks[0].arguments[2:]):
        yield Finding(
            "hard",
            "sort by several keys",
            "only the first one is compared",
            "Sort stably by one key after the other, the last one first.",
        )


SIMPLE = frozenset("add multiply maximum minimum and or".split())


def plain_reduce(op: Any, _: Module) -> Iterator[Finding]:
    body = [inner.name.removeprefix("stablehlo.") for inner in below(op)]
    one = len(op.results) == 1 and len(body) == 2 and body[0] in SIMPLE
    arg = len(op.results) == 2 and set(body) <= ARG_REDUCE
    if not one and not arg:
        yield Finding(
            "hard",
            f"reduce by {', '.join(dict.fromkeys(body[:-1]))}",
            "add, multiply, maximum, minimum, and, or, argmax and argmin are known",
            "Write it with one of them.",
        )


ARG_REDUCE = frozenset("compare or and select return".split())


def plain_reduce_window(op: Any, _: Module) -> Iterator[Finding]:
    body = [inner.name.removeprefix("stablehlo.") for inner in below(op)]
    if len(op.results) != 1 or len(body) != 2 or body[0] not in SIMPLE:
        yield Finding(
            "hard",
            "reduce_window with a body of its own",
            "one operand and one operation are known",
            "Write it with one of them.",
        )


def max_pool_only(op: Any, _: Module) -> Iterator[Finding]:
    body = [inner.name for inner in below(op)]
    if body[:1] != ["stablehlo.maximum"]:
        yield Finding(
            "hard",
            "reduce_window other than a maximum",
            "only max pooling is known",
            "Use lax.associative_scan, or a product with a triangular matrix.",
        )


def exact_integer_dot(op: Any, _: Module) -> Iterator[Finding]:
    left, right, result = (
        ir.RankedTensorType(v.type) for v in [*op.operands, op.results[0]]
    )
    if "i" not in str(result.element_type):
        return
    contracted = math.prod(left.shape[d] for d in contracting(op)[0])
    dtypes = [INTEGERS.get(str(t.element_type), jnp.int32) for t in (left, right)]
    if contracted > exact_terms(*map(jnp.dtype, dtypes)):
        yield Finding(
            "soft",
            f"integer product over {contracted} terms of {left.element_type}",
            "it is computed in float32, exactly only below 2**24",
            "Give it int8 factors: then `portable` adds parts as integers.",
        )


INTEGERS = {"i8": jnp.int8, "ui8": jnp.uint8}


def dot_keeps_dtype(op: Any, _: Module) -> Iterator[Finding]:
    types = [
        str(ir.RankedTensorType(v.type).element_type)
        for v in [*op.operands, op.results[0]]
    ]
    if types[2] == "f32" and set(types) != {"f32"}:
        yield Finding(
            "hard",
            f"product of {types[0]} and {types[1]} in f32",
            "the result is rounded to the dtype of the factors",
            "Convert the factors to float32 first.",
        )


def one_contracted_dim(op: Any, _: Module) -> Iterator[Finding]:
    dims = contracting(op)[0]
    if len(dims) > 1:
        yield Finding(
            "hard",
            f"product over {len(dims)} dims",
            "one is known",
            "Reshape them to one.",
        )


NUMBERS = re.compile(r"(lhs|rhs)_contracting_dimensions = \[([^\]]*)\]")


def contracting(op: Any) -> tuple[list[int], list[int]]:
    """Contracted dims of the two factors of a dot_general."""
    written = dict(NUMBERS.findall(str(op.attributes["dot_dimension_numbers"])))
    left, right = (
        [int(d) for d in written.get(side, "").split(",") if d.strip()]
        for side in ("lhs", "rhs")
    )
    return left, right


def last_index_dim(op: Any, _: Module) -> Iterator[Finding]:
    written = str(op.attributes["dimension_numbers"])
    found = re.search(r"index_vector_dim = (\d+)", written)
    last = len(ir.RankedTensorType(op.operands[1].type).shape) - 1
    if (int(found[1]) if found else 0) < last:
        yield Finding(
            "hard",
            "gather whose index dim is not the last",
            "only the last one is known",
            "Transpose the indices.",
        )


TRAPS: dict[str, tuple[str, Callable[[Any, Module], Iterator[Finding]]]] = {
    "scatter_of_one": ("scatter", scatter_of_one),
    "scatter_inside": ("scatter", scatter_inside),
    "sort_by_one_key": ("sort", sort_by_one_key),
    "plain_reduce": ("reduce", plain_reduce),
    "plain_reduce_window": ("reduce_window", plain_reduce_window),
    "max_pool_only": ("reduce_window", max_pool_only),
    "exact_integer_dot": ("dot_general", exact_integer_dot),
    "dot_keeps_dtype": ("dot_general", dot_keeps_dtype),
    "one_contracted_dim": ("dot_general", one_contracted_dim),
    "last_index_dim": ("gather", last_index_dim),
}
