"""The decode kernel on a GPU against the reference in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import attention, backend, explain, paged_attention
from jaxkern.testing.checks import in_float64
from tests.gpu.truth import EPSILON, on_a_gpu, poison, relative_error

pytestmark = on_a_gpu


def draw(shape, dtype="float32", seed=0):
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(rng.standard_normal(shape), dtype)


def qkv(b, t, s, k, g, h, hv=None, dtype="bfloat16", kv_dtype=None):
    kv_dtype = kv_dtype or dtype
    return (
        draw((b, t, k * g, h), dtype),
        draw((b, s, k, h), kv_dtype, 1),
        draw((b, s, k, hv or h), kv_dtype, 2),
    )


def check(f, *operands, slack=1.0, by="triton"):
    """(out, lse) by the kernel against the reference in float64."""
    poison(*operands[:1] * 8)
    with backend(by, strict=True):
        found = jax.jit(f)(*operands)
    with jax.enable_x64(True), backend("xla"):
        truth = jax.jit(f)(*jax.tree.map(in_float64, operands))
    tolerances = (EPSILON[operands[0].dtype.name], 4e-6)
    for y, t, tolerance in zip(found, truth, tolerances, strict=True):
        assert relative_error(y, t) < tolerance * slack
    return found


def with_lse(**options):
    return functools.partial(attention, return_lse=True, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("t, s, k, g", [(1, 4096, 8, 4), (3, 1000, 2, 3), (2, 1, 1, 1)])
@pytest.mark.parametrize(
    "h, hv", [(64, 64), (96, 96), (128, 128), (256, 256), (80, 37)]
)
def test_head_dims_and_odd_sizes(h, hv, t, s, k, g, dtype):
    check(with_lse(), *qkv(2, t, s, k, g, h, hv, dtype))


OPTIONS = {
    "causal": dict(causal=True),
    "offset": dict(causal=True, q_offset=[700, 0, -2, 5000]),
    "window": dict(causal=True, window=100),
    "window offset": dict(causal=True, window=300, q_offset=[700, 5, -2, 995]),
    "window alone": dict(window=200, q_offset=[600, 5, -150, 1300]),
    "softcap": dict(softcap=1.5),
    "scale": dict(scale=-0.3),
    "sinks": dict(sinks=True),
    "lengths": dict(kv_lengths=[1000, 0, 1, 333]),
    "out of range": dict(kv_lengths=[5000, -3, 1000, 999]),
    "lengths sinks": dict(kv_lengths=[1000, 0, 1, 333], sinks=True),
    "all": dict(
        kv_lengths=[1000, 0, 40, 333],
        q_offset=[996, 0, 36, 331],
        causal=True,
        window=150,
        softcap=5.0,
        sinks=True,
        scale=0.2,
    ),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("t, g", [(1, 4), (4, 3), (8, 4)])
@pytest.mark.parametrize("s", [1000, 50])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, s, t, g, dtype):
    f, arrays = with_options(options, 2 * g)
    check(f, *qkv(4, t, s, 2, g, 128, dtype=dtype), arrays)


def with_options(options, heads):
    """(attention with one of OPTIONS, the arrays among them)."""
    options = dict(options)
    arrays = {
        name: jnp.asarray(options.pop(name), jnp.int32)
        for name in ("kv_lengths", "q_offset")
        if name in options
    }
    if options.pop("sinks", False):
        arrays["sinks"] = draw((heads,))

    def f(query, key, value, arrays):
        return attention(query, key, value, return_lse=True, **options, **arrays)

    return f, arrays


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "t, g, h", [(8, 8, 128), (8, 8, 64), (8, 8, 256), (1, 64, 128)]
)
def test_as_many_rows_as_there_can_be(t, g, h, dtype):
    check(with_lse(causal=True), *qkv(2, t, 1500, 2, g, h, dtype=dtype))


@pytest.mark.parametrize("t, g, h", [(8, 4, 128), (4, 4, 256), (4, 8, 64)])
def test_as_many_rows_as_there_can_be_in_float32(t, g, h):
    check(with_lse(causal=True), *qkv(2, t, 1500, 2, g, h, dtype="float32"))


def test_64k_tokens():
    check(with_lse(), *qkv(1, 1, 65_536 + 77, 2, 4, 128))


@pytest.mark.parametrize(
    "dtype, kv_dtype",
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "float16")],
)
def test_queries_and_cache_of_different_dtypes(dtype, kv_dtype):
    check(with_lse(), *qkv(2, 2, 700, 2, 4, 128, dtype=dtype, kv_dtype=kv_dtype))


def test_rows_that_see_nothing_are_zeros():
    query, key, value = qkv(3, 1, 5000, 2, 4, 128)
    lengths = jnp.array([0, -1, 5000])
    out, lse = check(with_lse(kv_lengths=lengths), query, key, value)
    assert (out[:2] == 0).all() and (lse[:2] == -jnp.inf).all()
    sinks = draw((8,))
    with backend("triton", strict=True):
        out, lse = attention(
            query, key, value, kv_lengths=lengths, sinks=sinks, return_lse=True
        )
    assert (out[:2] == 0).all()
    np.testing.assert_allclose(lse[:2, 0], np.broadcast_to(sinks, (2, 8)), rtol=1e-6)


@pytest.mark.parametrize("s", [60, 5000])
def test_nan_behind_the_lengths_has_no_influence(s):
    query, key, value = qkv(4, 1, s, 2, 4, 128)
    lengths = jnp.array([0, 1, s // 2, s - 1])
    behind = (jnp.arange(s) >= lengths[:, None])[:, :, None, None]
    with backend("triton", strict=True):
        f = jax.jit(lambda k, v: attention(query, k, v, kv_lengths=lengths))
        clean = f(key, value)
        dirty = f(jnp.where(behind, jnp.nan, key), jnp.where(behind, jnp.nan, value))
    np.testing.assert_array_equal(clean, dirty)
    assert np.isfinite(np.asarray(dirty, np.float32)).all()


@pytest.mark.parametrize("s", [3000, 9000])
def test_lengths_may_change_between_replays(s):
    """So many launches are a CUDA graph; the same lengths give the same bits."""
    query, key, value = qkv(1, 1, s, 8, 4, 128)
    lengths = [jnp.array([n]) for n in (0, 1, 77, s // 2, s - 1, s)]

    @jax.jit
    def every(lengths):
        return [attention(query, key, value, kv_lengths=n) for n in lengths]

    with backend("triton", strict=True):
        first, reverse, again = (every(x) for x in (lengths, lengths[::-1], lengths))
    for y, other, same in zip(first, reverse[::-1], again, strict=True):
        np.testing.assert_array_equal(y, other)
        np.testing.assert_array_equal(y, same)
    assert not first[0].any() and all(y.any() for y in first[1:])


CLUSTERS = [(64, 640), (64, 1024), (64, 2000), (80, 300), (128, 1000), (256, 512)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("t", [1, 8])
@pytest.mark.parametrize("h, s", CLUSTERS)
def test_shares_that_a_cluster_merges(h, s, t, dtype):
    lengths = jnp.array([s, 1, 0, s // 3, s - 1])
    options = {"kv_lengths": lengths, "q_offset": lengths - t}
    f = lambda q, k, v, o: with_lse(causal=True)(q, k, v, **o)  # noqa: E731
    query, key, value = qkv(5, t, s, 2, 4, h, dtype=dtype)
    with backend("triton"):
        [row] = explain(f, query, key, value, options).rows
    fits = (h, t) != (256, 8)  # else more numbers to send than a kernel may declare
    assert [launch.cluster > 1 for launch in row.launches] == (
        [True] if fits else [False] * 2
    )
    check(f, query, key, value, options)


@pytest.mark.parametrize("h, s", CLUSTERS)
def test_a_cluster_merges_the_same_bits_every_time(h, s):
    """Whoever comes last: thousands of launches, many behind each other in a graph,
    beside a kernel that takes multiprocessors from some of them."""
    query, key, value = qkv(1, 1, s, 8, 4, h)
    lengths = [jnp.array([n]) for n in (s, s // 2, 1, s - 1)] * 8
    beside = jnp.ones((2048, 2048), jnp.bfloat16)

    @jax.jit
    def every(query, key, value, beside, lengths):
        found = []
        for n in lengths:
            y = attention(query, key, value, kv_lengths=n)
            beside = beside @ beside / beside.shape[0]
            found.append((y, beside[0, 0]))
        return found

    with backend("triton", strict=True):
        first = every(query, key, value, beside, lengths)
        differ = jnp.zeros((), bool)
        for _ in range(100):
            again = every(query, key, value, beside, lengths)
            for (y, _), (same, _) in zip(first, again, strict=True):
                differ |= (y != same).any()
    assert not differ
    for i in range(4, len(first)):
        np.testing.assert_array_equal(first[i][0], first[i % 4][0])
    assert all(np.asarray(y, np.float32).any() for y, _ in first)


def test_pages_in_a_cluster():
    query, *_ = qkv(2, 2, 1, 2, 4, 64)
    pages = draw((41, 16, 2, 64), "bfloat16", 3), draw((41, 16, 2, 64), "bfloat16", 4)
    tables = jnp.asarray(np.random.default_rng(0).permutation(40).reshape(2, 20))
    lengths = jnp.array([320, 77])

    def f(query, keys, values):
        return paged_attention(query, keys, values, tables, lengths, return_lse=True)

    check(f, query, *pages)


@pytest.mark.parametrize("shortest", [4000, 3500, 0])
def test_shares_follow_from_whether_lengths_are_alike(shortest):
    operands = qkv(34, 1, 4096, 1, 4, 128)
    lengths = jnp.linspace(shortest, 4096, 34).astype(jnp.int32)
    f = lambda q, k, v, n: with_lse()(q, k, v, kv_lengths=n)  # noqa: E731
    check(f, *operands, lengths[::-1])


def test_nan_among_the_keys_reaches_its_sequence_alone():
    query, key, value = qkv(2, 1, 3000, 2, 4, 128)
    with backend("triton", strict=True):
        out = attention(query, key.at[0, 2999, 0].set(jnp.nan), value)
    bad = np.isnan(np.asarray(out, np.float32))
    assert bad[0, :, :4].all() and not bad[0, :, 4:].any() and not bad[1].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("page", [3, 16, 64, 256])
@pytest.mark.parametrize(
    "options", [{}, {"window": 300}, {"softcap": 2.0, "causal": False}], ids=str
)
def test_pages(options, page, dtype):
    b, t, pages = 3, 2, 1280 // page
    query, *_ = qkv(b, t, 1, 2, 4, 128, dtype=dtype)
    num_pages = b * pages + 1
    keys = draw((num_pages, page, 2, 128), dtype, 3)
    values = draw((num_pages, page, 2, 64), dtype, 4)
    rng = np.random.default_rng(0)
    tables = rng.permutation(num_pages)[: b * pages].reshape(b, pages)
    tables[0, 2], tables[1, 0], tables[2, 1] = -1, num_pages, tables[0, 0]
    lengths, tables = jnp.array([1200, 2, 701]), jnp.asarray(tables, jnp.int32)
    sinks = draw((8,))

    def f(query, keys, values, sinks):
        return paged_attention(
            query,
            keys,
            values,
            tables,
            lengths,
            sinks=sinks,
            return_lse=True,
            **options,
        )

    check(f, query, keys, values, sinks)


def test_pages_and_linear_cache_agree():
    query, key, value = qkv(2, 1, 2048, 2, 4, 128)
    tables = jnp.arange(2 * 128).reshape(2, 128)
    lengths = jnp.array([2048, 1000])
    pages = [x.reshape(256, 16, 2, 128) for x in (key, value)]
    with backend("triton", strict=True):
        paged = paged_attention(query, *pages, tables, lengths)
        linear = attention(query, key, value, kv_lengths=lengths)
    np.testing.assert_array_equal(paged, linear)


def test_transformations():
    query, key, value = (
        x.reshape(3, 2, *x.shape[1:]) for x in qkv(6, 1, 700, 2, 4, 64, dtype="float32")
    )
    lengths = jnp.array([[700, 3], [0, 64], [65, 699]])

    def f(query, key, value, length):
        return attention(query, key, value, kv_lengths=length, return_lse=True)

    def every(query, key, value):
        each = jax.vmap(f)(query, key, value, lengths)
        shared = jax.vmap(f, (0, None, None, None))(query, key[0], value[0], lengths[0])

        def step(query, length):
            out, lse = f(query, key[0], value[0], length)
            return out, (out, lse)

        scanned = jax.lax.scan(step, query[0], lengths)
        tangent = jax.jvp(
            lambda q: f(q, key[0], value[0], lengths[0])[0], (query[0],), (query[1],)
        )
        return each, shared, scanned, tangent

    exact = jax.default_matmul_precision("highest")  # of the tangent
    with backend("triton", strict=True), exact:
        found = jax.jit(every)(query, key, value)
    with jax.enable_x64(True), backend("xla"):
        truth = jax.jit(every)(*map(in_float64, (query, key, value)))
    for y, t in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        assert relative_error(y, t) < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_from_the_lse_of_the_kernel(dtype):
    operands = *qkv(3, 2, 900, 2, 4, 64, dtype=dtype), draw((8,))
    lengths = jnp.array([900, 0, 77])

    def loss(query, key, value, sinks):
        out, lse = attention(
            query,
            key,
            value,
            sinks=sinks,
            kv_lengths=lengths,
            q_offset=lengths - 2,
            causal=True,
            return_lse=True,
        )
        lse = jnp.where(jnp.isfinite(lse), lse, 0)
        return jnp.sum(jnp.sin(out.astype(lse.dtype))) + jnp.sum(lse**2)

    slopes = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    exact = jax.default_matmul_precision("highest")
    with backend("triton"), exact:  # backward is the reference
        found = slopes(*operands)
    with jax.enable_x64(True), backend("xla"):
        truth = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*map(in_float64, operands))
    for y, t in zip(found, truth, strict=True):
        assert relative_error(y, t) < 2 * EPSILON[dtype]


def test_offsets_beyond_32_bits():
    s, k, h, window = 2**21 + 77, 8, 128, 100
    query, last_key, last_value = qkv(1, 1, window, k, 4, h)

    def in_large(x):
        return jnp.zeros((1, s, k, h), x.dtype).at[:, -window:].set(x)

    with backend("triton", strict=True):
        f = jax.jit(lambda q, k, v: attention(q, k, v, causal=True, window=window))
        far = f(query, in_large(last_key), in_large(last_value))
        near = attention(query, last_key, last_value)
    assert relative_error(far, near) < EPSILON["bfloat16"]


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("spec", [P("m"), P(None, None, "m")])
def test_two_gpus_share_sequences_or_heads(spec):
    mesh = jax.make_mesh((2,), ("m",), axis_types=(AxisType.Auto,))
    operands = qkv(2, 1, 3000, 2, 4, 128, dtype="float32")
    cut = [jax.device_put(x, NamedSharding(mesh, spec)) for x in operands]
    run = jax.jit(with_lse()).lower(*cut).compile()
    assert "triton_kernel_call" in run.as_text() and "all-" not in run.as_text()
    for y, e in zip(run(*cut), with_lse()(*operands), strict=True):
        np.testing.assert_allclose(y, e, rtol=1e-5, atol=1e-6)
