"""attention: the formula, visibility, rows without keys, lse, blocks, errors."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import attention, backend, block_mask, make_block_mask, make_mask
from jaxkern.primitives.attention import query_blocks
from jaxkern.primitives.attention.attend import tail_of, with_tail
from jaxkern.primitives.attention.attention import attention_p
from jaxkern.testing.checks import (
    bf16,
    boolean,
    bound,
    case,
    f16,
    f32,
    gradients,
    i32,
    in_float64,
    operands_of,
)
from jaxkern.testing.interpreter import evaluated
from tests.primitives.attention.one_key import (
    LIMIT,
    check_first_key,
    check_sink,
    first_wins,
    slopes_of,
)
from tests.primitives.attention.one_key import draw as draw_one_key


def shapes(b, t, s, k, g, h, spec=f32, hv=None):
    """Operands and the usual scale of one attention."""
    return dict(
        query=spec(b, t, k * g, h),
        key=spec(b, s, k, h),
        value=spec(b, s, k, h if hv is None else hv),
        scale=h**-0.5,
    )


def lengths(*values):
    return lambda rng: np.array(values, np.int32)


CASES = [
    case("plain", **shapes(1, 3, 4, 1, 2, 4), causal=True),
    case("one_of_each", **shapes(1, 1, 1, 1, 1, 1)),
    case(
        "everything",
        **shapes(2, 3, 5, 2, 2, 3, hv=2),
        bias=f32(1, 4, 1, 5),
        mask=boolean(2, 1, 3, 5, probability=0.8),
        q_segment_ids=i32(2, 3, high=2),
        kv_segment_ids=i32(2, 5, high=2),
        kv_lengths=lengths(5, 3),
        q_offset=lengths(2, 1),
        sinks=f32(4),
        causal=True,
        window=3,
        softcap=2.0,
    ),
    case("some_rows_see_nothing", **shapes(2, 4, 8, 2, 1, 8), kv_lengths=lengths(8, 0)),
    case("sharded", **shapes(8, 8, 8, 8, 1, 8), sinks=f32(8), causal=True, softcap=3.0),
    case("odd", **shapes(1, 37, 41, 3, 3, 5), causal=True, window=7),
    case("bias", **shapes(2, 8, 8, 2, 2, 8), bias=f32(2, 4, 8, 8)),
    case("no_queries", **shapes(2, 0, 4, 2, 2, 8), causal=True),
    case("no_keys", **shapes(2, 4, 0, 2, 2, 8), causal=True),
    case("no_sequences", **shapes(0, 4, 4, 2, 2, 8)),
    case("llama3_8b", **shapes(1, 64, 64, 8, 4, 128, bf16), causal=True),
    case(
        "llama3_8b_decode",
        **shapes(2, 1, 256, 8, 4, 128, bf16),
        kv_lengths=lengths(9, 256),
    ),
    case("qwen3_4b", **shapes(1, 32, 32, 8, 4, 128, bf16), causal=True),
    case(
        "gemma2_9b",
        **shapes(1, 48, 48, 8, 2, 256, bf16),
        causal=True,
        window=16,
        softcap=50.0,
    ),
    case("smollm2_135m", **shapes(1, 128, 128, 3, 3, 64), causal=True),
    case(
        "smollm2_135m_decode",
        **shapes(3, 1, 512, 3, 3, 64),
        kv_lengths=lengths(1, 100, 512),
    ),
    case(
        "gpt_oss_20b",
        **shapes(1, 64, 64, 8, 8, 64, f16),
        sinks=f32(64),
        causal=True,
        window=32,
    ),
    case(
        "llama3_8b_prefill",
        full=True,
        **shapes(1, 512, 2048, 8, 4, 128, bf16),
        causal=True,
    ),
]


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def formula(
    query, key, value, *, see=None, bias=None, sinks=None, scale=None, softcap=None
):
    """(out, lse) in float64, one query and head at a time; `see(b, n, i, j)` or not."""
    b, t, n, h = query.shape
    s, k = key.shape[1:3]
    out, lse = np.zeros((b, t, n, value.shape[-1])), np.full((b, t, n), -np.inf)
    for at in itertools.product(range(b), range(t), range(n)):
        bi, i, ni = at
        kv = ni // (n // k)
        keys = [j for j in range(s) if see is None or see(bi, ni, i, j)]
        logits = key[bi, keys, kv] @ query[at] * (h**-0.5 if scale is None else scale)
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        if bias is not None:
            logits = logits + np.broadcast_to(bias, (b, n, t, s))[bi, ni, i, keys]
        total = np.exp(logits).sum() + (0 if sinks is None else np.exp(sinks[ni]))
        if total > 0:
            out[at] = np.exp(logits) @ value[bi, keys, kv] / total
            lse[at] = np.log(total)
    return out, lse


MASK = draw(2, 4, 5, 7) > 0
IDS = np.array([[0, 0, 1, 1, 1], [0, 1, 1, 2, 3]])
KV_IDS = np.array([[0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 2, 2]])
OPTIONS = {  # options of attention, and which keys they show by the words of the docs
    "all": ({}, None),
    "causal_bottom_right": (dict(causal=True), lambda b, n, i, j: j <= i + 2),
    "causal_top_left": (dict(causal=True, q_offset=0), lambda b, n, i, j: j <= i),
    "causal_per_sequence": (
        dict(causal=True, q_offset=np.array([1, -3])),
        lambda b, n, i, j: j <= i + (1, -3)[b],
    ),
    "window": (
        dict(causal=True, window=3),
        lambda b, n, i, j: i + 2 - 3 < j <= i + 2,
    ),
    "window_alone": (dict(window=2), lambda b, n, i, j: j > i + 2 - 2),
    "window_of_one": (dict(causal=True, window=1), lambda b, n, i, j: j == i + 2),
    "mask": (dict(mask=MASK), lambda b, n, i, j: MASK[b, n, i, j]),
    "mask_2d": (dict(mask=MASK[0, 0]), lambda b, n, i, j: MASK[0, 0, i, j]),
    "lengths": (
        dict(kv_lengths=np.array([7, 2])),
        lambda b, n, i, j: j < (7, 2)[b],
    ),
    "segments": (
        dict(segment_ids=(IDS, KV_IDS)),
        lambda b, n, i, j: IDS[b, i] == KV_IDS[b, j],
    ),
    "bias": (dict(bias=draw(1, 4, 5, 7)), None),
    "bias_and_mask": (
        dict(bias=draw(2, 1, 1, 7), mask=MASK, causal=True),
        lambda b, n, i, j: MASK[b, n, i, j] and j <= i + 2,
    ),
    "softcap": (
        dict(softcap=0.5, causal=True, scale=2.0),
        lambda b, n, i, j: j <= i + 2,
    ),
    "softcap_before_bias": (dict(softcap=0.5, bias=3 * draw(1, 1, 5, 7)), None),
    "sinks": (dict(sinks=draw(4), causal=True), lambda b, n, i, j: j <= i + 2),
}
FORMULA_OPTIONS = ("bias", "sinks", "scale", "softcap")


@pytest.mark.parametrize("name", OPTIONS)
def test_formula(name):
    options, see = OPTIONS[name]
    q, k, v = draw(2, 5, 4, 6), draw(2, 7, 2, 6), draw(2, 7, 2, 3)
    same = {n: x for n, x in options.items() if n in FORMULA_OPTIONS}
    expected = formula(q, k, v, see=see, **same)
    for dtype, tolerance in ((jnp.float64, 1e-12), (jnp.float32, 2e-6)):
        with jax.enable_x64(dtype == jnp.float64):
            as_jax = {
                n: jnp.asarray(x, dtype if n in FORMULA_OPTIONS else None)
                if isinstance(x, np.ndarray)
                else x
                for n, x in options.items()
            }
            qkv = (jnp.asarray(x, dtype) for x in (q, k, v))
            out, lse = attention(*qkv, return_lse=True, **as_jax)
        np.testing.assert_allclose(out, expected[0], atol=tolerance)
        np.testing.assert_allclose(lse, expected[1], atol=tolerance)


def f32s(*shapes):
    return [jnp.asarray(draw(*s, seed=i), jnp.float32) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("window", [1, 3, 5, 100])
def test_window_is_that_of_jax_nn_plus_one(window):
    q, k, v = f32s((2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    expected = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=(window - 1, 0)
    )
    out = attention(q, k, v, causal=True, window=window)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_window_counts_its_keys():
    q, k, v = jnp.zeros((1, 10, 1, 4)), jnp.zeros((1, 10, 1, 4)), jnp.eye(10)
    weights = attention(q, k, v[None, :, None], causal=True, window=4)[0, :, 0]
    np.testing.assert_array_equal((weights > 0).sum(-1), [1, 2, 3, *[4] * 7])


def test_bias_and_lengths_equal_jax_nn():
    q, k, v, bias = f32s((2, 6, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), (1, 4, 6, 9))
    kv_lengths = jnp.array([9, 4], jnp.int32)
    expected = jax.nn.dot_product_attention(
        q, k, v, bias, key_value_seq_lengths=kv_lengths
    )
    out = attention(q, k, v, bias=bias, kv_lengths=kv_lengths)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_consecutive_query_heads_share_a_key_head():
    q, k = jnp.ones((1, 1, 6, 4)), jnp.ones((1, 2, 3, 4))
    v = jnp.broadcast_to(jnp.arange(3.0)[:, None], (1, 2, 3, 1))
    out = attention(q, k, v)
    np.testing.assert_allclose(out[0, 0, :, 0], [0, 0, 1, 1, 2, 2], atol=1e-6)


def test_without_batch_dim():
    q, k, v, bias = f32s((5, 4, 8), (7, 2, 8), (7, 2, 8), (4, 5, 7))
    ids = jnp.arange(5) // 2, jnp.arange(7) // 2
    options = dict(causal=True, bias=bias, kv_lengths=6, q_offset=2, return_lse=True)
    batched = attention(
        q[None], k[None], v[None], segment_ids=(ids[0][None], ids[1][None]), **options
    )
    single = attention(q, k, v, segment_ids=ids, **options)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[0]), single, batched)


def test_decoding_token_by_token_equals_the_whole_text():
    q, k, v = f32s((2, 8, 4, 8), (2, 8, 2, 8), (2, 8, 2, 8))
    whole = attention(q, k, v, causal=True, window=3)

    @jax.jit
    def decode(position):  # the cache has 8 slots, those behind position hold junk
        row = q[jnp.arange(2), position][:, None]
        return attention(
            row, k, v, kv_lengths=position + 1, q_offset=position, causal=True, window=3
        )[:, 0]

    for positions in ([0, 0], [3, 7], [6, 1]):
        out = decode(jnp.array(positions))
        np.testing.assert_allclose(
            out, whole[jnp.arange(2), jnp.array(positions)], atol=1e-6
        )


NOTHING_VISIBLE = {
    "mask": dict(mask=jnp.zeros((3, 4), bool)),
    "lengths": dict(kv_lengths=jnp.zeros(1, jnp.int32)),
    "causal": dict(causal=True, q_offset=-5),
    "window": dict(window=1, q_offset=9),
    "segments": dict(segment_ids=(jnp.zeros((1, 3), int), jnp.ones((1, 4), int))),
    "bias": dict(bias=jnp.full((3, 4), -jnp.inf)),
    "softcap": dict(mask=jnp.zeros((3, 4), bool), softcap=2.0),
}


@pytest.mark.parametrize("name", NOTHING_VISIBLE)
def test_rows_that_see_nothing(name):
    options = NOTHING_VISIBLE[name]
    qkv = f32s((1, 3, 2, 4), (1, 4, 1, 4), (1, 4, 1, 4))

    def f(*qkv):
        return attention(*qkv, return_lse=True, **options)

    def loss(*qkv):
        out, lse = f(*qkv)
        return jnp.sum(jnp.cos(out)) + jnp.sum(jnp.where(lse > -1e30, lse, 0.0) ** 2)

    grad = jax.grad(loss, (0, 1, 2))

    @jax.jit
    def derivatives(*qkv):
        tangents = jax.jvp(f, qkv, qkv)[1]
        higher = jax.jvp(grad, qkv, qkv)
        second = jax.jvp(lambda *x: jax.jvp(f, x, x)[1], qkv, qkv)
        cubic = jax.grad(lambda *x: sum(jnp.vdot(g, g) for g in grad(*x)), (0, 1, 2))
        return grad(*qkv), tangents, higher, second, cubic(*qkv)

    out, lse = f(*qkv)
    assert not out.any()
    assert (lse == -jnp.inf).all()
    for x in jax.tree.leaves(derivatives(*qkv)):
        np.testing.assert_array_equal(x, jnp.zeros_like(x))


def test_hidden_rows_leave_the_others_their_gradients():
    q, k, v = f32s((2, 3, 2, 4), (2, 4, 1, 4), (2, 4, 1, 4))

    def loss(q, k, v, kv_lengths=None):
        out, lse = attention(q, k, v, kv_lengths=kv_lengths, return_lse=True)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse > -1e30, lse, 0.0))

    grads = jax.grad(loss, (0, 1, 2))(q, k, v, jnp.array([4, 0]))
    expected = jax.grad(loss, (0, 1, 2))(q[:1], k[:1], v[:1])
    for g, e in zip(grads, expected, strict=True):
        np.testing.assert_allclose(g[:1], e, atol=1e-6)
        assert not g[1].any()


def test_sinks_of_a_row_without_keys():
    q, k, v, sinks = f32s((1, 1, 2, 4), (1, 3, 1, 4), (1, 3, 1, 4), (2,))
    out, lse = attention(
        q, k, v, sinks=sinks, kv_lengths=jnp.zeros(1, int), return_lse=True
    )
    assert not out.any()
    np.testing.assert_allclose(lse[0, 0], sinks, rtol=1e-6)


@pytest.mark.parametrize("shift", [-1e4, -100.0, 100.0, 1e4])
def test_far_from_zero_scores(shift):
    """exp(-89) and exp(89) are outside float32."""
    q, k, v = f32s((1, 4, 2, 8), (1, 6, 1, 8), (1, 6, 1, 8))
    bias = jnp.full((4, 6), shift)
    out, lse = attention(q, k, v, bias=bias, return_lse=True)
    plain, plain_lse = attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(out, plain, atol=1e-6 * max(1, abs(shift)))
    np.testing.assert_allclose(lse, plain_lse + shift, rtol=1e-6)
    grads = jax.grad(lambda q: attention(q, k, v, bias=bias).sum())(q)
    expected = jax.grad(lambda q: attention(q, k, v).sum())(q)
    np.testing.assert_allclose(grads, expected, atol=1e-6 * max(1, abs(shift)))


def test_parts_over_disjoint_keys_merge_by_lse():
    q, k, v = f32s((2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))

    def merged(q, k, v):
        (o1, l1), (o2, l2) = (
            attention(q, k[:, part], v[:, part], return_lse=True)
            for part in (slice(0, 4), slice(4, 9))
        )
        lse = jnp.logaddexp(l1, l2)
        return o1 * jnp.exp(l1 - lse)[..., None] + o2 * jnp.exp(l2 - lse)[..., None]

    np.testing.assert_allclose(merged(q, k, v), attention(q, k, v), atol=1e-6)
    # the gradient reaches the parts through both results

    def grads(f):
        return jax.grad(lambda *x: jnp.sin(f(*x)).sum(), (0, 1, 2))(q, k, v)

    for g, e in zip(grads(merged), grads(attention), strict=True):
        np.testing.assert_allclose(g, e, atol=2e-6)


def test_a_cache_of_lower_precision():
    q, k, v = f32s((1, 2, 4, 8), (1, 6, 2, 8), (1, 6, 2, 8))
    k16, v16 = k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    out = attention(q, k16, v16)
    assert out.dtype == jnp.float32
    expected = attention(q, k16.astype(jnp.float32), v16.astype(jnp.float32))
    np.testing.assert_allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.name, marks=[] if c.name == "odd" else pytest.mark.full)
        for c in CASES
        if c.name in ("everything", "odd", "bias")
    ],
)
@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.full)])
def test_blocks_of_query_rows(monkeypatch, case, rows):
    """Forward, backward, forward mode and second order are those of one block."""
    f = bound(attention_p, case, reference=True)
    with jax.enable_x64(True):
        operands = [in_float64(x) for x in operands_of(attention_p, case)]
        backward = attention_p.bwd.reference
        options = {n: case.arguments.get(n) for n in ("scale", "window", "softcap")}
        options["causal"] = case.arguments.get("causal", False)

        def all_of(operands):
            out, lse = f(*operands)
            dout, dlse = jnp.cos(jnp.arange(out.size)), jnp.sin(jnp.arange(lse.size))
            cotangents = dout.reshape(out.shape), dlse.reshape(lse.shape)
            grads = backward(*operands, out, lse, None, *cotangents, **options)
            grads = [g for g in grads if g is not None]
            return [out, lse, *grads, *gradients(f, operands)(*operands)]

        expected = evaluated(lambda x: all_of(x), operands)
        b, _, n, _ = operands[0].shape
        row_bytes = 4 * b * n * operands[1].shape[1]
        monkeypatch.setattr(query_blocks, "MAX_SCORES_BYTES", rows * row_bytes)
        assert "scan" in str(jax.make_jaxpr(all_of)(operands))
        found = evaluated(lambda x: all_of(x), operands)
        for i, (x, e) in enumerate(zip(found, expected, strict=True)):
            np.testing.assert_allclose(x, e, atol=1e-11, err_msg=f"{i}")


@pytest.mark.parametrize("backward", [False, True])
def test_scores_of_long_texts_are_never_whole(backward):
    """t = s = 8192 with 8 heads has 2.1 GB of scores."""
    q = jax.ShapeDtypeStruct((1, 8192, 8, 16), jnp.float32)
    k = jax.ShapeDtypeStruct((1, 8192, 2, 16), jnp.float32)

    def f(q, k, v):
        return jnp.sum(attention(q, k, v, causal=True))

    f = jax.grad(f, (0, 1, 2)) if backward else f
    memory = jax.jit(f).lower(q, k, k).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * query_blocks.MAX_SCORES_BYTES


def test_every_error_says_what_to_do():
    q, k, v = f32s((2, 3, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8))
    two = jnp.array([5, 5])
    with pytest.raises(TypeError, match=r"dim `k\*g` of `query` is 4, not a multiple"):
        attention(q, k[:, :, :1].repeat(3, 2), v[:, :, :1].repeat(3, 2))
    with pytest.raises(TypeError, match=r"dim `s` is 5 in `key` but 4 in `value`"):
        attention(q, k, v[:, :4])
    with pytest.raises(TypeError, match=r"`key` must have dims .* all without"):
        attention(q, k[0], v)
    with pytest.raises(ValueError, match=r"window is 0"):
        attention(q, k, v, window=0)
    with pytest.raises(ValueError, match=r"softcap is 0"):
        attention(q, k, v, softcap=0.0)
    with pytest.raises(TypeError, match=r"`mask` must be bool.* as `bias`"):
        attention(q, k, v, mask=jnp.zeros((3, 5)))
    with pytest.raises(TypeError, match=r"`mask` must be broadcastable"):
        attention(q, k, v, mask=jnp.zeros((5, 3), bool))
    with pytest.raises(TypeError, match=r"`bias` must be broadcastable"):
        attention(q, k, v, bias=jnp.zeros((2, 3, 3, 5)))
    with pytest.raises(TypeError, match=r"`kv_lengths` must be a number or one per"):
        attention(q, k, v, kv_lengths=jnp.zeros(3, int))
    with pytest.raises(TypeError, match=r"dim `t` is 3 in `query` but 5"):
        attention(q, k, v, segment_ids=jnp.zeros((2, 5), int))
    with pytest.raises(ValueError, match=r"ambiguous. Pass q_offset: kv_lengths - t"):
        attention(q, k, v, kv_lengths=two, causal=True)
    attention(q, k, v, kv_lengths=two, q_offset=two - 3, causal=True)


def test_a_nan_is_no_row_that_sees_nothing():
    query, key, value = (jnp.ones((1, 4, 1, 8)) for _ in range(3))
    query = query.at[0, 1].set(jnp.nan)
    out, lse = attention(query, key, value, causal=True, return_lse=True)
    assert jnp.isnan(out[0, 1]).all() and jnp.isnan(lse[0, 1]).all()
    assert jnp.isfinite(jnp.delete(lse, 1, axis=1)).all()


@pytest.mark.parametrize("softcap", [pytest.param(None, marks=pytest.mark.full), 2.0])
def test_nan_behind_the_lengths_reaches_no_derivative(softcap):
    query = jnp.asarray(draw(2, 2, 4, 3), jnp.float32)
    key, value = (jnp.asarray(draw(2, 5, 2, 3, seed=i), jnp.float32) for i in (1, 2))
    lengths = jnp.array([3, 5])
    spoiled = [x.at[0, 3:].set(jnp.nan) for x in (key, value)]

    def loss(query, key, value):
        out, lse = attention(
            query, key, value, kv_lengths=lengths, softcap=softcap, return_lse=True
        )
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

    def every_mode(*operands):
        ones = tuple(jnp.ones_like(x) for x in operands)

        def along(*operands):
            return jax.jvp(loss, operands, ones)[1]

        grad = jax.grad(loss, (0, 1, 2))
        return (
            loss(*operands),
            along(*operands),
            grad(*operands),
            jax.grad(along, (0, 1, 2))(*operands),
        )

    every_mode = jax.jit(every_mode)
    spoiled, clean = every_mode(query, *spoiled), every_mode(query, key, value)
    for actual, expected in zip(*map(jax.tree.leaves, (spoiled, clean)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("check", [check_sink, check_first_key])
def test_one_key_with_nearly_all_weight(check, dtype):
    """Other checks draw scores of which no row has most of its weight on one key."""
    check(slopes_of, 64, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_forward_and_reverse_mode_agree_where_one_key_wins(dtype):
    q, k, v, dout = draw_one_key(64, dtype)
    q, k = first_wins(q, k, 12.0)
    f = functools.partial(attention, causal=True)
    dq = jax.vjp(lambda q: f(q, k, v), q)[1](dout)[0]
    along = jnp.asarray(np.random.default_rng(3).standard_normal(q.shape), dtype)
    forward = jax.jvp(lambda q: f(q, k, v), (q,), (along,))[1]
    left = jnp.sum(forward.astype(jnp.float32) * dout.astype(jnp.float32))
    right = jnp.sum(along.astype(jnp.float32) * dq.astype(jnp.float32))
    size = jnp.linalg.norm(along.astype(jnp.float32))
    size = size * jnp.linalg.norm(dq.astype(jnp.float32))
    assert abs(left - right) < LIMIT[dtype] * size


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_tail_keeps_what_rounding_takes(dtype):
    x = np.random.default_rng(0).standard_normal((4, 1000))
    x = (x * np.array([[0.1], [1], [99], [1]])).ravel()
    x = np.where(np.abs(x) < 1e-3, 1, x)
    x = jnp.asarray(x, jnp.float32).at[:4].set(jnp.array([0, jnp.inf, jnp.nan, 1e-30]))
    rounded = x.astype(dtype)
    back, plain = np.asarray(with_tail(rounded, tail_of(x, rounded))), np.asarray(x)
    np.testing.assert_array_equal(back[:3], plain[:3])
    back, plain = back[4:], plain[4:]
    error = np.abs(back - plain) / np.abs(plain)
    assert error.max() < 2**-7 * float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "window", [(3, 2), (0, 0), (None, 1), (4, None), (None, None), (2, 40)]
)
def test_a_window_of_both_sides(window, causal):
    t, s, offset = 9, 14, 4
    q, k, v = f32s((2, t, 4, 8), (2, s, 2, 8), (2, s, 2, 8))
    left, right = (99 if x is None else x for x in window)
    ahead = np.arange(s) - np.arange(t)[:, None] - offset
    mask = (ahead >= -left) & (ahead <= (0 if causal else right))
    expected = attention(q, k, v, mask=jnp.asarray(mask))
    options = dict(causal=causal, window=window, q_offset=offset)
    np.testing.assert_allclose(attention(q, k, v, **options), expected, atol=1e-6)
    np.testing.assert_array_equal(make_mask(t, s, **options), mask)
    tiles = make_block_mask(t, s, block_q=4, block_kv=3, **options)
    found = block_mask(jnp.asarray(mask), block_q=4, block_kv=3)
    np.testing.assert_array_equal(tiles, found)


@pytest.mark.parametrize("kind", ["xla", "cpp"])
@pytest.mark.parametrize("window", [7, 43])
@pytest.mark.parametrize("offset", [20, 44, 90])
def test_windows_of_queries_far_behind_the_keys(kind, window, offset):
    """Other checks keep queries among the keys, or windows below their number."""
    q, k, v = f32s((1, 9, 1, 8), (1, 14, 1, 8), (1, 14, 1, 8))
    mask = make_mask(9, 14, causal=True, window=window, q_offset=offset)
    with backend("xla"):
        expected = attention(q, k, v, mask=mask)
    with backend(kind):
        found = attention(q, k, v, causal=True, window=window, q_offset=offset)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_window_of_both_sides_is_that_of_jax_nn():
    q, k, v = f32s((2, 12, 4, 8), (2, 12, 2, 8), (2, 12, 2, 8))
    expected = jax.nn.dot_product_attention(q, k, v, local_window_size=(3, 2))
    np.testing.assert_allclose(attention(q, k, v, window=(3, 2)), expected, atol=1e-5)


def test_windows_that_are_none():
    q, k, v = f32s((1, 4, 1, 8), (1, 4, 1, 8), (1, 4, 1, 8))
    for window in ((1,), (1, 2, 3), (-1, 2), (1.5, 2), (1, 2**31)):
        with pytest.raises(ValueError, match=r"window is .* two whole"):
            attention(q, k, v, window=window)
    with pytest.raises(TypeError, match="`window` must be a static int or"):
        jax.jit(lambda w: attention(q, k, v, window=w))(3)


def test_a_traced_scale_and_its_gradient():
    q, k, v = f32s((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))

    def loss(scale):
        return jnp.sum(jnp.sin(attention(q, k, v, scale=scale, causal=True)))

    value, slope = jax.jit(jax.value_and_grad(loss))(0.3)
    np.testing.assert_allclose(value, loss(0.3), rtol=1e-5)
    step = 1e-2
    np.testing.assert_allclose(
        slope, (loss(0.3 + step) - loss(0.3 - step)) / (2 * step), rtol=1e-2
    )
    with pytest.raises(TypeError, match="`scale` must be one number"):
        jax.jit(loss)(jnp.ones(2))
