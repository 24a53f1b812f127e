"""Layouts of the decode kernel over quantised caches, in registers and shared memory.

In a product a lane has columns 4 dims apart of its second operand, for the token or row
lane // 4, and of the first one rows lane // 4, for the pair lane % 4 of dims or tokens.

A warp has of a block in shared memory rows of the planes and scales of keys and of
values. It alone writes and reads them, so it waits for no other warp.
"""

import dataclasses

from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import constexpr_function, gl


@dataclasses.dataclass(frozen=True)
class Format:
    """How codes lie in a vector, and how they become levels.

    Attributes:
      width: bits of a code in the main plane.
      behind: bits of a code in the planes behind it, together.
      together: codes of one lookup; 0 or less where levels are computed.
      later: of a vector of which only the first quarter has bits behind the main plane,
        the entry of the table that is the first of the other dims'; else 0.
    """

    width: int
    behind: int
    together: int
    later: int = 0


@dataclasses.dataclass(frozen=True)
class Part:
    """A plane or the scales of keys or of values, in bytes.

    Attributes:
      vector: of a whole vector in memory.
      start: where the part begins in it.
      room: of a vector's part in shared memory; 0 for a part that there is not.
      pitch: between two vectors there.
      size: that a vector has; the rest of the room is zeros.
    """

    vector: int
    start: int
    room: int
    pitch: int
    size: int


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the parts of a block begin in shared memory, and where it ends."""

    keys: int
    key_planes: int
    key_scales: int
    values: int
    value_planes: int
    value_scales: int
    end: int


@constexpr_function
def bases(count, base, axis, rank=3):
    """Of the bits of `count` steps of `base` along an axis."""
    steps = (base << i for i in range(count.bit_length() - 1))
    return [[step if a == axis else 0 for a in range(rank)] for step in steps]


@constexpr_function
def lane_layout(WARPS, LOW, AXIS, HIGH):
    """[warps, ., .] of which a lane has one: its low bits along AXIS, then the others.

    LOW and HIGH: how many along the two axes; lanes beyond repeat them.
    """
    lanes = bases(LOW, 1, AXIS) + bases(HIGH, 1, 3 - AXIS)
    shape = [WARPS, LOW, HIGH] if AXIS == 1 else [WARPS, HIGH, LOW]
    lanes += [[0, 0, 0]] * (5 - len(lanes))
    return gl.DistributedLinearLayout([], lanes, bases(WARPS, 1, 0), [], shape)


@constexpr_function
def query_layout(WARPS, ROWS, DIMS, RUN):
    """[warps, rows, dims]: two lanes have RUN neighbouring dims of every 4 RUN."""
    registers = bases(RUN // 2, 1, 2) + bases(ROWS // 4, 4, 1)
    registers += bases(DIMS // (4 * RUN), 4 * RUN, 2)
    lanes = [*bases(4, RUN, 2), [0, 0, RUN // 2], *bases(4, 1, 1)]
    shape = [WARPS, ROWS, DIMS]
    return gl.DistributedLinearLayout(registers, lanes, bases(WARPS, 1, 0), [], shape)


@constexpr_function
def token_layout(WARPS):
    """[warps, 8]: a lane has the token of its key, lane // 4."""
    lanes = bases(4, 0, 1, 2) + bases(8, 1, 1, 2)
    return gl.DistributedLinearLayout([], lanes, bases(WARPS, 1, 0, 2), [], [WARPS, 8])


@constexpr_function
def out_layout(WARPS, ROWS, DIMS, RUN):
    """[warps, rows, dims]: a lane has RUN neighbouring dims of every 8 RUN."""
    registers = bases(RUN, 1, 2) + bases(ROWS // 4, 4, 1)
    registers += bases(DIMS // (8 * RUN), 8 * RUN, 2)
    lanes = bases(4, 1, 1) + bases(8, RUN, 2)
    shape = [WARPS, ROWS, DIMS]
    return gl.DistributedLinearLayout(registers, lanes, bases(WARPS, 1, 0), [], shape)


@constexpr_function
def scores_layout(WARPS):
    return gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )


@constexpr_function
def key_run(D, FORMAT):
    """Neighbouring words that one of the four lanes of a key has."""
    return min(8, D * FORMAT.width // 128)


@constexpr_function
def value_run(D, FORMAT):
    """Neighbouring words that one of the eight lanes of a value has."""
    return min(4, D * FORMAT.width // 256)


@constexpr_function
def dims_of_key_lane(P):
    """Neighbouring dims that one of the four lanes of a key has."""
    return key_run(P.keys.room, P.keys.form) * (32 // P.keys.form.width)


@constexpr_function
def dims_of_value_lane(P):
    """Neighbouring dims that one of the eight lanes of a value has."""
    return value_run(P.values.room, P.values.form) * (32 // P.values.form.width)


def padded_dims(d: int, form: Format, lanes: int) -> int:
    """The power of two that holds d dims, gives each of the lanes a word and a product
    its 16 terms."""
    return max(next_power_of_2(d), 32 * lanes // form.width, 16)


def parts_of(d: int, dims: int, form: Format, row: int, groups: int, keys: bool):
    """The main plane, the planes behind it and the scales of keys, or of values.

    The pitch of keys is such that eight lanes reading two rows meet all banks.

    Args:
      d: of a vector, of which shared memory has `dims`.
      row: bytes of a vector.
      groups: scales of a vector.
      keys: eight lanes read of two rows.
    """
    main, room = d * form.width // 8, dims * form.width // 8
    planes = next_power_of_2(dims * form.behind // 8) if form.behind else 0
    scales = 4 * min(groups, 1) if groups < 2 else 4 * (dims * groups // d)
    return (
        Part(row, 0, room, room + (16 if keys and room >= 128 else 0), main),
        Part(row, main, planes, planes, row - main),
        Part(4 * groups, 0, scales, scales, 4 * groups),
    )


@constexpr_function
def planes_of(FORMAT):
    """Widths of the planes behind the main one, as they follow each other."""
    return tuple(width for width in (2, 1) if FORMAT.behind & width)


@constexpr_function
def plane_at(PART, FORMAT, NUMBER):
    """Where one of them begins within their part."""
    if NUMBER == 0 or NUMBER >= len(planes_of(FORMAT)):
        return 0
    return PART.size * planes_of(FORMAT)[0] // FORMAT.behind


@constexpr_function
def offsets_of(BLOCK, PARTS):
    at = [0]
    for part in PARTS:
        at.append(at[-1] + BLOCK * part.pitch)
    return Places(*at)


@constexpr_function
def nth_part(P, NUMBER):
    """In the order of `Places`; indexed in a kernel it would be no constant."""
    return P.parts[NUMBER]


@constexpr_function
def nth_place(P, NUMBER):
    """Where that part of a block begins."""
    return P.places[NUMBER]


@constexpr_function
def types_of(TYPE, COUNT):
    return (TYPE,) * COUNT


@constexpr_function
def copies_of(PART, BLOCK):
    """(bytes of a copy, copies of a row, rows that a warp copies at once)."""
    ends = PART.vector, PART.start or 16, PART.size
    unit = min(16, *(x & -x for x in ends))
    return unit, PART.room // unit, min(32 * unit // PART.room, BLOCK)


def can_be_copied(part: Part) -> bool:
    """By a warp, in words of 4, 8 or 16 bytes."""
    unit, count, _ = copies_of(part, 1)
    return unit >= 4 and count <= 32


@constexpr_function
def is_one_scale(PART):
    """Of a vector; no plane begins at 0 with so few bytes."""
    return PART.start == 0 and PART.room == 4


@constexpr_function
def place_of(row, PART, BLOCK):
    """In bytes; single scales of tokens 8 apart, of one lane, are neighbours."""
    if is_one_scale(PART):
        return row // 8 * 4 + row % 8 * (BLOCK // 2)
    return row * PART.pitch


@constexpr_function
def token_of(row, PAIRED):
    """The token of a row: of values neighbours lie four rows apart, pairs together."""
    if PAIRED:
        return row // 8 * 8 + row % 4 * 2 + row // 4 % 2
    return row


@constexpr_function
def swizzle_of(PART, BLOCK):
    """(rows, blocks): blocks of 32 bytes are numbered ^ (row // rows) % blocks.

    So that eight or sixteen lanes that read of four rows of values meet all banks.
    """
    rows = max(128 // PART.room, 1)
    if PART.start != 0:
        return rows, 1
    return rows, max(min(PART.room // 32, copies_of(PART, BLOCK)[2] // rows, 4), 1)
