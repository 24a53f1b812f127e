"""The integer instructions of PTX that decode codes, on this machine."""

import re

import numpy as np

WORD = 0xFFFFFFFF


def prmt(a: int, b: int, selection: int) -> int:
    """Byte i of the result is the byte of b : a that digit i of `selection` says."""
    both = a | b << 32
    return sum((both >> 8 * (selection >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))


def lop3(a: int, b: int, c: int, table: int) -> int:
    """The function of three bits that has `table` for 0xf0, 0xcc and 0xaa."""
    terms = (
        (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        for i in range(8)
        if table >> i & 1
    )
    return sum(term & WORD for term in terms)


OPERATIONS = {
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "add.u32": lambda a, b: a + b,
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "min.u32": min,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
}


def run(text: str, inputs: dict[str, int], shared: np.ndarray) -> dict[str, int]:
    """The registers after inline PTX.

    Args:
      text: what `gl.inline_asm_elementwise` is given.
      inputs: values of registers, with `$i` those of operands.
      shared: bytes of shared memory.
    """
    registers = dict(inputs)

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for statement in text.strip("{} ").split(";"):
        operation, _, rest = statement.strip().partition(" ")
        names = re.findall(r"[^\s,\[\]{}]+", rest)
        if operation.startswith("ld.shared"):
            at, size = value(names[1]), int(operation[-2:]) // 8
            word = int.from_bytes(shared[at : at + size].tobytes(), "little")
            registers[names[0]] = word
        elif operation and not operation.startswith(".reg"):
            operands = map(value, names[1:])
            registers[names[0]] = OPERATIONS[operation](*operands) & WORD
    return registers
