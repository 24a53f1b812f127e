"""Tiles of heads, each divided into the pairs that rotate and the dims that pass.

HEAD is (h, number of pairs, their distance or 0 for neighbours, both powers of 2 that
hold the pairs and, unless every dim is in a pair, the head). TILE is (runs, heads of a
run): the heads of a run belong to one token and share what is read of the tables.
"""

import math

import jax

from jaxkern.gpu.device import WARP, next_power_of_2
from jaxkern.gpu.triton_call import jit, tl


def head_of(h: int, pairs: int, pairing: str, pair_offset: int) -> tuple[int, ...]:
    """The constant HEAD."""
    apart = 0 if pairing == "interleaved" else pair_offset
    rest = 0 if 2 * pairs == h else next_power_of_2(h)
    return h, pairs, apart, next_power_of_2(pairs), rest


def tile_of(heads: int, together: int) -> tuple[int, int]:
    """The constant TILE: `together` heads, of tokens that have `heads` each."""
    run = math.gcd(heads, together)
    return together // run, run


def sizes_of(head: tuple[int, ...], elements: int) -> dict:
    """Heads of a tile, of at most `elements` registers together, 16 a thread."""
    *_, pairs, rest = head
    together = max(1, elements // (2 * pairs + rest))
    return {
        "TOGETHER": next_power_of_2(together + 1) // 2,
        "WAVES": 2,
        "STAGES": 3,
        "num_warps": elements // (16 * WARP),
    }


def heads_and_tokens(query: jax.Array, key: jax.Array | None) -> tuple[int, int, int]:
    """Heads of a token, its key heads, and the number of tokens."""
    *_, heads, h = query.shape
    tokens = query.size // (heads * h) if query.size else 0
    return heads, 0 if key is None else key.shape[-2], tokens


@jit
def heads_of(block, N: tl.constexpr, TILE: tl.constexpr):
    """Heads of a block [runs, heads, 1] and the tokens of its runs [runs, 1, 1]."""
    RUNS: tl.constexpr = TILE[0]
    HEADS: tl.constexpr = TILE[1]
    first = (block * RUNS + tl.arange(0, RUNS)[:, None, None]) * HEADS
    head = first + tl.arange(0, HEADS)[None, :, None]
    return head.to(tl.int64), (first // N).to(tl.int64)


@jit
def read_angles(ptr, token, NUM_TOKENS: tl.constexpr, HEAD: tl.constexpr):
    """One side of the tables, for each run: [runs, 1, pairs]."""
    R: tl.constexpr = HEAD[1]
    PAIRS: tl.constexpr = HEAD[3]
    pair = tl.arange(0, PAIRS)[None, None, :]
    mask = (token < NUM_TOKENS) & (pair < R)
    return tl.load(ptr + token * R + pair, mask, 0.0).to(tl.float32)


@jit
def read_pairs(ptr, start, present, HEAD: tl.constexpr, TILE: tl.constexpr):
    """Both sides of the pairs of heads: two tiles [runs, heads, pairs]."""
    R: tl.constexpr = HEAD[1]
    APART: tl.constexpr = HEAD[2]
    PAIRS: tl.constexpr = HEAD[3]
    RUNS: tl.constexpr = TILE[0]
    HEADS: tl.constexpr = TILE[1]
    if APART == 0:
        # neighbours are read as one, then taken apart
        both = tl.arange(0, 2 * PAIRS)[None, None, :]
        ab = tl.load(ptr + start + both, present & (both < 2 * R), 0.0)
        ab = tl.reshape(ab.to(tl.float32), [RUNS, HEADS, PAIRS, 2])
        a, b = tl.split(ab)
        return a, b
    else:
        pair = tl.arange(0, PAIRS)[None, None, :]
        mask = present & (pair < R)
        a = tl.load(ptr + start + pair, mask, 0.0).to(tl.float32)
        b = tl.load(ptr + start + pair + APART, mask, 0.0).to(tl.float32)
        return a, b


@jit
def write_pairs(ptr, start, present, a, b, HEAD: tl.constexpr, TILE: tl.constexpr):
    """The inverse of read_pairs."""
    R: tl.constexpr = HEAD[1]
    APART: tl.constexpr = HEAD[2]
    PAIRS: tl.constexpr = HEAD[3]
    RUNS: tl.constexpr = TILE[0]
    HEADS: tl.constexpr = TILE[1]
    if APART == 0:
        both = tl.arange(0, 2 * PAIRS)[None, None, :]
        ab = tl.reshape(tl.join(a, b), [RUNS, HEADS, 2 * PAIRS])
        tl.store(ptr + start + both, ab, present & (both < 2 * R))
    else:
        pair = tl.arange(0, PAIRS)[None, None, :]
        mask = present & (pair < R)
        tl.store(ptr + start + pair, a, mask)
        tl.store(ptr + start + pair + APART, b, mask)


@jit
def rest_of(HEAD: tl.constexpr):
    """The dims of a head, [1, 1, dims], and whether each is in no pair."""
    H: tl.constexpr = HEAD[0]
    R: tl.constexpr = HEAD[1]
    APART: tl.constexpr = HEAD[2]
    REST: tl.constexpr = HEAD[4]
    dim = tl.arange(0, REST)[None, None, :]
    if APART == 0:
        return dim, (dim >= 2 * R) & (dim < H)
    else:
        behind = (dim >= APART + R) & (dim < H)
        return dim, behind | ((dim >= R) & (dim < APART))


@jit
def read_rest(ptr, start, present, HEAD: tl.constexpr):
    """The dims that pass, zeros in the place of the others."""
    dim, passes = rest_of(HEAD)
    return tl.load(ptr + start + dim, present & passes, 0.0).to(tl.float32)


@jit
def write_rest(ptr, start, present, rest, HEAD: tl.constexpr):
    dim, passes = rest_of(HEAD)
    tl.store(ptr + start + dim, rest, present & passes)


@jit
def over_heads(x):
    """The sum over a tile: [1, 1, pairs]."""
    return tl.sum(tl.sum(x, 0, keep_dims=True), 1, keep_dims=True)
