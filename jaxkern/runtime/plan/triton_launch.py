"""A Triton launch as XLA holds it: name, grid and sources, from its custom call."""

import dataclasses
import re
import zlib

from jaxkern.runtime.plan.hlo_module import HloInstruction, Message

TARGETS = ("triton_kernel_call_ffi", "triton_kernel_call")
OPAQUE = re.compile(r'opaque = "((?:[^"\\]|\\.)*)"')
ESCAPED = re.compile(r"\\([0-9A-Fa-f]{2}|.)")
LARGEST = 1 << 26  # bytes of one call; a kernel takes kilobytes


@dataclasses.dataclass(frozen=True)
class TritonLaunch:
    """One launch in a compiled module.

    Attributes:
      name: of the kernel.
      grid: number of programs along each of three axes.
      num_warps: of one program.
      shared_bytes: shared memory of one program.
      capability: of the GPU that it was compiled for: 90 for an H100 or H200.
      ttir: Triton's intermediate representation.
      ptx: the assembly. Both are without the places of their source.
    """

    name: str
    grid: tuple[int, int, int]
    num_warps: int
    shared_bytes: int
    capability: int
    ttir: str
    ptx: str


def triton_launch(instruction: HloInstruction) -> TritonLaunch | None:
    """What an instruction launches, or None if it is no Triton launch."""
    if instruction.target not in TARGETS:
        return None
    match = OPAQUE.search(instruction.message.text(43))
    return None if match is None else read_launch(match.group(1))


def read_launch(escaped: str) -> TritonLaunch | None:
    """From the attribute as MLIR prints it: bytes outside ASCII as two hex digits.

    The field numbers are those of jaxlib's `triton.proto`.
    """
    raw = ESCAPED.sub(lambda m: chr(int(m[1], 16)) if len(m[1]) == 2 else m[1], escaped)
    try:
        data = zlib.decompressobj().decompress(raw.encode("latin-1"), LARGEST)
        call = Message(data).message(1)
        kernel = call.message(1)
        return TritonLaunch(
            name=kernel.text(1),
            # the first counts clusters; before there were any, the field was not there
            grid=(
                call.integer(2) * max(kernel.integer(10), 1),
                call.integer(3),
                call.integer(4),
            ),
            num_warps=kernel.integer(2),
            shared_bytes=kernel.integer(3),
            capability=kernel.integer(6),
            ptx=kernel.text(4),
            ttir=kernel.text(5),
        )
    except (ValueError, zlib.error):
        return None
