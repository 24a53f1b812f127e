"""Every attention of the origin systems is a call of `attention`.

Each form is written from its own definition, in NumPy float64, heads before tokens as
there; `attention` has tokens before heads.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import attention, backend, make_mask, merge_partials


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def origin(q, k, v, see, scale, cap=None, bias=None):
    """(O, natural L) of `[Hq, qL, D]` queries over `[Hkv, kL, D]` keys."""
    group = len(q) // len(k)
    s = np.einsum("hqd,hkd->hqk", q, np.repeat(k, group, 0)) * scale
    s = s if cap is None else cap * np.tanh(s / cap)
    s = s if bias is None else s + bias
    p = np.where(see, np.exp(s), 0)
    total = p.sum(-1, keepdims=True)
    out = p @ np.repeat(v, group, 0) / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        return out, np.log(total[..., 0])


def heads_last(x):
    """`[H, T, D]` as `[1, T, H, D]`."""
    return jnp.asarray(x, jnp.float32).swapaxes(0, 1)[None]


def call(q, k, v, **options):
    out, lse = attention(*map(heads_last, (q, k, v)), return_lse=True, **options)
    return out[0].swapaxes(0, 1), lse[0].T


def near(actual, expected, atol=3e-6):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, atol=atol), actual, expected
    )


T, S, CAPACITY = 5, 9, 12
Q, K, V = draw(4, T, 8), draw(2, CAPACITY, 8, seed=1), draw(2, CAPACITY, 8, seed=2)
ABSOLUTE = np.arange(T)[:, None] + S - T  # position of each query: bottom right, D21
J = np.arange(CAPACITY)
IN_CACHE = J < S


def test_sdpa_over_a_cache_with_capacity():
    """k <= kv_len - qL + i, rows of the cache behind kv_len unread."""
    expected = origin(Q, K, V, (ABSOLUTE >= J) & IN_CACHE, scale=1.0)
    length = jnp.array([S])
    options = dict(scale=1.0, causal=True, kv_lengths=length, q_offset=length - T)
    near(call(Q, K, V, **options), expected)
    # the default is the same alignment where the cache is full
    near(call(Q, K[:, :S], V[:, :S], scale=1.0, causal=True), expected)


@pytest.mark.parametrize("window_size", [0, 2, 20])
def test_sdpa_sliding_has_one_key_more(window_size):
    """D6: it shows abs - W <= k <= abs, so W + 1 keys; flash_attn_vec shows W."""
    behind = ABSOLUTE - J
    see = (behind >= 0) & (behind <= window_size) & IN_CACHE
    length = jnp.array([S])
    options = dict(causal=True, kv_lengths=length, q_offset=S - T)
    expected = origin(Q, K, V, see, 8**-0.5)
    near(call(Q, K, V, window=window_size + 1, **options), expected)
    if window_size == 2:
        (out, _), wrong = call(Q, K, V, window=window_size, **options), expected[0]
        assert np.abs(out - wrong).max() > 1e-2


@pytest.mark.parametrize("length", [1, 4, 9, 12])
def test_sdpa_decode(length):
    """One query, all kv_len keys, the length traced."""
    see = (length > J)[None]
    expected = origin(Q[:, :1], K, V, see, 0.3)
    decode = jax.jit(lambda n: call(Q[:, :1], K, V, scale=0.3, kv_lengths=n))
    near(decode(jnp.array([length])), expected)


@pytest.mark.parametrize("mask_type", ["none", "causal", "sliding"])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_flash_attn_vec(mask_type, cap):
    """The decode kernels, with the softcap that they take and never apply: D20."""
    length, window = 9, 4
    see = J < length
    if mask_type == "sliding":  # W keys
        see = see & (length - 1 - J < window)
    expected = origin(Q[:, :1], K, V, see[None], 8**-0.5, cap=cap)
    options = {
        "none": {},
        "causal": dict(causal=True, q_offset=length - 1),
        "sliding": dict(causal=True, q_offset=length - 1, window=window),
    }[mask_type]
    lengths = jnp.array([length])
    near(call(Q[:, :1], K, V, softcap=cap, kv_lengths=lengths, **options), expected)
    if cap is not None:
        plain, _ = origin(Q[:, :1], K, V, see[None], 8**-0.5)
        assert np.abs(plain - expected[0]).max() > 1e-3


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_split_decode(parts):
    """flash_attn_vec's workgroups: the result does not depend on their number."""
    size = CAPACITY // parts
    one = [
        call(
            Q[:, :1],
            K[:, i : i + size],
            V[:, i : i + size],
            kv_lengths=jnp.array([S - i]),  # may be negative: a part without a key
        )
        for i in range(0, CAPACITY, size)
    ]
    out, lse = merge_partials(*(jnp.stack(x) for x in zip(*one, strict=True)))
    near((out, lse), origin(Q[:, :1], K, V, IN_CACHE[None], 8**-0.5))


@pytest.mark.parametrize("ql_off", [0, 3, 7])
@pytest.mark.parametrize("additive", [False, True])
def test_flash_attn_prefill(ql_off, additive):
    """Causal from `ql_off` (D21), with a mask: bool, True to attend, or additive."""
    see = (np.arange(T)[:, None] + ql_off >= J)[:, :S]
    mask = draw(T, S) > -0.5
    bias = np.where(mask, draw(T, S, seed=1), -np.inf) if additive else None
    expected = origin(Q, K[:, :S], V[:, :S], see & mask, 8**-0.5, bias=bias)
    given = (
        dict(bias=jnp.asarray(bias, jnp.float32))
        if additive
        else dict(mask=jnp.asarray(mask))
    )
    out = call(Q, K[:, :S], V[:, :S], causal=True, q_offset=ql_off, **given)
    near(out, expected)


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.bfloat16])
def test_flash_attn_prefill_mask(dtype):
    """Its mask has the positions of the options, a window of W keys."""
    options = dict(causal=True, window=3, q_offset=2)
    mask = make_mask(T, S, dtype=dtype, **options)
    given = dict(mask=mask) if dtype == jnp.bool_ else dict(bias=mask)
    k, v = K[:, :S], V[:, :S]
    with backend("xla"):  # a kernel that takes no masks rounds otherwise
        near(call(Q, k, v, **given), call(Q, k, v, **options), 0)


def test_flash_attn_prefill_of_head_dim_512():
    q, k, v = draw(2, 2, 512), draw(1, 3, 512, seed=1), draw(1, 3, 512, seed=2)
    see = np.arange(2)[:, None] + 1 >= np.arange(3)
    near(call(q, k, v, causal=True), origin(q, k, v, see, 512**-0.5), 1e-5)


def test_flash_attn_train():
    """Top left, natural L, and the three gradients with dK and dV summed by group."""
    k, v = K[:, :T], V[:, :T]
    see = np.tri(T, dtype=bool)
    out, lse = origin(Q, k, v, see, 8**-0.5)
    near(call(Q, k, v, causal=True, q_offset=0), (out, lse))
    near(call(Q, k, v, causal=True), (out, lse))  # both ends meet where t = s
    dout = draw(*out.shape, seed=3)
    s = np.einsum("hqd,hkd->hqk", Q, np.repeat(k, 2, 0)) * 8**-0.5
    p = np.where(see, np.exp(s - lse[..., None]), 0)
    dp = dout @ np.repeat(v, 2, 0).swapaxes(1, 2)
    ds = p * (dp - (dout * out).sum(-1, keepdims=True)) * 8**-0.5
    expected = (
        ds @ np.repeat(k, 2, 0),
        (ds.swapaxes(1, 2) @ Q).reshape(2, 2, T, 8).sum(1),
        (p.swapaxes(1, 2) @ dout).reshape(2, 2, T, 8).sum(1),
    )
    operands = tuple(jnp.asarray(x, jnp.float32) for x in (Q, k, v))
    _, vjp = jax.vjp(lambda *qkv: call(*qkv, causal=True, q_offset=0)[0], *operands)
    near(vjp(jnp.asarray(dout, jnp.float32)), expected)


def test_flash_attn_vec_hybrid():
    """Keys and values of different dtypes, as a mixed cache holds them."""
    q, k, v = heads_last(Q[:, :1]), heads_last(K), heads_last(V)
    k16, v16 = k.astype(jnp.float16), v.astype(jnp.bfloat16)
    lengths = jnp.array([S])
    expected = attention(
        q, k16.astype(jnp.float32), v16.astype(jnp.float32), kv_lengths=lengths
    )

    def f(q, k, v):
        return attention(q, k, v, kv_lengths=lengths)

    out, vjp = jax.vjp(f, q, k16, v16)
    near(out, expected, 1e-6)
    dtypes = [g.dtype for g in vjp(out)]
    assert dtypes == [jnp.float32, jnp.float16, jnp.bfloat16]


def test_a_row_that_sees_nothing_among_rows_that_do():
    """D22: zeros, L = -inf, zero gradients, with sinks and a softcap too."""
    q, k, v = heads_last(Q), heads_last(K), heads_last(V)
    options = dict(causal=True, q_offset=-2, softcap=2.0)  # rows 0 and 1 see nothing

    def loss(q, sinks=None):
        out, lse = attention(q, k, v, sinks=sinks, return_lse=True, **options)
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0))

    out, lse = attention(q, k, v, return_lse=True, **options)
    assert not out[:, :2].any() and (lse[:, :2] == -jnp.inf).all()
    assert np.isfinite(lse[:, 2:]).all()
    dq = jax.grad(loss)(q)
    assert not dq[:, :2].any() and dq[:, 2:].any() and np.isfinite(dq).all()
    dq, dsinks = jax.grad(loss, (0, 1))(q, jnp.zeros(4))
    assert not dq[:, :2].any() and np.isfinite(dsinks).all()


def test_sinks_and_segments_in_decode():
    """gpt-oss: the sink takes weight; a packed cache shows one segment."""
    ids = np.array([0] * 4 + [1] * 8)
    see = ((ids == 1) & IN_CACHE)[None]
    sinks = draw(4, seed=5)
    out, lse = origin(Q[:, :1], K, V, see, 8**-0.5)
    with_sink = np.logaddexp(lse, sinks[:, None])
    expected = out * np.exp(lse - with_sink)[..., None], with_sink
    options = dict(
        sinks=jnp.asarray(sinks, jnp.float32),
        segment_ids=(jnp.array([[1]]), jnp.asarray(ids)[None]),
        kv_lengths=jnp.array([S]),
    )
    near(call(Q[:, :1], K, V, **options), expected)


@pytest.mark.parametrize("junk, softcap", [(jnp.nan, 2.0), (-jnp.inf, None)])
def test_what_lies_behind_the_lengths_has_no_influence(junk, softcap):
    """0 * NaN: values, both modes of differentiation, and the order of the two."""
    q, k, v = (jnp.concatenate([heads_last(x)] * 2) for x in (Q[:, :2], K, V))
    lengths = jnp.array([S, 0])
    behind = (J >= lengths[:, None])[:, :, None, None]
    dirty = [jnp.where(behind, junk, x) for x in (k, v)]
    options = dict(
        kv_lengths=lengths, q_offset=lengths - 2, causal=True, softcap=softcap
    )

    def f(q, k, v):
        out, lse = attention(q, k, v, return_lse=True, **options)
        return out, jnp.where(jnp.isfinite(lse), lse, 0)

    def loss(q, k, v):
        out, lse = f(q, k, v)
        return jnp.sum(jnp.sin(out)) + jnp.sum(lse**2)

    grad = jax.grad(loss, (0, 1, 2))

    @jax.jit
    def every(q, k, v):
        tangents = (q, jnp.ones_like(k), jnp.ones_like(v))
        at = (q, k, v)
        return f(*at), grad(*at), jax.jvp(f, at, tangents), jax.jvp(grad, at, tangents)

    clean, same = every(q, *(jnp.where(behind, 0, x) for x in (k, v))), every(q, *dirty)
    jax.tree.map(np.testing.assert_array_equal, same, clean)


def test_without_lengths_nothing_is_masked():
    """The values go into the product as they are."""
    q, k, v = heads_last(Q), heads_last(K), heads_last(V)

    def selects(**options):
        with backend("xla"):
            f = jax.jit(lambda *qkv: attention(*qkv, **options)).trace(q, k, v)
        rows = rf"stablehlo.select .*tensor<1x{CAPACITY}x2x8xf32>"
        return len(re.findall(rows, f.lower().as_text()))

    assert selects() == selects(mask=jnp.ones(CAPACITY, bool)) == 0
    assert selects(kv_lengths=3) == 1
