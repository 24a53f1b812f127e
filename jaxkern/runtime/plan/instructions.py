"""The instructions of a compiled function: what runs, and what each moves and computes.

Costs are counted from the shapes: bytes read and written once by each instruction,
arithmetic of products, convolutions, reductions and elementwise work. An opaque kernel
has bytes but no countable arithmetic.
"""

import dataclasses
import math

from jaxkern.runtime.plan.hlo_module import (
    CONTROL,
    Computation,
    HloInstruction,
    HloModule,
)
from jaxkern.runtime.plan.triton_launch import triton_launch

VIEWS = ("bitcast", "get-tuple-element", "tuple", "opt-barrier", "add-dependency")
NOT_RUN = ("parameter", "constant", "after-all", "partition-id", "replica-id")
COLLECTIVES = ("all-", "reduce-scatter", "collective-", "ragged-all", "send", "recv")
COPIES = ("copy", "transpose", "slice", "concatenate", "pad", "reverse", "broadcast")
ARITHMETIC = frozenset(
    "abs add and atan2 cbrt ceil compare cosine divide erf exponential "
    "exponential-minus-one floor log log-plus-one logistic maximum minimum multiply "
    "negate not or power remainder round-nearest-afz round-nearest-even rsqrt "
    "shift-left shift-right-arithmetic shift-right-logical sign sine sqrt subtract tan "
    "tanh xor".split()
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction that a call executes.

    Attributes:
      name: as a profile shows it.
      opcode: of HLO: "fusion", "dot", "custom-call", "while".
      kind: "loop fusion", "custom call", "product", "copy", "collective", "control" or
        the opcode.
      shape: of the result, such as "f32[8,16]".
      operands: shapes of the operands.
      bytes: read and written by one execution; 0 for control, whose body counts.
      flops: of one execution; None where a kernel hides them.
      kernel: name of a kernel that XLA did not write itself, or None.
      op_name: where in the traced function it comes from.
      computation: that holds it: the entry, or a loop's body.
      runs: executions in one call; None where only the data decide.
    """

    name: str
    opcode: str
    kind: str
    shape: str
    operands: tuple[str, ...]
    bytes: int
    flops: int | None
    kernel: str | None
    op_name: str
    computation: str
    runs: int | None

    def __str__(self) -> str:
        times = "" if self.runs == 1 else f" x{self.runs or '?'}"
        flops = "" if not self.flops else f", {self.flops} flops"
        kernel = "" if self.kernel is None else f", {self.kernel}"
        return (
            f"{self.name}{times}: {self.kind} {self.shape} of "
            f"({', '.join(self.operands)}), {self.bytes} bytes{flops}{kernel}"
        )


def list_instructions(module: HloModule) -> tuple[Instruction, ...]:
    """All that a call executes, in order; bodies of loops right before the loop."""
    return tuple(walk(module, module.entry, 1))


def count_views(module: HloModule) -> int:
    """Instructions that only name a part of a buffer, and so cost nothing."""
    return sum(i.opcode in VIEWS for i in module.schedule())


def walk(module: HloModule, computation: Computation, runs: int | None):
    for i in computation.instructions:
        if i.opcode in CONTROL:
            for n, called in enumerate(i.called):
                inner = runs_inside(i, n, runs)
                yield from walk(module, module.computations[called], inner)
        if i.opcode not in VIEWS and i.opcode not in NOT_RUN:
            yield describe(module, computation, i, runs)


def runs_inside(i: HloInstruction, called: int, runs: int | None) -> int | None:
    """How often a called computation runs: XLA names a loop's body first."""
    if runs is None or i.opcode == "conditional":
        return None
    if i.opcode != "while":
        return runs
    trips = i.trips
    return None if trips is None else runs * (trips + called)


def describe(
    module: HloModule, computation: Computation, i: HloInstruction, runs: int | None
) -> Instruction:
    control = i.opcode in CONTROL
    return Instruction(
        name=i.name,
        opcode=i.opcode,
        kind=kind_of(i),
        shape=str(i.shape),
        operands=tuple(str(o.shape) for o in module.operands(i)),
        bytes=0 if control else bytes_of(module, i),
        flops=0 if control else flops_of(module, i),
        kernel=kernel_of(i),
        op_name=i.op_name,
        computation=computation.name,
        runs=runs,
    )


def kind_of(i: HloInstruction) -> str:
    if i.opcode == "fusion":
        return f"{i.fusion_kind} fusion"
    if i.opcode == "custom-call":
        return "custom call"
    if i.opcode in CONTROL:
        return "control"
    if i.opcode in ("dot", "convolution", "ragged-dot"):
        return "product"
    if i.opcode.startswith(COLLECTIVES):
        return "collective"
    return "copy" if i.opcode.startswith(COPIES) else i.opcode


def kernel_of(i: HloInstruction) -> str | None:
    """Who made the kernel, where it is not XLA's own loop emitter."""
    if i.opcode == "custom-call":
        launch = triton_launch(i)
        return i.target if launch is None else f"{i.target}: {launch.name}"
    if i.opcode == "fusion":
        # a GPU's config holds CPU's one level deeper
        config = i.config.get("fusion_backend_config", i.config)
        kind = config.get("fusion_config", config).get("kind", "")
        return kind if kind.startswith("__") else None
    return None


def bytes_of(module: HloModule, i: HloInstruction) -> int:
    """Read and written; of an operand that is only indexed, what is taken from it."""
    if i.opcode != "fusion":
        reads = [
            read_of(module, i, n, o.shape.bytes)
            for n, o in enumerate(module.operands(i))
        ]
        return sum(reads) + written_by(module, i)
    inner = module.computations[i.called[0]]
    users: dict[int, list[HloInstruction]] = {}
    for user in inner.instructions:
        for operand in user.operands:
            users.setdefault(operand, []).append(user)
    total = 0
    for parameter in inner.instructions:
        if parameter.opcode == "parameter":
            # seen through views; a use of the whole makes it the whole
            reads = [
                read_of(module, u, u.operands.index(p.id), p.shape.bytes)
                for p in through_views(parameter, users)
                for u in users.get(p.id, [])
                if u.opcode not in VIEWS
            ]
            total += min(sum(reads), parameter.shape.bytes)
    root = next(u for u in inner.instructions if u.id == inner.root)
    return total + written_by(module, root)


def through_views(
    parameter: HloInstruction, users: dict[int, list[HloInstruction]]
) -> list[HloInstruction]:
    found = [parameter]
    for value in found:
        found += [u for u in users.get(value.id, []) if u.opcode in VIEWS]
    return found


def read_of(module: HloModule, i: HloInstruction, n: int, whole: int) -> int:
    """Bytes of operand `n` that an instruction reads."""
    if n == 0 and i.opcode in ("dynamic-slice", "slice", "gather"):
        return i.shape.bytes
    if n == 0 and i.opcode == "dynamic-update-slice":
        return 0  # the rest stays where it is
    return whole


def written_by(module: HloModule, i: HloInstruction) -> int:
    if i.opcode == "tuple":
        return sum(written_by(module, o) for o in module.operands(i))
    if i.opcode == "bitcast" and i.operands:
        return written_by(module, module.operands(i)[0])
    if i.opcode == "dynamic-update-slice":
        return module.operands(i)[1].shape.bytes
    return i.shape.bytes


def flops_of(module: HloModule, i: HloInstruction) -> int | None:
    """A product of n terms counts 2 n; a reduction its inputs; the rest its result."""
    if i.opcode == "fusion":
        parts = [
            flops_of(module, u) for u in module.computations[i.called[0]].instructions
        ]
        return None if None in parts else sum(p for p in parts if p is not None)
    if i.opcode == "custom-call":
        return product_flops_of_library(module, i)
    if i.opcode == "dot":
        dims = i.message.message(30).integers(1)
        left = module.operands(i)[0].shape
        return 2 * i.shape.elements * math.prod(left.sizes[d] for d in dims)
    if i.opcode == "convolution":
        kernel = module.operands(i)[1].shape
        features = kernel.sizes[i.message.message(16).integer(4)]
        return 2 * i.shape.elements * kernel.elements // max(features, 1)
    if i.opcode in ("reduce", "reduce-window", "scatter", "select-and-scatter"):
        return module.operands(i)[0].shape.elements
    return i.shape.elements if i.opcode in ARITHMETIC else 0


def product_flops_of_library(module: HloModule, i: HloInstruction) -> int | None:
    """Of a cuBLAS call, whose config says which dims it contracts; else unknown."""
    config = i.config.get("gemm_backend_config", {})
    dims = config.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions")
    if dims is None:
        return None
    left = module.operands(i)[0].shape
    out = i.shape.parts[0] if i.shape.parts else i.shape  # its workspace follows
    return 2 * out.elements * math.prod(left.sizes[int(d)] for d in dims)
