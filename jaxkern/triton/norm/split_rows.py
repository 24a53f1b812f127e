"""Few rows: each is split over the programs of a cluster, which add up its sums.

A program holds BLOCK columns of a row in registers, read once and all at once, and
CLUSTER programs hold the row. A sum along the row costs an exchange: each program
sends its part to all. So a single row has 8 multiprocessors at work and not one, and no
program waits for its loads twice. A row of one block has a program alone.
"""

from typing import Any

from jaxkern.gpu.cluster import (
    MAX_PROGRAMS,
    OLDEST_WITH_CLUSTERS,
    all_have_sent,
    exchange_bytes,
    exchange_memory,
    peers_have_begun,
    receive,
    send,
)
from jaxkern.gpu.device import WARP, compute_capability, num_sms
from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import jit, tl

BLOCKS = (1024, 2048, 4096, 8192)  # columns that a program can hold
SHORT = 1024  # columns up to which kernels for short rows are as fast
WHOLE = 4096  # columns of a forward pass that a program alone has as soon as a cluster
LONGEST_WHOLE = 8192  # columns of the longest row that a program can hold
ELEMENTS = 8  # of a thread
WALKED = 2  # rows by one cluster, which spares a kernel that adds up its sums
PLACES = 4  # numbers that a program sends: two sums of this row, two of the next


def vector_of(x: Any) -> int:
    """Elements of 16 bytes where rows do not begin at multiples of them, else 1."""
    elements = 16 // x.dtype.itemsize
    return 1 if x.shape[-1] % elements == 0 else elements


def blocks_of(rows: int, d: int, whole: int = 0) -> dict | None:
    """The smallest blocks of which few rows are no more than multiprocessors.

    Rows of up to `whole` columns are one block. Many rows have as few programs a row as
    hold it; None where no cluster does.
    """
    fits = {block: -(-d // block) for block in BLOCKS if d > whole or d <= block}
    fits = {block: n for block, n in fits.items() if n <= MAX_PROGRAMS}
    if not fits or compute_capability() < OLDEST_WITH_CLUSTERS:
        return None
    few = [block for block, n in fits.items() if rows * n <= num_sms()]
    block = min(few, default=min(fits, key=lambda block: (fits[block], block)))
    cluster, warps = fits[block], min(32, block // (WARP * ELEMENTS))
    exchange = exchange_bytes(PLACES * MAX_PROGRAMS) if cluster > 1 else 0
    sizes = {"BLOCK": block, "CLUSTER": cluster, "EXCHANGE": exchange}
    return sizes | {"num_warps": warps, "cluster": cluster}


def most_rows(d: int, itemsize: int) -> int:
    """Up to which a forward pass was faster so on an H200, of 132 multiprocessors."""
    if d <= (LONGEST_WHOLE if itemsize == 2 else 2048):
        return 2 * num_sms()
    if itemsize == 2 or d <= LONGEST_WHOLE or d > 49152:
        return num_sms() // 2
    return num_sms() // 8


def most_walked(d: int, itemsize: int, centred: bool) -> int:
    """Likewise of a backward pass."""
    if itemsize == 4 and (d <= 2048 or (centred and 12288 < d <= 16384)):
        return 0 if d <= 2048 else 5 * num_sms()
    if itemsize == 2 and d <= LONGEST_WHOLE:
        return 2 * num_sms()
    return num_sms() // 2 if d <= 16384 else num_sms() // 8


def split_sizes(x: Any, several: bool = False) -> dict | None:
    """Of a forward pass; None where other kernels are as fast.

    Where it reads `several` tensors whose rows do not begin at multiples of 16 bytes,
    loads of single elements are what others take longest for, of any number of rows.
    """
    rows, d, itemsize, vector = num_rows(x), x.shape[-1], x.dtype.itemsize, vector_of(x)
    held = d + vector - 1
    loads = several and vector > 1 and itemsize == 2
    many = loads and 2048 < d and held <= LONGEST_WHOLE
    if d <= SHORT or (rows > most_rows(held, itemsize) and not many):
        return None
    sizes = blocks_of(rows, held, WHOLE)
    return sizes and sizes | {"VECTOR": vector, "NUM_ROWS": rows}


def split_walk(x: Any, centred: bool = False) -> dict | None:
    """Of a backward pass, whose clusters walk over rows; None likewise."""
    rows, d = num_rows(x), x.shape[-1]
    if d <= SHORT or rows > most_walked(d, x.dtype.itemsize, centred):
        return None
    sizes = blocks_of(rows, d)
    if sizes is None:
        return None
    at_once = max(1, num_sms() // sizes["CLUSTER"])
    programs = 1 if rows <= WALKED else min(rows, at_once)
    return sizes | {"NUM_ROWS": rows, "ROWS": 1, "PROGRAMS": programs, "STAGES": 1}


def alone() -> dict:
    """Constants of a kernel whose programs hold whole rows."""
    return {"CLUSTER": 1, "EXCHANGE": 0}


@jit
def own_stripe(CLUSTER: tl.constexpr):
    """The block of a row that a program has: its rank, or its number on axis 1."""
    if CLUSTER > 1:
        return tl.program_id(0) % CLUSTER
    else:
        return tl.program_id(1)


@jit
def own_columns(BLOCK: tl.constexpr, CLUSTER: tl.constexpr):
    """[BLOCK], those of a row that this program of its cluster holds."""
    columns = tl.arange(0, BLOCK)
    if CLUSTER > 1:
        columns += tl.program_id(0) % CLUSTER * BLOCK
    return columns


@jit
def begin(CLUSTER: tl.constexpr, EXCHANGE: tl.constexpr):
    """The address of what others tell this program; 0 without a cluster."""
    if CLUSTER > 1:
        return exchange_memory(EXCHANGE)
    else:
        return 0


@jit
def await_others(CLUSTER: tl.constexpr):
    """Returns when they have begun, once and ahead of the first sum."""
    if CLUSTER > 1:
        peers_have_begun()


@jit
def tell(x, memory, place, CLUSTER: tl.constexpr):
    """Sends the number x to all programs of the cluster."""
    peers = tl.arange(0, 8)
    mine = tl.program_id(0) % CLUSTER
    send(memory + 4 * (8 * place + mine), peers, x, peers < CLUSTER)


@jit
def heard(memory, place, CLUSTER: tl.constexpr):
    """What all programs sent, in the order of their ranks, [8]; zeros behind."""
    peers = tl.arange(0, 8)
    return tl.where(peers < CLUSTER, receive(memory + 4 * (8 * place + peers)), 0.0)


@jit
def over_cluster(x, memory, place, CLUSTER: tl.constexpr):
    """The sum of the number x over the programs of a cluster: all add in one order."""
    if CLUSTER > 1:
        tell(x, memory, place, CLUSTER)
        all_have_sent()
        x = tl.sum(heard(memory, place, CLUSTER), 0)
    return x


@jit
def mean_of(x, memory, place, D: tl.constexpr, CLUSTER: tl.constexpr):
    """Along rows of D columns, of which this program has x, [ROWS, BLOCK]."""
    total = tl.sum(x, 1, keep_dims=True)
    if CLUSTER > 1:
        total = over_cluster(tl.sum(total), memory, place, CLUSTER)
    return total / D


@jit
def split_rstd(
    x, memory, place, D: tl.constexpr, EPS: tl.constexpr, CLUSTER: tl.constexpr
):
    """1 / rms of a row, of which this program has x, [BLOCK]."""
    squares = over_cluster(tl.sum(x * x, 0), memory, place, CLUSTER)
    return tl.rsqrt(squares / D + EPS)


@jit
def centred(u, inside, memory, D: tl.constexpr, CLUSTER: tl.constexpr):
    """(u less the mean of its row, the mean, the sum of squares of the row's).

    Programs centre what they have and join their parts by Chan's rule. Means are told
    as a number and what it lacks, so that no digits are lost far from zero.
    """
    held = D
    if CLUSTER > 1:
        # at least 1: the last program of a row may have nothing of it
        held = tl.maximum(tl.sum(inside.to(tl.float32), 0), 1.0)
    mean = tl.sum(u, 0) / held
    u = tl.where(inside, u - mean, 0.0)
    rest = tl.sum(u, 0) / held
    u = tl.where(inside, u - rest, 0.0)
    squares = tl.sum(u * u, 0)
    if CLUSTER > 1:
        tell(mean, memory, 0, CLUSTER)
        tell(rest, memory, 1, CLUSTER)
        tell(squares, memory, 2, CLUSTER)
        tell(tl.sum(inside.to(tl.float32), 0), memory, 3, CLUSTER)
        all_have_sent()
        peers = tl.arange(0, 8)
        means = heard(memory, 0, CLUSTER)
        origin = tl.sum(tl.where(peers == 0, means, 0.0), 0)
        apart = means - origin + heard(memory, 1, CLUSTER)
        counts = heard(memory, 3, CLUSTER)
        joint = tl.sum(counts * apart, 0) / D
        u += (mean - origin) + (rest - joint)
        squares = heard(memory, 2, CLUSTER) + counts * (apart - joint) * (apart - joint)
        squares = tl.sum(squares, 0)
        mean, rest = origin, joint
    return u, mean + rest, squares
