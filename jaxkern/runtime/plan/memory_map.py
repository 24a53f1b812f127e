"""Where XLA puts each buffer of a compiled function, and for how long.

XLA assigns every value a place at compile time: arguments, results, constants, and one
arena in which temporaries lie side by side and one after the other. This reads that
assignment, the protobuf `BufferAssignmentProto`.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jaxkern.runtime.plan.hlo_module import CONTROL, HloInstruction, HloModule, Message
from jaxkern.runtime.plan.instructions import VIEWS


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One value in its place.

    Attributes:
      name: of the instruction that makes it; "while.1{2}" is part 2 of a tuple.
      shape: such as "f32[8,16]".
      offset: bytes from the start of its allocation.
      size: bytes.
      first, last: positions in `MemoryMap.order` between which it is live; the
        instruction at `last` still reads it.
    """

    name: str
    shape: str
    offset: int
    size: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Allocation:
    """A block of memory with the buffers that share it.

    Attributes:
      kind: "argument", "output", "constant" or "temporary".
      size: bytes.
      parameter: number of the flat argument, or None.
      aliased: an argument that is donated and becomes an output.
      buffers: by offset, then by time.
    """

    kind: str
    size: int
    parameter: int | None
    aliased: bool
    buffers: tuple[Buffer, ...]


@dataclasses.dataclass(frozen=True)
class MemoryMap:
    """What a call needs, in bytes, and the plan behind it.

    Attributes:
      arguments, outputs, temporaries: as XLA reports them; an output that aliases an
        argument counts in both.
      aliases: bytes of outputs that live in donated arguments.
      code: generated code.
      peak: most bytes at any time, arguments and outputs included.
      allocations: all blocks; empty where XLA does not tell, see `why_no_arena`.
      order: names of the instructions in the order in which they run.
      why_no_arena: why `allocations` is empty, or None.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliases: int
    code: int
    peak: int
    allocations: tuple[Allocation, ...]
    order: tuple[str, ...]
    why_no_arena: str | None

    @property
    def arena(self) -> tuple[Buffer, ...]:
        """The temporaries of the largest temporary block."""
        blocks = [a for a in self.allocations if a.kind == "temporary"]
        return max(blocks, key=lambda a: a.size).buffers if blocks else ()

    def live_bytes(self) -> list[int]:
        """Bytes of the arena that hold a live value, at each position of `order`."""
        live = [0] * len(self.order)
        for position in range(len(live)):
            spans = [
                (b.offset, b.offset + b.size)
                for b in self.arena
                if b.first <= position <= b.last
            ]
            live[position] = covered(spans)
        return live

    def __str__(self) -> str:
        names = ("arguments", "outputs", "temporaries", "aliases", "code", "peak")
        lines = [f"{name:12} {getattr(self, name):>14,} bytes" for name in names]
        if self.why_no_arena:
            return "\n".join([*lines, self.why_no_arena])
        lines += [f"{'offset':>12} {'size':>12}  live from..to  buffer"]
        for b in self.arena:
            lines.append(
                f"{b.offset:12,} {b.size:12,}  {b.first:4}..{b.last:<4}     "
                f"{b.name} {b.shape}"
            )
        return "\n".join(lines)


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """Bytes in the union of some spans."""
    total = end = 0
    for first, last in sorted(spans):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


def memory_map(
    stats: Any, module: HloModule, assignment: bytes, why_no_arena: str | None
) -> MemoryMap:
    """From `Compiled.memory_analysis()`, the module and its buffer assignment."""
    order = module.schedule()
    return MemoryMap(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        aliases=stats.alias_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        peak=stats.peak_memory_in_bytes,
        allocations=read_allocations(module, order, assignment) if assignment else (),
        order=tuple(i.name for i in order),
        why_no_arena=None if assignment else why_no_arena,
    )


@dataclasses.dataclass(frozen=True)
class Value:
    """A logical buffer: where it is defined and under which other names it goes."""

    size: int
    places: frozenset[tuple[int, tuple[int, ...]]]  # (instruction, index in its tuple)
    made_by: tuple[int, tuple[int, ...]]


def read_allocations(
    module: HloModule, order: Sequence[HloInstruction], data: bytes
) -> tuple[Allocation, ...]:
    """The blocks of a `BufferAssignmentProto`, thread-local scraps left out."""
    assignment = Message(data)
    values = read_values(assignment)
    lives = LiveRanges(module, order)
    found = []
    for block in assignment.messages(3):
        if block.integer(3):  # thread local: the operands of a reducer
            continue
        slots: dict[tuple, Buffer] = {}
        for assigned in block.messages(9):
            value = values[assigned.integer(1)]
            span = lives.of(value)
            if span is None:
                continue
            offset, size = assigned.integer(2), assigned.integer(3)
            # values that a loop carries have one place and one life: one row
            slots.setdefault(
                (offset, size, value.places),
                Buffer(*lives.label(value), offset, size, *span),
            )
        buffers = sorted(slots.values(), key=lambda b: (b.offset, b.first))
        is_argument, is_output = bool(block.integer(5)), bool(block.integer(7))
        found.append(
            Allocation(
                kind=kind_of(block),
                size=block.integer(2),
                parameter=block.integer(6) if is_argument else None,
                aliased=is_argument and is_output,
                buffers=tuple(buffers),
            )
        )
    return tuple(found)


def kind_of(block: Message) -> str:
    if block.integer(5):
        return "argument"
    if block.integer(12):
        return "constant"
    return "output" if block.integer(7) else "temporary"


def read_values(assignment: Message) -> dict[int, Value]:
    aliases: dict[int, list] = {}
    for alias in assignment.messages(2):
        aliases.setdefault(alias.integer(1), []).append(place(alias.message(2)))
    found = {}
    for buffer in assignment.messages(1):
        made_by = place(buffer.message(3))
        places = frozenset([made_by, *aliases.get(buffer.integer(1), [])])
        found[buffer.integer(1)] = Value(buffer.integer(2), places, made_by)
    return found


def place(location: Message) -> tuple[int, tuple[int, ...]]:
    return location.integer(4), tuple(location.integers(3))


class LiveRanges:
    """From which to which position of the schedule a value is live."""

    def __init__(self, module: HloModule, order: Sequence[HloInstruction]):
        self.module = module
        self.order = order
        self.end = len(order) - 1
        self.arguments = {
            i.id for i in module.entry.instructions if i.opcode == "parameter"
        }
        self.position = {i.id: n for n, i in enumerate(order)}
        self.users: dict[int, list[int]] = {}
        for i in order:
            for operand in i.operands:
                self.users.setdefault(operand, []).append(self.position[i.id])

    def of(self, value: Value) -> tuple[int, int] | None:
        """None for a value of a computation that only describes a reduction."""
        made_by, _ = value.made_by
        places = {i for i, _ in value.places if i in self.position}
        if made_by in self.arguments:
            places &= self.forwarded(made_by)
        if not places:
            return None
        at = [self.position[i] for i in places]
        uses = [user for i in places for user in self.users.get(i, [])]
        if self.module.entry.root in places:
            uses.append(self.end)
        if made_by in self.arguments:
            at.append(0)  # an argument is there before the first instruction
        return min(at), max([*at, *uses])

    def forwarded(self, i: int) -> set[int]:
        """Where an argument goes uncopied; what else shares its block came later."""
        found = [i]
        for value in found:
            for user in self.users.get(value, []):
                forwards = self.order[user].opcode in (*VIEWS, *CONTROL)
                if forwards and self.order[user].id not in found:
                    found.append(self.order[user].id)
        return set(found)

    def label(self, value: Value) -> tuple[str, str]:
        i, index = value.made_by
        instruction = self.module.by_id[i]
        shape = instruction.shape
        for part in index:
            shape = shape.parts[part]
        suffix = f"{{{','.join(map(str, index))}}}" if index else ""
        return instruction.name + suffix, str(shape)
