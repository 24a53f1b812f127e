"""The Hopper decode kernel on a GPU against the reference in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import attention, backend
from tests.gpu.attention.test_decode_attention import check, qkv, with_lse
from tests.gpu.truth import on_hopper, relative_error

pytestmark = on_hopper
hopper = functools.partial(check, by="mosaic_gpu")


def lengths_of(kind: str, b: int, s: int) -> jax.Array | None:
    rng = np.random.default_rng(0)
    if kind == "none":
        return None
    lengths = rng.integers(s - s // 8, s + 1, b)
    if kind == "uneven":
        lengths = rng.integers(-s // 8, s + s // 8, b)
    elif kind == "one long":
        lengths = np.minimum(lengths, s // 16)
        lengths[b // 2] = s
    return jnp.asarray(lengths, jnp.int32)


def with_lengths(query, key, value, lengths):
    return with_lse(kv_lengths=lengths)(query, key, value)


KINDS = ["none", "alike", "uneven", "one long"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "b, s, k, g, h",
    [
        (32, 1000, 8, 4, 128),
        (8, 3008, 8, 4, 128),
        (33, 520, 8, 8, 64),
        (16, 1016, 8, 2, 256),
        (128, 128, 8, 1, 128),
        (2, 4096, 8, 4, 128),
        (1, 4096, 8, 4, 128),
    ],
)
def test_lengths(b, s, k, g, h, kind):
    hopper(with_lengths, *qkv(b, 1, s, k, g, h), lengths_of(kind, b, s))


@pytest.mark.parametrize("kind", KINDS)
def test_causal_in_float16(kind):
    b, s = 32, 1000
    offset = jnp.asarray(np.random.default_rng(1).integers(-9, s + 99, b), jnp.int32)

    def f(query, key, value, lengths, offset):
        masked = with_lse(kv_lengths=lengths, q_offset=offset, causal=True, scale=-0.2)
        return masked(query, key, value)

    arrays = qkv(b, 1, s, 8, 4, 128, dtype="float16")
    hopper(f, *arrays, lengths_of(kind, b, s), offset)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_nan_behind_the_lengths_has_no_influence(kind):
    b, s = 32, 1000
    query, key, value = qkv(b, 1, s, 8, 4, 128)
    lengths = jnp.asarray(lengths_of(kind, b, s))
    behind = (jnp.arange(s) >= lengths[:, None])[:, :, None, None]
    with backend("mosaic_gpu", strict=True):
        f = jax.jit(lambda k, v: attention(query, k, v, kv_lengths=lengths))
        clean = f(key, value)
        dirty = f(jnp.where(behind, jnp.nan, key), jnp.where(behind, jnp.nan, value))
    np.testing.assert_array_equal(clean, dirty)
    assert np.isfinite(np.asarray(dirty, np.float32)).all()


def test_lengths_may_change_between_replays():
    b, s = 32, 2048
    query, key, value = qkv(b, 1, s, 8, 4, 128)
    lengths = [lengths_of(kind, b, s) for kind in KINDS[1:]] * 3

    @jax.jit
    def every(lengths):
        return [attention(query, key, value, kv_lengths=n) for n in lengths]

    with backend("mosaic_gpu", strict=True):
        first, reverse = every(lengths), every(lengths[::-1])
    for y, other in zip(first, reverse[::-1], strict=True):
        np.testing.assert_array_equal(y, other)
    with backend("triton", strict=True):
        for y, e in zip(first, every(lengths), strict=True):
            assert relative_error(y, e) < 4e-3
