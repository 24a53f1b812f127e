"""The kernel of qk_norm_rope_cache: its launch, and its rows in the interpreter."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    Float8Codec,
    IntCodec,
    NormRope,
    QuantizedVectors,
    TurboQuantCodec,
    explain,
    head_norm_rope,
    qk_norm_rope,
    qk_norm_rope_cache,
)
from jaxkern.gpu import triton_call as bridge
from jaxkern.primitives.kv_cache.qk_norm_rope_cache import (
    qk_norm_rope_cache_p,
    qk_norm_rope_quantized_cache_p,
)
from jaxkern.primitives.kv_cache.qk_norm_rope_paged_cache import (
    qk_norm_rope_paged_cache_p,
)
from jaxkern.primitives.turboquant.vector_codec import planes, unpack
from jaxkern.triton.kv_cache import qk_norm_rope_cache as kernel
from jaxkern.triton.kv_cache.qk_norm_rope_paged_cache import qk_norm_rope_paged_cache
from tests.triton.interpreted import (
    INTERPRETED,
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

INT4, OWN = IntCodec(4, group=16), tuple(i - 7.5 for i in range(16))
CODECS = [  # of keys, of values, of 80 dims where no rotation needs a power of two
    (IntCodec(8), INT4),
    (Float8Codec(), Float8Codec(group=8)),
    (IntCodec(3), IntCodec(5)),
    (TurboQuantCodec(4), TurboQuantCodec(8, group=16)),
    (TurboQuantCodec(3), TurboQuantCodec(7)),
    (TurboQuantCodec(2, seed=3), TurboQuantCodec(4, codebook=OWN)),
    (TurboQuantCodec(2.25), TurboQuantCodec(1)),
]
PLACES = [  # positions and new_lengths of 2 x 5 tokens for 4 slots, ring
    ([-2, 3], None, False),
    ([0, 1], [5, -1], False),
    ([2, -9], [5, 3], True),
]
HEADS = [  # n, k, h, hv, pairs, options
    (4, 2, 16, 8, 8, {}),
    (5, 5, 13, 7, 5, {"offset": 1.0}),
    (6, 3, 24, 32, 5, {"pairing": "interleaved"}),
    (2, 1, 32, 16, 6, {"pair_offset": 16, "eps": None}),
    (2, 1, 8, 24, 4, {"value_eps": 0.5}),
]


@pytest.mark.full
@starts_it
@pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
def test_in_a_process_of_its_own():
    check_in_its_own_process(__file__)


@pytest.mark.skipif(INTERPRETED or bridge.missing() is not None, reason="no compiler")
def test_it_is_one_launch_in_place():
    new, options = draw(2, 1, 4, 2, 16, 16, 8)
    del options["pair_offset"]
    new = *new[:3], tuple(new[3:5]), tuple(new[5:])
    operands = *new, cache(2, 4, 2, 16), cache(2, 4, 2, 16), jnp.array([1, 2])
    write = functools.partial(qk_norm_rope_cache, norm_rope=NormRope(**options))
    [row] = explain(write, *operands, platform="cuda").rows
    assert len(row.launches) == 1
    text = jax.jit(write).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    for result, operand in ((1, 7), (2, 8)):
        pair = rf"output_tuple_indices = \[{result}\], operand_index = {operand}"
        assert re.search(pair, text)
    by_sequence = jax.vmap(write, [0, *[None] * 7])
    stacked = jnp.stack([operands[0]] * 2)
    for f, query in ((write, operands[0]), (by_sequence, stacked)):
        [row] = explain(f, query, *operands[1:], platform="cuda").rows
        assert row.runs.startswith("triton")


def draw(b, t, n, k, h, hv, pairs, eps=1e-6, **options):
    """The operands without a cache, and all options of the launchers."""
    rng = np.random.default_rng(0)
    shapes = (b, t, n, h), (b, t, k, h), (b, t, k, hv), (h,), (h,)
    new = [jnp.float32(rng.standard_normal(s)) for s in shapes]
    if eps is None:
        new[3:] = None, None
    tables = [jnp.float32(rng.standard_normal((b, t, pairs))) for _ in range(2)]
    rest = dict(eps=eps, offset=0.0, pairing="neox", pair_offset=pairs)
    rest |= dict(at_end=False, value_eps=None) | options
    return [*new, *tables], rest


@pytest.mark.skipif(INTERPRETED or bridge.missing() is not None, reason="no compiler")
def test_rotations_at_the_end_of_a_head_are_refused_in_words():
    """No kernel here knows them: the reference runs, and the reason is shown."""
    new, _ = draw(2, 1, 4, 2, 16, 16, 4)
    query, key, value, *weights, cos, sin = new
    caches = cache(2, 4, 2, 16), cache(2, 4, 2, 16), jnp.array([1, 2])

    def every(query, key, value, weights, cos, sin):
        at_end = dict(at_end=True)
        return (
            head_norm_rope(query, weights[0], cos, sin, **at_end),
            qk_norm_rope(query, key, *weights, cos, sin, **at_end),
            qk_norm_rope_cache(
                *(query, key, value, weights, (cos, sin), *caches),
                norm_rope=NormRope(**at_end),
            ),
        )

    rows = explain(every, query, key, value, weights, cos, sin, platform="cuda").rows
    assert len(rows) == 3
    for row in rows:
        assert row.runs.startswith("xla"), row
        assert "`at_end`: the kernel turns the first dims" in " ".join(row.refused)


def cache(*shape):
    return jnp.float32(np.random.default_rng(1).standard_normal(shape))


def check(of_kernel, of_meaning, *operands, **options):
    """Where the results lie in the caches, and where XLA gave them other memory."""
    expected = of_meaning(*operands, **options)
    for in_place in (True, False):
        with interpreted(in_place):
            found = of_kernel(*operands, **options)
        for y, e in zip(found, expected, strict=True):
            assert y.dtype == e.dtype
            np.testing.assert_allclose(y, e, atol=3e-6)


@alone
@pytest.mark.parametrize("n, k, h, hv, pairs, options", HEADS)
@pytest.mark.parametrize("positions, lengths, ring", PLACES)
def test_heads_and_places(n, k, h, hv, pairs, options, positions, lengths, ring):
    new, options = draw(2, 5, n, k, h, hv, pairs, **options)
    slots = jnp.array(positions), None if lengths is None else jnp.array(lengths)
    check(
        kernel.qk_norm_rope_cache,
        qk_norm_rope_cache_p.reference,
        *(*new, cache(2, 4, k, h), cache(2, 4, k, hv), *slots),
        **options,
        ring=ring,
    )


@alone
def test_pages():
    new, options = draw(2, 5, 4, 2, 16, 8, 8)
    slots = jnp.array([[3, 11, -1, 12, 0], [7, 2, 99, 5, 4]])
    del options["value_eps"]  # pages have none
    check(
        qk_norm_rope_paged_cache,
        qk_norm_rope_paged_cache_p.reference,
        *(*new, cache(3, 4, 2, 16), cache(3, 4, 2, 8), slots),
        **options,
    )


@alone
def test_under_vmap():
    """One sequence of launches, whose results lie in the stacked caches."""
    new, options = draw(3, 4, 4, 2, 64, 64, 32)
    caches = cache(3, 6, 2, 64), cache(3, 6, 2, 64)
    operands = [*new, *caches, jnp.array([0, 1, 5]), jnp.array([4, 0, 9])]
    axes = [0 if i in (0, 7, 9) else None for i in range(len(operands))]
    operands = [
        x if a is None else jnp.stack([x, jnp.roll(x, 1, 0)])
        for x, a in zip(operands, axes, strict=True)
    ]

    def over(f):
        return jax.vmap(functools.partial(f, ring=False, **options), axes)

    of_kernel = over(kernel.qk_norm_rope_cache)
    check(of_kernel, over(qk_norm_rope_cache_p.reference), *operands)


@alone
@pytest.mark.parametrize("codecs", CODECS, ids=str)
@pytest.mark.parametrize("positions, lengths, ring", PLACES)
def test_codes(codecs, positions, lengths, ring):
    d = 32 if isinstance(codecs[0], TurboQuantCodec) else 80
    new, options = draw(2, 5, 2, 1, d, d, d // 4)
    caches = [QuantizedVectors.zeros((2, 4, 1, d), codec) for codec in codecs]
    leaves = [jnp.full_like(x, 7) for x in jax.tree.leaves(caches)]
    slots = jnp.array(positions), None if lengths is None else jnp.array(lengths)

    def unpacked(f, *operands, **options):
        y, *parts = f(*operands, **options)
        for i, codec in ((0, codecs[0]), (2, codecs[1])):
            parts[i] = unpack(parts[i], planes(codec, d), d)
        return y, *parts

    check(
        functools.partial(unpacked, kernel.qk_norm_rope_quantized_cache),
        functools.partial(unpacked, qk_norm_rope_quantized_cache_p.reference),
        *(*new, *leaves, *slots),
        **options,
        ring=ring,
        key_codec=codecs[0],
        value_codec=codecs[1],
    )
