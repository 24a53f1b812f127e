"""The rows of decode attention without a GPU: refusals, shares, vmap, shared memory."""

import jax
import jax.numpy as jnp
import pytest

from jaxkern import attention, backend, explain, paged_attention
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.triton.attention.decode.decode_sizes import num_splits

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)


def qkv(b, t, s, k, g, h, dtype=jnp.bfloat16, hv=None):
    return (
        jnp.zeros((b, t, k * g, h), dtype),
        jnp.zeros((b, s, k, h), dtype),
        jnp.zeros((b, s, k, hv or h), dtype),
    )


def launches_of(f, *args):
    [row] = explain(f, *args, platform="cuda").rows
    return row.launches


@pytest.mark.parametrize(
    "shape, options, reason",
    [
        ((1, 9, 20, 1, 1, 16), {}, "9 queries, more than 8"),
        ((1, 1, 20, 1, 1, 576), {}, "head dims 576 and 576, more than 512"),
        ((1, 1, 0, 1, 1, 16), {}, "`key` is empty"),
        ((1, 1, 4, 1, 1, 16), {"mask": jnp.ones((1, 4), bool)}, "`mask` is not in"),
    ],
)
def test_refusals_in_words(shape, options, reason):
    text = str(
        explain(lambda *x: attention(*x, **options), *qkv(*shape), platform="cuda")
    )
    assert reason in text and "decode_attention_kernel" not in text


def test_shares_fill_the_device_once_and_short_caches_are_not_cut():
    sizes = {"BLOCK": 64, "PER_SM": 2}
    stage = 64 * 512
    assert num_splits(8, 32, 128, stage, False, sizes) == 1
    assert 100 <= 8 * num_splits(8, 32, 4096, stage, False, sizes) <= 264
    assert 200 <= 8 * num_splits(8, 32, 65536, stage, False, sizes) <= 264
    assert num_splits(256, 1024, 4096, stage, False, sizes) == 1
    assert 256 * num_splits(256, 1024, 4096, stage, True, sizes) >= 2 * 264
    few, many = (num_splits(128, n, 4096, stage, False, sizes) for n in (512, 65536))
    assert few == 2 and many == 1  # to merge so many rows costs more


def test_one_share_is_one_launch_and_a_vmap_of_sequences_no_more():
    short, long = qkv(1, 1, 64, 2, 4, 64), qkv(1, 1, 4096, 2, 4, 64)
    assert len(launches_of(attention, *short)) == 1
    assert len(launches_of(attention, *long)) == 2
    stacked = [jnp.stack([x] * 5) for x in short]
    [launch] = launches_of(jax.vmap(attention), *stacked)
    assert launch.grid == (10,)


@pytest.mark.parametrize(
    "t, g, h, dtype, tiles",
    [
        (8, 16, 128, jnp.bfloat16, 1),
        (8, 17, 128, jnp.bfloat16, 2),
        (8, 9, 512, jnp.bfloat16, 2),
        (8, 9, 512, jnp.float32, 5),
    ],
)
def test_more_rows_than_a_program_holds_are_cut(t, g, h, dtype, tiles):
    [launch] = launches_of(attention, *qkv(1, t, 16, 2, g, h, dtype))
    assert launch.grid == (2 * tiles,)


def test_float32_of_more_rows_than_xla_is_slower_at_is_left_to_it():
    def by(t, g, h, **options):
        f = lambda *x: attention(*x, **options)  # noqa: E731
        with backend("auto"):
            return str(explain(f, *qkv(1, t, 99, 2, g, h, "float32"), platform="cuda"))

    for rows in ((8, 8, 128), (8, 16, 64), (8, 2, 256), (8, 2, 512)):
        assert "runs triton" in by(*rows)
    for rows in ((8, 9, 128), (8, 17, 64), (8, 3, 256), (8, 3, 512)):
        assert "XLA is faster, 8 queries of" in by(*rows)
        assert "runs triton" in by(*rows, kv_lengths=jnp.array([7]))


def test_sequences_of_about_one_length_have_fewer_shares():
    lengths = jnp.zeros(34, jnp.int32)
    with_lengths = lambda *x: attention(*x, kv_lengths=lengths)  # noqa: E731
    cut, _ = launches_of(with_lengths, *qkv(34, 1, 4096, 1, 4, 128))
    shares = dict(cut.constants)
    assert 1 < shares["ALIKE"] < shares["SPLITS"]
    assert cut.grid == (34 * shares["SPLITS"],)
    far = jax.eval_shape(lambda: qkv(34, 1, 65536, 1, 4, 128))
    long, _ = launches_of(with_lengths, *far)
    assert dict(long.constants)["ALIKE"] == dict(long.constants)["SPLITS"]


# 8.9 has the least shared memory
@pytest.mark.parametrize(
    "capability",
    [*(pytest.param(c, marks=pytest.mark.full) for c in (80, 90)), 89],
)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 8, 1500, 2, 8, 256),
        (2, 8, 1500, 2, 8, 512),
        (2, 8, 1500, 2, 8, 512, jnp.float32),
        (2, 3, 1000, 2, 3, 256, jnp.float32),
        pytest.param((2, 3, 1000, 2, 3, 80, jnp.bfloat16, 37), marks=pytest.mark.full),
        pytest.param((2, 4, 1000, 2, 8, 64, jnp.float32), marks=pytest.mark.full),
    ],
)
def test_the_largest_tiles_fit(shape, capability):
    with compiling_for(capability):
        for launch in launches_of(attention, *qkv(*shape)):
            assert launch.shared_bytes <= bridge.max_shared_bytes(), launch.describe()


@pytest.mark.parametrize("page", [16, 256])
def test_blocks_of_pages_are_in_flight_too(page):
    query, pages, _ = qkv(4, 1, page, 8, 4, 128)
    pages = jnp.zeros((10, *pages.shape[1:]), pages.dtype)
    tables = jnp.zeros((4, 2048 // page), jnp.int32)
    lengths = jnp.array([3, 900, 1, 2048])
    with compiling_for(90):
        launch, _ = launches_of(paged_attention, query, pages, pages, tables, lengths)
        assert launch.shared_bytes > 90_000  # three blocks of 32 KB


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 86, 90])
@pytest.mark.parametrize("b", [1, 16])
@pytest.mark.parametrize("g, h", [(8, 64), (16, 128), (16, 256), (8, 512)])
def test_tiles_over_small_pages_fit(g, h, b, capability):
    query, pages, _ = qkv(b, 8, 3, 8, g, h)
    pages = jnp.zeros((10, *pages.shape[1:]), pages.dtype)
    tables, lengths = jnp.zeros((b, 5000), jnp.int32), jnp.ones(b, jnp.int32)
    with compiling_for(capability):
        launch, *_ = launches_of(paged_attention, query, pages, pages, tables, lengths)
        assert launch.shared_bytes <= bridge.max_shared_bytes(), launch.describe()
