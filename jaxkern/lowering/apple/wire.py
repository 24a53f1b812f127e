"""The wire form of a function: the StableHLO that a plugin's compiler receives.

What JAX prints is not that: on the way to a plugin the operations of CHLO become
composites or StableHLO, and the module a portable artifact of a StableHLO version.
`jax.export` makes the same artifact where the plugin is not installed.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.export import DisabledSafetyCheck, Exported
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy, stablehlo

UNCHECKED = (DisabledSafetyCheck.platform(), DisabledSafetyCheck.custom_call("ALL"))


def export(f: Callable, *args: Any, platform: str, **kwargs: Any) -> Exported:
    """`f` lowered for a platform, which need not be there; callable on any."""

    def fresh(*args, **kwargs):  # JAX caches the lowering of a function that it knows
        return f(*args, **kwargs)

    make = jax.export.export(
        jax.jit(fresh), platforms=[platform], disabled_checks=UNCHECKED
    )
    return make(*args, **kwargs)


class Module:
    """A parsed artifact: its functions, and the operations that `main` reaches."""

    def __init__(self, artifact: bytes):
        self.context = ir.Context()
        stablehlo.register_dialect(self.context)
        sdy.register_dialect(self.context)  # shardings, also of one device
        module = stablehlo.deserialize_portable_artifact(self.context, artifact)
        self.module = module
        self.functions = {
            ir.StringAttr(op.attributes["sym_name"]).value: op
            for op in module.body.operations
            if op.operation.name == "func.func"
        }
        self.calls: dict[Any, list] = {}  # by function
        for function in self.functions.values():
            for op in below(function.operation):
                if op.name == "func.call":
                    callee = self.functions[symbol(op, "callee")].operation
                    self.calls.setdefault(callee, []).append(op)

    def operations(self, inlined: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
        """(function, operation) for each operation below `main`, each function once.

        `inlined(name)` says of a composite whether its decomposition counts.
        """
        waiting, seen = ["main"], {"main"}
        while waiting:
            name = waiting.pop()
            for op in below(self.functions[name]):
                yield name, op
                callee = callee_of(op, inlined)
                if callee is not None and callee not in seen:
                    seen.add(callee)
                    waiting.append(callee)

    def count(self, name_of: Callable[[Any], str], inlined: Callable) -> Counter:
        """How often each operation runs, a loop's body once."""
        counts: dict[str, Counter] = {}

        def of(function: str) -> Counter:
            if function not in counts:
                total: Counter = Counter()
                for op in below(self.functions[function]):
                    callee = callee_of(op, inlined)
                    if callee is None:
                        total[name_of(op)] += 1
                    else:
                        total += of(callee)
                counts[function] = total
            return counts[function]

        return of("main")


def below(operation: Any) -> Iterator[Any]:
    """Every operation in the regions of one."""
    for region in operation.regions:
        for block in region:
            for op in block:
                yield op.operation
                yield from below(op.operation)


def callee_of(op: Any, inlined: Callable[[str], bool]) -> str | None:
    """The function that an operation calls; of composites those that are inlined."""
    if op.name == "func.call":
        return symbol(op, "callee")
    if op.name == "stablehlo.composite" and inlined(text(op, "name")):
        return symbol(op, "decomposition")
    return None


def symbol(op: Any, attribute: str) -> str:
    return ir.FlatSymbolRefAttr(op.attributes[attribute]).value


def text(op: Any, attribute: str) -> str:
    if attribute not in op.attributes:
        return ""
    return ir.StringAttr(op.attributes[attribute]).value


def element_types(op: Any) -> Iterator[str]:
    """Element types of the operands and results."""
    for value in [*op.operands, *op.results]:
        if isinstance(value.type, ir.RankedTensorType):
            yield str(value.type.element_type)


MACHINERY = (
    "primitives/call.py",
    "primitives/rules.py",
    "kernel_primitive.py",
    "wire.py",
    "portable.py",
    "/findings.py",
)
FRAME = re.compile(r'"([^"]+\.py)":(\d+)')
NAME = re.compile(r'^loc\("([^"]*)"')


def place(op: Any) -> str:
    """Where an operation comes from: file and line, and JAX's name for it."""
    written = str(op.location)
    frames = FRAME.findall(written)
    name = NAME.match(written)
    found = [f for f in frames if not f[0].endswith(MACHINERY)] or frames
    parts = [f"{short(found[0][0])}:{found[0][1]}"] if found else []
    if name and not name[1].endswith(".py"):
        parts.append(name[1])
    return ", ".join(parts) or "unknown place"


def short(path: str) -> str:
    """A path from the package on, or its last two parts."""
    parts = path.split("/")
    start = parts.index("jaxkern") if "jaxkern" in parts else -2
    return "/".join(parts[start:])
