"""Rows of one head in arrays [b t n h]: which a program takes, how it moves them."""

from jaxkern.gpu.triton_call import jit, tl


@jit
def place(
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SECTION: tl.constexpr,
    LAST_FIRST: tl.constexpr,
):
    """(block, head) of this program: by sections of heads, the longest blocks first."""
    program = tl.program_id(0)
    section = program // (SECTION * BLOCKS)
    within = program % (SECTION * BLOCKS)
    present = tl.minimum(SECTION, HEADS - section * SECTION)
    block = within // present
    if LAST_FIRST:
        block = BLOCKS - 1 - block
    return block, section * SECTION + within % present


@jit
def load_within(
    pointers,
    row,
    column,
    count,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """0 beyond WIDTH of COLUMNS and, if MASKED, beyond count rows."""
    if MASKED and WIDTH < COLUMNS:
        x = tl.load(pointers, (row < count) & (column < WIDTH), 0.0)
    elif MASKED:
        x = tl.load(pointers, row < count, 0.0)
    elif WIDTH < COLUMNS:
        x = tl.load(pointers, column < WIDTH, 0.0)
    else:
        x = tl.load(pointers)
    return x


@jit
def load_rows(
    at,
    count,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows of WIDTH elements, 0 beyond WIDTH and, if MASKED, beyond count rows."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    pointers = at + row * STRIDE + column
    return load_within(pointers, row, column, count, WIDTH, COLUMNS, MASKED)


@jit
def load_turned(
    at,
    count,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """`load_rows` of an array [b n h t]: what Hopper's products of float32 sum over."""
    row = tl.arange(0, ROWS)[None, :]
    column = tl.arange(0, COLUMNS)[:, None]
    pointers = at + column * STRIDE + row
    x = load_within(pointers, row, column, count, WIDTH, COLUMNS, MASKED)
    return tl.trans(x)


@jit
def factor(x, like, C: tl.constexpr):
    """x as a factor of a product; one of TF32 cuts off what it does not hold."""
    if C.PRECISION == "tf32":
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, bits + 0x1000, bits)
        y = bits.to(tl.float32, bitcast=True)
    else:
        y = x.to(like.dtype)
    return y


@jit
def bits_of(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True)


@jit
def tail_of(exact, DTYPE: tl.constexpr):
    """What rounding to DTYPE takes from float32: attend.tail_of."""
    SHIFT: tl.constexpr = 8 if DTYPE == tl.bfloat16 else 5
    behind = bits_of(exact) - bits_of(exact.to(DTYPE))
    tail = (behind + (1 << (SHIFT - 1))) >> SHIFT
    return tl.where(tl.abs(tail) <= 128, tl.minimum(tail, 127), 0)


@jit
def with_tail(rounded, tail, DTYPE: tl.constexpr):
    SHIFT: tl.constexpr = 8 if DTYPE == tl.bfloat16 else 5
    bits = bits_of(rounded) + (tail.to(tl.int32) << SHIFT)
    return bits.to(tl.float32, bitcast=True)


@jit
def store_rows(
    at,
    x,
    count,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < count) & (column < WIDTH)
    tl.store(at + row * STRIDE + column, x.to(at.dtype.element_ty), inside)
