"""Layouts of the decode kernel over quantised caches, in registers and shared memory.

In a product a lane has columns 4 dims apart of its second operand, for the token or row
lane // 4, and of the first one rows lane // 4, for the pair lane % 4 of dims or tokens.

A warp has of a block in shared memory rows of the planes and scales of keys and of
values. It alone writes and reads them, so it waits for no other warp.
"""

from jaxkern.triton.triton_call import constexpr_function, gl


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


@constexpr_function
def part_of(PART, H, HV, KEY, VALUE, KEY_ROW, VALUE_ROW, KEY_GROUPS, VALUE_GROUPS):
    """(bytes of a vector in memory, where a part begins, its size, pitch) of a part.

    The pitch is that of rows in shared memory: of keys such that eight lanes that read
    of two rows meet all banks.
    """
    dims, form, row = (H, KEY, KEY_ROW) if PART < 3 else (HV, VALUE, VALUE_ROW)
    main, second = dims * form[0] // 8, dims * form[1] // 8
    if PART % 3 == 0:
        return row, 0, main, main + (16 if PART == 0 and main >= 128 else 0)
    if PART % 3 == 1:
        return row, main, second, second
    size = 4 * (KEY_GROUPS if PART < 3 else VALUE_GROUPS)
    return size, 0, size, size


@constexpr_function
def offsets_of(BLOCK, PARTS):
    """Where the parts of a block begin, and the end."""
    at = [0]
    for part in PARTS:
        at.append(at[-1] + BLOCK * part[3])
    return tuple(at)


@constexpr_function
def parts_of(*SIZES):
    """Of keys the main and second plane and the scales, then of values."""
    return tuple(part_of(i, *SIZES) for i in range(6))


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
    row, at, size, _ = PART
    unit = min(16, *(x & -x for x in (row, at or 16, size)))
    return unit, size // unit, min(32 * unit // size, BLOCK)


@constexpr_function
def place_of(row, PART, BLOCK):
    """In bytes; single scales of tokens 8 apart, of one lane, are neighbours."""
    if PART[2] == 4:
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
    _, at, size, _ = PART
    rows = max(128 // size, 1)
    if at != 0:
        return rows, 1
    return rows, max(min(size // 32, copies_of(PART, BLOCK)[2] // rows, 4), 1)
