"""paged_attention is attention over the gathered pages, in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import attention, gather_pages, paged_attention
from jaxkern.testing.checks import bf16, case, f32


def given(x):
    return lambda rng: np.array(x, np.int32)


def shapes(b, t, n, page, k, g, h, spec=f32, hv=None):
    return dict(
        query=spec(b, t, k * g, h),
        key_pages=spec(n, page, k, h),
        value_pages=spec(n, page, k, h if hv is None else hv),
        scale=h**-0.5,
    )


CASES = [
    case(
        "plain",
        **shapes(2, 2, 3, 2, 2, 1, 2),
        block_tables=given([[2, 0], [1, -1]]),
        kv_lengths=given([3, 2]),
        causal=False,
    ),
    case(
        "decode_bf16",
        full=True,
        **shapes(2, 1, 3, 4, 1, 2, 4, spec=bf16),
        block_tables=given([[2, 0], [1, 7]]),
        kv_lengths=given([7, 0]),
        causal=False,
    ),
    case(
        "everything",
        **shapes(2, 3, 4, 2, 2, 2, 3, hv=2),
        block_tables=given([[3, 1, 0], [1, -1, 2]]),
        kv_lengths=given([5, 6]),
        q_offset=given([2, 3]),
        sinks=f32(4),
        window=4,
        softcap=2.0,
    ),
    case(
        "llama3_8b_decode",
        full=True,
        **shapes(2, 1, 24, 16, 8, 4, 128, spec=bf16),
        block_tables=lambda rng: rng.permutation(24).reshape(2, 12).astype(np.int32),
        kv_lengths=given([100, 192]),
        causal=False,
    ),
]

PAGES, PAGE = 7, 3
TABLES = np.array([[6, 2, 0, 4], [2, 5, 3, -1]])  # both read page 2
LENGTHS = np.array([11, 8])
OPTIONS = {
    "decode": (1, {}),
    "everything": (
        2,
        dict(window=9, softcap=1.0, sinks=jnp.array([0.5, 0, -1, 2]), scale=0.4),
    ),
    "first_tokens": (3, dict(q_offset=np.array([0, 4]))),
}


def draw(*shape, seed=0):
    x = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return jnp.asarray(x, jnp.float32)


def operands(t):
    pages = (PAGES, PAGE, 2)
    return draw(2, t, 4, 8), draw(*pages, 8, seed=1), draw(*pages, 5, seed=2)


def by_hand(query, key_pages, value_pages, t, q_offset=None, causal=True, **options):
    """One sequence at a time over the rows that it has, no lengths and no tables."""
    parts = []
    for b, length in enumerate(LENGTHS):
        table = [p for p in TABLES[b] if p >= 0]
        key, value = (
            jnp.concatenate([x[p] for p in table])[:length][None]
            for x in (key_pages, value_pages)
        )
        offset = int(length - t if q_offset is None else q_offset[b])
        parts.append(
            attention(
                query[b : b + 1],
                key,
                value,
                causal=causal,
                q_offset=offset,
                return_lse=True,
                **options,
            )
        )
    return tuple(jnp.concatenate(x) for x in zip(*parts, strict=True))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_pages_of_each_sequence_in_order(name):
    t, options = OPTIONS[name]
    qkv = operands(t)

    def paged(*qkv):
        return paged_attention(*qkv, TABLES, LENGTHS, return_lse=True, **options)

    def dense(*qkv):
        return by_hand(*qkv, t, **options)

    def both(f):
        def loss(*qkv):
            out = f(*qkv)
            return sum(jnp.sum(jnp.sin(x)) for x in out), out

        grad = jax.grad(loss, (0, 1, 2), has_aux=True)
        return jax.jit(grad)(*qkv)

    actual, expected = both(paged), both(dense)
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, e, atol=3e-6)
    (_, dkey, _), _ = expected
    assert dkey[2].any() and not dkey[1].any()  # page 2 is in both tables, 1 in none


def test_equals_attention_over_the_gathered_pages():
    q, k, v = operands(2)
    expected = attention(
        q,
        gather_pages(k, TABLES),
        gather_pages(v, TABLES),
        kv_lengths=LENGTHS,
        q_offset=LENGTHS - 2,
        causal=True,
    )
    out = jax.jit(paged_attention)(q, k, v, jnp.asarray(TABLES), jnp.asarray(LENGTHS))
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_a_hole_in_the_table_hides_its_positions():
    q, k, v = operands(1)
    hole = jnp.array([[6, 99, 0, 4], [-1, -1, -1, -1]])
    out, lse = paged_attention(q, k, v, hole, LENGTHS, return_lse=True)
    mask = jnp.arange(12) // PAGE != 1
    dense = [gather_pages(x, TABLES[:1]) for x in (k, v)]
    expected = attention(q[:1], *dense, mask=mask, kv_lengths=LENGTHS[:1])
    np.testing.assert_allclose(out[:1], expected, atol=1e-6)
    assert not out[1].any() and (lse[1] == -jnp.inf).all()


@pytest.mark.parametrize("length", [0, 12, 99])
def test_lengths_at_and_beyond_the_edges(length):
    """No token: zeros. More than there are pages: what there is."""
    q, k, v = operands(1)
    table, lengths = TABLES[:1], jnp.array([length])
    out = paged_attention(q[:1], k, v, table, lengths)
    dense = [gather_pages(x, table) for x in (k, v)]
    expected = jnp.zeros_like(out) if length == 0 else attention(q[:1], *dense)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_nan_in_free_pages_and_behind_the_lengths_has_no_influence():
    q, k, v = operands(2)
    rows = np.arange(12)
    used = np.zeros((PAGES, PAGE), bool)
    for table, length in zip(TABLES, LENGTHS, strict=True):
        at = (table[rows // PAGE] * PAGE + rows % PAGE)[:length]
        used[at // PAGE, at % PAGE] = True
    free = ~used[:, :, None, None]
    assert free.any()

    def grad(fill):
        kv = [jnp.where(free, fill, x) for x in (k, v)]
        loss = lambda *x: paged_attention(*x, TABLES, LENGTHS).sum()  # noqa: E731
        return loss(q, *kv), jax.grad(loss, (0, 1, 2))(q, *kv)

    jax.tree.map(np.testing.assert_array_equal, grad(jnp.nan), grad(0.0))


def test_gradients_of_a_shared_page_are_summed_in_float32():
    """300 sequences read one bfloat16 page: 300 times 1/4 is 75, not 64."""
    b = 300
    q = jnp.zeros((b, 1, 1, 2), jnp.bfloat16)
    pages = jnp.zeros((1, 4, 1, 2), jnp.bfloat16)
    tables, lengths = jnp.zeros((b, 1), jnp.int32), jnp.full(b, 4)
    grad = jax.grad(
        lambda v: paged_attention(q, pages, v, tables, lengths).sum().astype(float)
    )(pages)
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_array_equal(grad, jnp.full_like(grad, 75))


def test_every_error_says_what_to_do():
    q, k, v = operands(1)
    with pytest.raises(ValueError, match=r"paged_attention: window is 0"):
        paged_attention(q, k, v, TABLES, LENGTHS, window=0)
    with pytest.raises(ValueError, match=r"paged_attention: softcap is 0"):
        paged_attention(q, k, v, TABLES, LENGTHS, softcap=0.0)
    with pytest.raises(TypeError, match=r"paged_attention: `query` must have dims"):
        paged_attention(q[0], k, v, TABLES, LENGTHS)
    with pytest.raises(TypeError, match=r"paged_attention: dim `b` is 2 in `query`"):
        paged_attention(q, k, v, TABLES[:1], LENGTHS)
    with pytest.raises(TypeError, match=r"`block_tables` must have a dtype of kind"):
        paged_attention(q, k, v, TABLES.astype(float), LENGTHS)
