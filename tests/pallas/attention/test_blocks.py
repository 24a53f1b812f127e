"""Work is skipped: which blocks attention on Hopper visits, against every pair."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.gpu.attention.visible import segment_bounds
from jaxkern.pallas.attention.attention.blocks import key_blocks
from jaxkern.pallas.attention.attention.gradient_blocks import (
    KEYS,
    back_and_forth,
    place_keys,
    query_blocks,
)
from jaxkern.pallas.attention.attention.pairs import (
    inside_both,
    mask_words,
    word_bounds,
)
from jaxkern.pallas.attention.attention.problem import problem

B, T, S, ROWS, COLUMNS = 2, 300, 413, 64, 32
LENGTHS, OFFSETS = np.array([413, 150]), np.array([60, -100])
IDS = np.sort(np.random.default_rng(0).integers(0, 4, (B, T)), 1)
KV_IDS = np.sort(np.random.default_rng(1).integers(0, 4, (B, S)), 1)
MASK = np.zeros((B, 1, T, S), bool)
MASK[0, 0, 100:170, 200:300] = MASK[1, 0, 40:, 64:128] = True
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": dict(causal=True),
    "causal_offsets": dict(causal=True, offsets=OFFSETS),
    "window": dict(causal=True, window=70),
    "window_alone": dict(window=100, offsets=OFFSETS),
    "lengths": dict(lengths=LENGTHS),
    "lengths_causal": dict(causal=True, lengths=LENGTHS, offsets=OFFSETS),
    "segments": dict(segments=True),
    "segments_causal": dict(segments=True, causal=True, window=120),
    "mask": dict(mask=MASK),
    "mask_causal": dict(mask=MASK, causal=True),
    "mask_and_segments": dict(mask=MASK, segments=True),
}


def seen(causal=False, window=None, lengths=None, offsets=None, segments=False, mask=1):
    """[b t s], by the definition of each option."""
    lengths = np.full(B, S) if lengths is None else lengths
    offsets = np.full(B, S - T) if offsets is None else offsets
    position = (np.arange(T) + offsets[:, None])[:, :, None]
    key = np.arange(S)
    pairs = np.broadcast_to(key < lengths[:, None, None], (B, T, S))
    if causal:
        pairs = pairs & (key <= position)
    if window is not None:
        pairs = pairs & (key > position - window)
    if segments:
        pairs = pairs & (IDS[:, :, None] == KV_IDS[:, None])
    return pairs & np.reshape(mask, (-1, *np.shape(mask)[2:]))


def in_blocks(pairs, rows, columns):
    """[b, blocks, blocks]: where some pair is seen, and where all that are there."""
    padded = np.pad(pairs, [(0, 0), (0, -T % rows), (0, -S % columns)])
    shape = B, padded.shape[1] // rows, rows, padded.shape[2] // columns, columns
    there = np.pad(np.ones_like(pairs), [(0, 0), (0, -T % rows), (0, -S % columns)])
    some = padded.reshape(shape).any((2, 4))
    return some, (padded | ~there).reshape(shape).all((2, 4))


def visited(blocks, count, bounds, lengths, offsets, c):
    """(first, whole, whole_end, last) of every block of every batch entry."""
    arrays = [None if x is None else jnp.asarray(x) for x in (lengths, offsets, bounds)]
    of_block = functools.partial(blocks, c=c)

    @jax.jit
    def every(*arrays):
        each = jax.vmap(lambda b, i: jnp.stack(of_block(b, i, *arrays)), (None, 0))
        return jax.vmap(each, (0, None))(jnp.arange(B), jnp.arange(count))

    return np.moveaxis(np.asarray(every(*arrays)), -1, 0)


def check(found, some, all_of, at_least, spare):
    """What is seen is visited, what hides some is masked, and little else is visited.

    A tile that sees nothing visits `at_least` blocks; others up to `spare` too many.
    """
    first, whole, whole_end, last = found
    at = np.arange(some.shape[2])
    inside = (first[..., None] <= at) & (at < last[..., None])
    unmasked = (whole[..., None] <= at) & (at < whole_end[..., None]) & inside
    assert not (some & ~inside).any()
    assert not (unmasked & ~all_of).any()
    needed = np.where(some, at + 1, 0).max(-1) - np.where(some, at, 99).min(-1)
    assert ((last - first).clip(0) <= np.maximum(needed, at_least) + spare).all()


COMMON = ("causal_offsets", "segments_causal", "mask")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in COMMON else pytest.mark.full)
        for name in CASES
    ],
)
def test_of_keys_and_of_queries(name):
    given = CASES[name]
    some, all_of = in_blocks(seen(**given), ROWS, COLUMNS)
    q, k = (jax.ShapeDtypeStruct((B, n, 1, 64), jnp.bfloat16) for n in (T, S))
    options = given.get("causal", False), given.get("window"), None
    c = problem(q, k, k, None, 1.0, *options)
    c = dataclasses.replace(c, consumers=1, block_k=COLUMNS)
    places = given.get("lengths"), given.get("offsets")

    def bounds_of(rows, columns, turned):
        ids = tuple(map(jnp.asarray, (KV_IDS, IDS) if turned else (IDS, KV_IDS)))
        bounds = segment_bounds(*ids, rows, columns) if "segments" in given else None
        if "mask" in given:
            mask = given["mask"].swapaxes(2, 3) if turned else given["mask"]
            words = mask_words(jnp.asarray(mask), *mask.shape[2:], rows, columns)
            bounds = inside_both(bounds, word_bounds(words, B, rows, columns))
        return bounds

    bounds = bounds_of(ROWS, COLUMNS, False)
    found = visited(key_blocks, some.shape[1], bounds, *places, c)
    spare = int(name == "mask_causal")  # what each shows, but not at the same places
    check(found, some, all_of, 1, spare)
    bounds = bounds_of(ROWS, COLUMNS, True)
    of_queries = functools.partial(query_blocks, keys=ROWS, rows=COLUMNS)
    some, all_of = in_blocks(seen(**given), COLUMNS, ROWS)
    some, all_of = some.swapaxes(1, 2), all_of.swapaxes(1, 2)
    found = visited(of_queries, some.shape[1], bounds, *places, c)
    check(found, some, all_of, 0, spare)


@pytest.mark.parametrize("name", ["causal_offsets", "window", "lengths_causal"])
@pytest.mark.parametrize("consumer", [0, 1])
def test_of_consumers(name, consumer):
    """Of 64 rows of the 128 of a program."""
    given = CASES[name]
    q, k = (jax.ShapeDtypeStruct((B, n, 1, 64), jnp.bfloat16) for n in (T, S))
    options = given.get("causal", False), given.get("window"), None
    c = problem(q, k, k, None, 1.0, *options)
    c = dataclasses.replace(c, consumers=2, block_k=COLUMNS)
    places = given.get("lengths"), given.get("offsets")
    some, all_of = in_blocks(seen(**given), ROWS, COLUMNS)
    some, all_of = some[:, consumer::2], all_of[:, consumer::2]
    of_keys = functools.partial(key_blocks, consumer=consumer)
    found = visited(of_keys, some.shape[1], None, *places, c)
    check(found, some, all_of, 1, 0)
    some, all_of = in_blocks(seen(**given), COLUMNS, ROWS)
    some, all_of = (x.swapaxes(1, 2)[:, consumer::2] for x in (some, all_of))
    of_queries = functools.partial(
        query_blocks, keys=2 * ROWS, rows=COLUMNS, part=consumer
    )
    found = visited(of_queries, some.shape[1], None, *places, c)
    check(found, some, all_of, 0, 0)


@pytest.mark.parametrize("b, t, kv_heads", [(1, 16384, 8), (4, 4096, 8), (3, 1000, 3)])
def test_every_block_of_keys_is_taken_once(b, t, kv_heads):
    heads = 4 * kv_heads, kv_heads
    q, k = (jax.ShapeDtypeStruct((b, t, n, 128), jnp.bfloat16) for n in heads)
    c = problem(q, k, k, None, 1.0, True, None, None)
    blocks = -(-t // KEYS)
    programs = jnp.arange(b * kv_heads * blocks)
    taken = map(np.asarray, jax.vmap(lambda i: place_keys(i, c))(programs))
    assert len(set(zip(*taken, strict=True))) == len(programs)


@pytest.mark.parametrize(
    "t, window, head, member, turned",
    [
        (16384, None, 0, 0, False),
        (16384, None, 2, 1, True),
        (16384, None, 1, 1, False),
        (16384, 4096, 2, 1, False),
        (4096, None, 2, 1, False),
    ],
)
def test_heads_that_are_visited_from_their_last_queries(
    t, window, head, member, turned
):
    q, k = (jax.ShapeDtypeStruct((1, t, n, 128), jnp.bfloat16) for n in (32, 8))
    c = problem(q, k, k, None, 1.0, True, window, None)
    blocks = 2, 4, 9, 10
    order = [int(back_and_forth(n, head, member, blocks, c)) for n in range(2, 10)]
    assert order == ([2, 3, 8, 7, 6, 5, 4, 9] if turned else list(range(2, 10)))
