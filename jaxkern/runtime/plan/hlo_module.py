"""XLA's compiled module as plain Python, read from its protobuf bytes.

The text of a module is for people and changes with XLA; field numbers of a protobuf
never do (https://protobuf.dev/programming-guides/encoding). The numbers below are those
of `hlo.proto` and `xla_data.proto`; no schema need be installed.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

ELEMENT_TYPES = (
    "invalid pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 "
    "token c128 f8e5m2 f8e4m3fn s4 u4 f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s2 u2 "
    "f8e4m3 f8e3m4 s1 u1 f4e2m1fn f8e8m0fnu"
).split()
BITS_BEFORE_WIDTH = re.compile(r"[a-z]+?(\d+)")


class Message:
    """One protobuf message; fields by number, parsed at the first look.

    Args:
      data: the encoded message.

    Raises:
      ValueError: at a look into bytes that are no protobuf.
    """

    def __init__(self, data: bytes | memoryview):
        self.data = memoryview(data)

    @functools.cached_property
    def fields(self) -> dict[int, list[int | memoryview]]:
        found: dict[int, list[int | memoryview]] = {}
        try:
            for number, value in wire_fields(self.data):
                found.setdefault(number, []).append(value)
        except IndexError:
            raise ValueError("the bytes are no protobuf: they end too early") from None
        return found

    def integer(self, number: int, default: int = 0) -> int:
        value = self.fields.get(number, [default])[-1]
        return value if isinstance(value, int) else default

    def integers(self, number: int) -> list[int]:
        """A repeated integer, packed or not."""
        out: list[int] = []
        for value in self.fields.get(number, []):
            out += [value] if isinstance(value, int) else packed_integers(value)
        return out

    def text(self, number: int) -> str:
        value = self.fields.get(number, [b""])[-1]
        return "" if isinstance(value, int) else bytes(value).decode(errors="replace")

    def message(self, number: int) -> "Message":
        value = self.fields.get(number, [b""])[-1]
        return Message(b"" if isinstance(value, int) else value)

    def messages(self, number: int) -> list["Message"]:
        values = self.fields.get(number, [])
        return [Message(v) for v in values if not isinstance(v, int)]


def wire_fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(field number, integer or bytes) of every field of one message."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        if tag & 7 == 0:
            value, at = varint(data, at)
        else:
            if tag & 7 == 2:
                size, at = varint(data, at)
            elif tag & 7 in (1, 5):
                size = 8 if tag & 7 == 1 else 4
            else:
                raise ValueError(f"the bytes are no protobuf: wire type {tag & 7}")
            if at + size > len(data):
                raise IndexError
            value, at = data[at : at + size], at + size
        yield tag >> 3, value


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return (value - (1 << 64) if value >> 63 else value), at
        if shift > 63:
            raise ValueError("the bytes are no protobuf: a number of over 64 bits")


def packed_integers(data: memoryview) -> list[int]:
    out, at = [], 0
    while at < len(data):
        value, at = varint(data, at)
        out.append(value)
    return out


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's element type and sizes, or a tuple of shapes.

    Attributes:
      element: XLA's name: "f32", "s8", "pred"; "tuple" for a tuple.
      sizes: of the dims.
      parts: of a tuple.
    """

    element: str
    sizes: tuple[int, ...]
    parts: tuple["Shape", ...] = ()

    @property
    def elements(self) -> int:
        if self.element == "tuple":
            return sum(part.elements for part in self.parts)
        return math.prod(self.sizes)

    @property
    def bytes(self) -> int:
        if self.element == "tuple":
            return sum(part.bytes for part in self.parts)
        return -(-math.prod(self.sizes) * bits_of(self.element) // 8)

    def __str__(self) -> str:
        if self.element == "tuple":
            return f"({', '.join(map(str, self.parts))})"
        return f"{self.element}[{','.join(map(str, self.sizes))}]"


def bits_of(element: str) -> int:
    """Bits of one element; 0 for what holds no numbers."""
    if element == "pred":
        return 8
    match = BITS_BEFORE_WIDTH.match(element)
    return int(match.group(1)) if match else 0


@dataclasses.dataclass(frozen=True, eq=False)
class HloInstruction:
    """One instruction of a compiled module.

    Attributes:
      id: unique in the module.
      name: unique in the module, what a profile shows.
      opcode: "dot", "fusion", "while", ...
      shape: of the result.
      operands: ids.
      called: ids of the computations that it calls.
      op_name: where it comes from: "jit(f)/rms_norm/mul".
      message: all other fields.
    """

    id: int
    name: str
    opcode: str
    shape: Shape
    operands: tuple[int, ...]
    called: tuple[int, ...]
    op_name: str
    message: Message

    @property
    def fusion_kind(self) -> str:
        """ "loop", "input", "output" or "custom", after XLA's kLoop, ...; else ""."""
        return self.message.text(11).removeprefix("k").lower()

    @property
    def target(self) -> str:
        """What a custom call calls."""
        return self.message.text(28)

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """What the backend notes down, where that is JSON."""
        try:
            config = json.loads(self.message.text(43) or "{}")
        except ValueError:
            return {}
        return config if isinstance(config, dict) else {}

    @property
    def trips(self) -> int | None:
        """How often a loop runs, if XLA knows."""
        count = self.config.get("known_trip_count", {}).get("n")
        return None if count is None else int(count)


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A list of instructions in the order in which they run.

    Attributes:
      id, name: unique in the module.
      root: id of the instruction whose result is the computation's.
      instructions: in order.
    """

    id: int
    name: str
    root: int
    instructions: tuple[HloInstruction, ...]


CONTROL = ("while", "conditional", "call", "async-start")


class HloModule:
    """A compiled module.

    Args:
      data: a serialized `HloModuleProto`.

    Attributes:
      name: "jit_f".
      computations: by id.
      entry: the computation that a call runs.
      by_id: every instruction.
      aliases: results in donated arguments, `HloInputOutputAliasProto.entries`.
    """

    def __init__(self, data: bytes | memoryview):
        module = Message(data)
        orders = {
            pair.integer(1): pair.message(2).integers(1)
            for pair in module.message(7).messages(1)
        }
        self.name = module.text(1)
        self.aliases = module.message(8).messages(1)
        self.computations: dict[int, Computation] = {}
        for c in module.messages(3):
            found = {i.id: i for i in map(read_instruction, c.messages(2))}
            order = orders.get(c.integer(5), list(found))
            self.computations[c.integer(5)] = Computation(
                c.integer(5),
                c.text(1),
                c.integer(6),
                tuple(found[i] for i in order if i in found),
            )
        entry = module.integer(6)
        if entry not in self.computations:
            raise ValueError("the bytes are no HLO module: it has no entry")
        self.entry = self.computations[entry]
        self.by_id = {
            i.id: i for c in self.computations.values() for i in c.instructions
        }

    def schedule(self, computation: Computation | None = None) -> list[HloInstruction]:
        """Every executed instruction; a loop's body stands right before the loop."""
        out: list[HloInstruction] = []
        for instruction in (computation or self.entry).instructions:
            if instruction.opcode in CONTROL:
                for called in instruction.called:
                    out += self.schedule(self.computations[called])
            out.append(instruction)
        return out

    def operands(self, instruction: HloInstruction) -> list[HloInstruction]:
        return [self.by_id[i] for i in instruction.operands]


def read_instruction(message: Message) -> HloInstruction:
    return HloInstruction(
        id=message.integer(35),
        name=message.text(1),
        opcode=message.text(2),
        shape=read_shape(message.message(3)),
        operands=tuple(message.integers(36)),
        called=tuple(message.integers(38)),
        op_name=message.message(7).text(2),
        message=message,
    )


def read_shape(message: Message) -> Shape:
    number = message.integer(2)
    element = ELEMENT_TYPES[number] if number < len(ELEMENT_TYPES) else f"type{number}"
    parts = tuple(map(read_shape, message.messages(4)))
    return Shape(element, tuple(message.integers(3)), parts)
