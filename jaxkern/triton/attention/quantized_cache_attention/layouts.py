"""Layouts of the decode kernel over quantised caches, in registers and shared memory.

In a product a lane has columns 4 dims apart of its second operand, for the token or row
lane // 4, and of the first one rows lane // 4, for the pair lane % 4 of dims or tokens.

A warp has of a block in shared memory rows of the planes and scales of keys and of
values. It alone writes and reads them, so it waits for no other warp.
"""

from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import constexpr_function, gl


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
    return min(8, D * FORMAT[0] // 128)


@constexpr_function
def value_run(D, FORMAT):
    """Neighbouring words that one of the eight lanes of a value has."""
    return min(4, D * FORMAT[0] // 256)


def padded_dims(d: int, form: tuple, lanes: int) -> int:
    """The power of two that holds d dims, gives each of the lanes a word and a product
    its 16 terms."""
    return max(next_power_of_2(d), 32 * lanes // form[0], 16)


def parts_of(d: int, dims: int, form: tuple, row: int, groups: int, keys: bool):
    """The main plane, the planes behind it and the scales of keys, or of values.

    Each is (bytes of a vector in memory, where the part begins, room in shared memory,
    pitch, bytes that it has); the rest of the room is zeros. The pitch is that of rows
    in shared memory: of keys such that eight lanes reading two rows meet all banks.

    Args:
      d: of a vector, of which shared memory has `dims`.
      form: see quantized_levels.py.
      row: bytes of a vector.
      groups: scales of a vector.
      keys: eight lanes read of two rows.
    """
    main, room = d * form[0] // 8, dims * form[0] // 8
    planes = next_power_of_2(dims * form[1] // 8) if form[1] else 0
    scales = 4 * min(groups, 1) if groups < 2 else 4 * (dims * groups // d)
    return (
        (row, 0, room, room + (16 if keys and room >= 128 else 0), main),
        (row, main, planes, planes, row - main),
        (4 * groups, 0, scales, scales, 4 * groups),
    )


@constexpr_function
def planes_of(FORMAT):
    """Widths of the planes behind the main one, as they follow each other."""
    return tuple(width for width in (2, 1) if FORMAT[1] & width)


@constexpr_function
def plane_at(PART, FORMAT, NUMBER):
    """Where one of them begins within their part."""
    if NUMBER == 0 or NUMBER >= len(planes_of(FORMAT)):
        return 0
    return PART[4] * planes_of(FORMAT)[0] // FORMAT[1]


@constexpr_function
def offsets_of(BLOCK, PARTS):
    """Where the parts of a block begin, and the end."""
    at = [0]
    for part in PARTS:
        at.append(at[-1] + BLOCK * part[3])
    return tuple(at)


@constexpr_function
def nth(PARTS, NUMBER):
    """One of the parts; indexed in a kernel it would be no constant."""
    return PARTS[NUMBER]


@constexpr_function
def types_of(TYPE, COUNT):
    return (TYPE,) * COUNT


@constexpr_function
def copies_of(PART, BLOCK):
    """(bytes of a copy, copies of a row, rows that a warp copies at once)."""
    row, at, room, _, size = PART
    unit = min(16, *(x & -x for x in (row, at or 16, size)))
    return unit, room // unit, min(32 * unit // room, BLOCK)


def can_be_copied(part: tuple) -> bool:
    """By a warp, in words of 4, 8 or 16 bytes."""
    unit, count, _ = copies_of(part, 1)
    return unit >= 4 and count <= 32


@constexpr_function
def is_one_scale(PART):
    """Of a vector; no plane begins at 0 with so few bytes."""
    return PART[1] == 0 and PART[2] == 4


@constexpr_function
def place_of(row, PART, BLOCK):
    """In bytes; single scales of tokens 8 apart, of one lane, are neighbours."""
    if is_one_scale(PART):
        return row // 8 * 4 + row % 8 * (BLOCK // 2)
    return row * PART[3]


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
    _, at, room, _, _ = PART
    rows = max(128 // room, 1)
    if at != 0:
        return rows, 1
    return rows, max(min(room // 32, copies_of(PART, BLOCK)[2] // rows, 4), 1)
