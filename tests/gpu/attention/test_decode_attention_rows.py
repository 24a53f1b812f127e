"""The decode kernel with any number of rows and wide heads, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import attention, backend, explain, paged_attention
from tests.gpu.attention.test_decode_attention import (
    OPTIONS,
    check,
    draw,
    qkv,
    with_lse,
    with_options,
)
from tests.gpu.truth import on_a_gpu

pytestmark = on_a_gpu
DTYPES = ["bfloat16", "float16", "float32"]


def in_pages(x, page, seed):
    """A pool of pages in another order, and the tables of its sequences."""
    b, s, k, h = x.shape
    pages = x.reshape(b * s // page, page, k, h)
    order = np.random.default_rng(seed).permutation(len(pages))
    tables = np.argsort(order).reshape(b, s // page)
    return pages[order], jnp.asarray(tables, jnp.int32)


def check_pages(query, key, value, page, lengths, **options):
    (keys, tables), (values, _) = (in_pages(x, page, 5) for x in (key, value))

    def f(query, keys, values, lengths):
        return paged_attention(
            query, keys, values, tables, lengths, return_lse=True, **options
        )

    check(f, query, keys, values, lengths)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("g", [1, 2, 4, 5, 7, 8, 12, 16, 32, 64, 71, 128])
@pytest.mark.parametrize("t", [1, 2, 3, 4, 5, 6, 7, 8])
def test_queries_and_groups(t, g, dtype):
    """Rows of one program, and of several; the keys in a row and by pages."""
    operands = qkv(2, t, 1024, 2, g, 64, dtype=dtype)
    lengths = jnp.array([1000, 333])

    def f(*operands):
        *operands, lengths = operands
        more = dict(kv_lengths=lengths, q_offset=lengths - t, causal=True)
        return attention(*operands, return_lse=True, **more)

    check(f, *operands, lengths)
    check_pages(*operands, 64, lengths)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "h, hv", [(320, 320), (384, 384), (512, 512), (512, 64), (272, 256), (64, 512)]
)
@pytest.mark.parametrize("b, t, s, g", [(2, 1, 3000, 8), (2, 8, 1000, 5)])
def test_wide_heads(b, t, s, g, h, hv, dtype):
    check(with_lse(causal=True), *qkv(b, t, s, 2, g, h, hv, dtype))


@pytest.mark.parametrize("b, s", [(24, 4096), (1, 30_000)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_heads_in_many_shares(b, s, dtype):
    check(with_lse(), *qkv(b, 1, s, 2, 8, 512, dtype=dtype))


@pytest.mark.parametrize("h, g", [(128, 16), (512, 8)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_of_many_rows(options, h, g, dtype):
    f, arrays = with_options(options, 2 * g)
    check(f, *qkv(4, 8, 1000, 2, g, h, dtype=dtype), arrays)


@pytest.mark.parametrize("page", [3, 16, 64, 256])
@pytest.mark.parametrize("t, g, h", [(8, 16, 128), (2, 8, 512)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_pages(t, g, h, page, dtype):
    operands = qkv(2, t, 768, 2, g, h, dtype=dtype)
    sinks = draw((2 * g,))
    check_pages(*operands, page, jnp.array([700, 80]), window=300, sinks=sinks)


@pytest.mark.parametrize("t, g", [(1, 4), (8, 16)])
def test_lse_far_below_zero(t, g):
    query, key, value = qkv(2, t, 1024, 2, g, 128)
    down = jnp.sign(query[:, :, ::g])  # no key is near any query
    key = -40 * jnp.abs(key) * down[:, :1]
    query = jnp.abs(query) * jnp.repeat(down[:, :1], g, 2)
    _, lse = check(with_lse(causal=True), query, key, value, slack=4.0)
    assert (lse < -88).all()


def test_second_derivatives():
    """The gradient is the reference's, from the log-sum-exp of the kernel."""
    query, key, value = qkv(2, 2, 300, 2, 3, 64, dtype="float32")

    def slope(query):
        out = attention(query, key, value, causal=True)
        return jnp.sum(jnp.sin(out))

    def twice(query):
        return jax.grad(lambda q: jnp.sum(jax.grad(slope)(q) ** 2))(query)

    with jax.default_matmul_precision("highest"):
        with backend("triton"):
            found = jax.jit(twice)(query)
        with backend("xla"):
            expected = jax.jit(twice)(query)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_explain_names_the_kernel():
    for dtype in DTYPES:
        with backend("triton"):  # "auto" leaves many rows of float32 to XLA
            [row] = explain(attention, *qkv(1, 8, 300, 1, 128, 64, dtype=dtype)).rows
        assert row.runs.startswith("triton: triton.attention.decode")
