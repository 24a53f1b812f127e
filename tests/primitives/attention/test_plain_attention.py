"""attention with dropout, and with a cap after the bias: formula, mask, one result."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from jaxkern import Dropout, SoftcapAfterBias, attention, backend, explain
from jaxkern.primitives.attention import query_blocks
from jaxkern.primitives.attention.dropout import kept, seeds_of
from jaxkern.testing.checks import Spec, boolean, case, f32, i32
from tests.primitives.attention.test_attention import draw, f32s, lengths, shapes


def words(*shape):
    return Spec(shape, np.uint32, lambda rng, s: rng.integers(0, 2**32, s))


PLAIN = dict(
    causal=False, window=None, softcap=None, softcap_after_bias=False, dropout=0.0
)
CASES = [
    case(
        "dropout",
        **shapes(2, 2, 4, 2, 1, 4),
        **PLAIN | dict(causal=True, dropout=0.4),
        dropout_seeds=words(2, 2, 2),
    ),
    case(
        "everything",
        **shapes(2, 3, 5, 2, 2, 3, hv=2),
        bias=f32(2, 4, 3, 5),
        mask=boolean(2, 1, 3, 5, probability=0.8),
        q_segment_ids=i32(2, 3, high=2),
        kv_segment_ids=i32(2, 5, high=2),
        kv_lengths=lengths(5, 3),
        q_offset=lengths(2, 1),
        sinks=f32(4),
        dropout_seeds=words(2, 4, 2),
        dropout=0.25,
        causal=True,
        window=3,
        softcap=2.0,
        softcap_after_bias=True,
    ),
    case(
        "after_bias",
        **shapes(1, 3, 3, 1, 1, 3),
        **PLAIN | dict(softcap=0.7, softcap_after_bias=True),
        bias=f32(1, 1, 3, 3),
    ),
]


def kept_by_jax(key, rate, b, n, t, s):
    """[b, n, t, s], by the cipher of jax.random, a head at a time."""
    seeds = jax.random.bits(key, (b, n, 2), jnp.uint32)
    i, j = np.meshgrid(np.arange(t), np.arange(s), indexing="ij")
    counts = jnp.asarray(np.concatenate([i.ravel(), j.ravel()]), jnp.uint32)
    keep = np.zeros((b, n, t, s), bool)
    for at in itertools.product(range(b), range(n)):
        bits = np.asarray(threefry_2x32(seeds[at], counts))[: t * s]
        keep[at] = (bits / 2**32 >= rate).reshape(t, s)
    return keep


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_formula(rate):
    b, t, s, n, k, h, cap = 2, 5, 7, 4, 2, 6, 0.8
    q, key, v = draw(b, t, n, h), draw(b, s, k, h), draw(b, s, k, 3)
    bias, sinks = 2 * draw(1, n, t, s), draw(n)
    keep = np.ones((b, n, t, s), bool)
    if rate:
        keep = kept_by_jax(jax.random.key(5), rate, b, n, t, s)
        assert 0 < keep.mean() < 1
    out, lse = np.zeros((b, t, n, 3)), np.zeros((b, t, n))
    for bi, i, ni in itertools.product(range(b), range(t), range(n)):
        logits = key[bi, :, ni // 2] @ q[bi, i, ni] * h**-0.5 + bias[0, ni, i]
        logits = cap * np.tanh(logits / cap)
        lse[bi, i, ni] = np.log(np.exp(logits).sum() + np.exp(sinks[ni]))
        weights = np.exp(logits - lse[bi, i, ni]) * keep[bi, ni, i] / (1 - rate)
        out[bi, i, ni] = weights @ v[bi, :, ni // 2]
    with jax.enable_x64(True):
        found = attention(
            *map(jnp.asarray, (q, key, v)),
            bias=jnp.asarray(bias),
            sinks=jnp.asarray(sinks),
            softcap=SoftcapAfterBias(cap),
            dropout=Dropout(rate, jax.random.key(5)),
            return_lse=True,
        )
    np.testing.assert_allclose(found[0], out, atol=1e-12)
    np.testing.assert_allclose(found[1], lse, atol=1e-12)


def test_the_mask_has_its_rate_and_no_pattern():
    """Of rows, of keys, and of any two heads, rows or keys side by side."""
    rate, shape = 0.3, (2, 4, 128, 256)
    drop = ~np.asarray(kept(seeds_of(jax.random.key(1), 2, 4), rate, *shape[2:], 0))
    assert drop.shape == shape

    def near(found, expected, count):
        error = np.abs(found - expected) / np.sqrt(expected * (1 - expected) / count)
        assert np.max(error) < 5, error

    near(drop.mean(), rate, drop.size)
    for axis in range(4):
        near(drop.mean(axis=axis), rate, shape[axis])
        both = drop & np.roll(drop, 1, axis=axis)
        near(both.mean(), rate**2, drop.size / 3)  # the pairs overlap
    [none] = {kept(seeds_of(jax.random.key(1), 1, 1), 0.0, 9, 9, 0).all().item()}
    assert none


def test_both_passes_drop_the_same_and_modes_agree():
    """Numerical gradients, forward and reverse: of a mask that differed they would be
    another function's. The generic check of these runs for one op of the family."""
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(draw(1, 3, n, 2, seed=n)) for n in (2, 1, 1))
        bias, sinks = jnp.asarray(draw(1, 2, 3, 3)), jnp.asarray(draw(2))

        def f(q, k, v, bias, sinks):
            return attention(
                q,
                k,
                v,
                bias=bias,
                sinks=sinks,
                softcap=SoftcapAfterBias(1.5),
                dropout=Dropout(0.4, jax.random.key(2)),
                return_lse=True,
            )

        check_grads(jax.jit(f), (q, k, v, bias, sinks), order=1, rtol=1e-5)


def test_one_key_gives_one_result():
    """Under jit, checkpoint, scan and vmap, and however rows and devices are cut."""
    q, k, v = f32s((4, 6, 4, 8), (4, 7, 2, 8), (4, 7, 2, 8))
    keys = jax.random.split(jax.random.key(7), 3)

    def run(q, k, v, key):
        def loss(q, k, v):
            out = attention(q, k, v, dropout=Dropout(0.4, key), causal=True)
            return jnp.sum(jnp.sin(out)), out

        grads, out = jax.grad(jax.checkpoint(loss), (0, 1, 2), has_aux=True)(q, k, v)
        return [out, *grads]

    def check(found, expected):
        for x, e in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, e, atol=2e-6)

    jitted = jax.jit(run)
    each = [jitted(q, k, v, key) for key in keys]
    assert np.abs(each[0][0] - each[1][0]).max() > 0.1
    eager = attention(q, k, v, dropout=Dropout(0.4, keys[0]), causal=True)
    check([eager], each[0][:1])

    @jax.jit
    def several(q, k, v, keys):
        mapped = jax.vmap(run, (None, None, None, 0))(q, k, v, keys)
        return mapped, jax.lax.scan(lambda _, x: (None, run(q, k, v, x)), None, keys)[1]

    for found in several(q, k, v, keys):
        for i, expected in enumerate(each):
            check([x[i] for x in found], expected)

    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        cut = NamedSharding(mesh, P("x", None, "y"))
        check(jitted(*(jax.device_put(x, cut) for x in (q, k, v)), keys[0]), each[0])


def test_blocks_of_query_rows_drop_the_same(monkeypatch):
    q, k, v = f32s((1, 7, 2, 4), (1, 5, 1, 4), (1, 5, 1, 4))

    def run(q, k, v):
        return attention(q, k, v, dropout=Dropout(0.4, jax.random.key(3)))

    def both(q, k, v):
        out, back = jax.vjp(run, q, k, v)
        return [out, *back(jnp.cos(out))]

    whole = jax.jit(both).lower(q, k, v)
    monkeypatch.setattr(query_blocks, "MAX_SCORES_BYTES", 3 * 4 * 2 * 5)
    cut = jax.jit(lambda *x: both(*x)).lower(q, k, v)
    assert cut.as_text().count("while") > whole.as_text().count("while")
    results = (lowered.compile()(q, k, v) for lowered in (cut, whole))
    for x, e in zip(*results, strict=True):
        np.testing.assert_allclose(x, e, atol=1e-6)


def test_a_bias_of_minus_infinity_hides_in_either_order():
    q, k, v = f32s((1, 3, 2, 4), (1, 5, 1, 4), (1, 5, 1, 4))
    mask = jnp.arange(5) < jnp.array([[4], [0], [5]])
    bias = jnp.where(mask, jnp.cos(jnp.arange(15.0)).reshape(3, 5), -jnp.inf)
    cap = SoftcapAfterBias(1.0)

    def f(q, bias, mask=None):
        return attention(q, k, v, bias=bias, mask=mask, softcap=cap)

    hidden, back = jax.vjp(f, q, bias)
    expected, plain = jax.vjp(lambda q, x: f(q, x, mask), q, jnp.where(mask, bias, 0))
    np.testing.assert_allclose(hidden, expected, atol=1e-6)
    for x, e in zip(back(hidden), plain(hidden), strict=True):
        np.testing.assert_allclose(x, e, atol=1e-6)


def test_no_kernel_takes_them_and_that_is_said():
    q, k, v = f32s((1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8))
    bias, key = jnp.ones((4, 4)), jax.random.key(0)
    for options in (
        dict(dropout=Dropout(0.5, key)),
        dict(bias=bias, softcap=SoftcapAfterBias(2.0)),
    ):

        def f(q, k, v, options=options):
            return attention(q, k, v, **options)

        assert explain(f, q, k, v).rows[-1].runs.startswith("xla")
        with pytest.raises(ValueError, match="plain_attention: has no cpp kernel"):
            with backend("cpp", strict=True):
                jax.jit(f)(q, k, v)
    for nothing, plain in (
        (dict(dropout=Dropout(0.0, key)), {}),
        (dict(softcap=SoftcapAfterBias(2.0)), dict(softcap=2.0)),
    ):
        found, expected = (attention(q, k, v, **x) for x in (nothing, plain))
        np.testing.assert_array_equal(found, expected)


def test_a_dropout_is_a_pytree_of_its_key():
    """It passes through jit as an argument, and vmap maps its keys."""
    q, k, v = f32s((1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8))
    keys = jax.random.split(jax.random.key(3), 2)

    @jax.jit
    def f(dropout):
        return attention(q, k, v, dropout=dropout)

    each = [f(Dropout(0.4, key)) for key in keys]
    assert np.abs(each[0] - each[1]).max() > 0.1
    assert f._cache_size() == 1
    mapped = jax.vmap(f)(Dropout(0.4, keys))
    np.testing.assert_allclose(mapped, jnp.stack(each), atol=1e-6)


def test_errors():
    q, k, v = f32s((1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8))
    key = jax.random.key(0)
    for rate in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"^Dropout: `rate` is .* below 1"):
            Dropout(rate, key)
    with pytest.raises(TypeError, match=r"missing 1 required .* argument: 'key'"):
        Dropout(0.1)  # pyright: ignore
    for wrong in (None, jnp.zeros(3), jax.random.split(key)):
        with pytest.raises(
            TypeError, match=r"^attention: `dropout.key` must be one PR"
        ):
            attention(q, k, v, dropout=Dropout(0.1, wrong))
    with pytest.raises(TypeError, match=r"^Dropout: `rate` must be a static float"):
        jax.jit(lambda r: attention(q, k, v, dropout=Dropout(r, key)))(0.1)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'dropout_key'"):
        attention(q, k, v, dropout_key=key)  # pyright: ignore
    with pytest.raises(ValueError, match=r"^attention: softcap is -1.0\. Leave it out"):
        attention(q, k, v, softcap=SoftcapAfterBias(-1.0))
    with pytest.raises(
        TypeError, match=r"^SoftcapAfterBias: `cap` must be float, got N"
    ):
        SoftcapAfterBias(None)  # pyright: ignore
