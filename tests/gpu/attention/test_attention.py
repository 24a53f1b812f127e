"""Attention of many queries by kernel on a GPU, against the reference in float64."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import attention, backend, explain
from jaxkern.testing import sharding_checks
from tests.gpu.truth import EPSILON, on_a_gpu, poison, relative_errors
from tests.primitives.attention.one_key import ON_A_CARD, slopes_of

pytestmark = on_a_gpu
RNG = np.random.default_rng(0)
TF32 = 2.0**-10  # two factors, each of which is rounded by up to 2^-11


def draw(*shape, dtype="bfloat16"):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def attend(*qkv, **options) -> Any:
    return attention(*qkv, **options)


def operands(b, t, s, k, g, h, hv=None, dtype="bfloat16") -> Any:
    hv = hv or h
    q = draw(b, t, k * g, h, dtype=dtype)
    return q, draw(b, s, k, h, dtype=dtype), draw(b, s, k, hv, dtype=dtype)


def values_and_gradients(q, k, v, floats, cotangents, gradients, options):
    """(out, lse) and, if wanted, the gradients of q, k, v and of the float options."""

    def f(q, k, v, floats):
        return attend(q, k, v, return_lse=True, **floats, **options)

    if not gradients:
        return f(q, k, v, floats), ()
    y, pull = jax.vjp(f, q, k, v, floats)
    seen = [c.astype(x.dtype) for c, x in zip(cotangents, y, strict=True)]
    return y, pull(tuple(seen))


def check(
    q, k, v, slack=1.0, kind="triton", gradients=True, precision="highest", **options
):
    floats = {n: options.pop(n) for n in ("bias", "sinks") if n in options}
    b, t, n, _ = q.shape
    cotangents = draw(b, t, n, v.shape[-1]), draw(b, t, n, dtype="float32")
    poison(q, k, v)
    arguments = (q, k, v, floats, cotangents)
    run = functools.partial(values_and_gradients, gradients=gradients, options=options)
    # also of what dbias is made of
    with backend(kind, strict=True), jax.default_matmul_precision(precision):
        found = jax.jit(run)(*arguments)
    with jax.enable_x64(True), backend("xla"):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), arguments)
        truth = jax.jit(run)(*wide)
    hidden = np.isneginf(np.asarray(truth[0][1]))
    assert not np.asarray(found[0][0], np.float32)[hidden].any()
    limit = EPSILON[q.dtype.name]
    if q.dtype == jnp.float32:
        limit = 4 * limit if precision == "highest" else TF32
    errors = relative_errors(found, truth, 1e-2)
    assert max(errors) < slack * limit, errors


IDS: Any = np.sort(RNG.integers(0, 4, (2, 300)), 1)
KV_IDS: Any = np.sort(RNG.integers(0, 5, (2, 413)), 1)
OPTIONS: dict[str, Any] = {
    "all": {},
    "causal": dict(causal=True),
    "causal_offsets": dict(causal=True, q_offset=np.array([-50, 200])),
    "window": dict(causal=True, window=70),
    "window_alone": dict(window=100),
    "softcap": dict(causal=True, softcap=2.0),
    "negative_scale": dict(causal=True, scale=-0.2),
    "sinks": dict(causal=True, sinks=draw(6, dtype="float32")),
    "lengths": dict(kv_lengths=np.array([0, 130])),
    "lengths_causal": dict(
        kv_lengths=np.array([413, 301]), q_offset=np.array([113, 1]), causal=True
    ),
    "segments": dict(segment_ids=(IDS, KV_IDS)),
    "segments_causal": dict(segment_ids=(IDS, KV_IDS), causal=True, window=200),
    "unordered_segments": dict(segment_ids=(IDS[:, ::-1] % 3, KV_IDS * 7 % 3)),
    "mask": dict(mask=RNG.random((2, 1, 300, 413)) < 0.3),
    "mask_by_head": dict(mask=RNG.random((1, 6, 300, 413)) < 0.3, causal=True),
    "mask_of_keys": dict(mask=RNG.random((2, 1, 1, 413)) < 0.5),
    "mask_of_queries": dict(mask=RNG.random((2, 1, 300, 1)) < 0.5, window=90),
    "bias": dict(bias=draw(1, 6, 300, 413, dtype="float32"), causal=True),
    "bias_of_keys": dict(bias=draw(2, 1, 1, 413, dtype="float32")),
    "everything": dict(
        bias=draw(1, 6, 1, 413, dtype="float32"),
        mask=RNG.random((2, 1, 300, 413)) < 0.7,
        segment_ids=(IDS, KV_IDS),
        kv_lengths=np.array([400, 77]),
        q_offset=np.array([60, -10]),
        sinks=draw(6, dtype="float32"),
        causal=True,
        window=150,
        softcap=3.0,
    ),
}


def as_jax(options):
    return jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, options
    )


PRECISIONS = [("bfloat16", "highest"), ("float32", "highest"), ("float32", None)]


@pytest.mark.parametrize("dtype, precision", PRECISIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name, dtype, precision):
    qkv = operands(2, 300, 413, 2, 3, 64, dtype=dtype)
    check(*qkv, precision=precision, **as_jax(OPTIONS[name]))


@pytest.mark.parametrize("dtype, precision", [*PRECISIONS, ("float16", "highest")])
@pytest.mark.parametrize(
    "h, hv",
    [(64, 64), (96, 96), (128, 128), (256, 256), (192, 128), (80, 32), (5, 3)],
)
def test_head_dims(h, hv, dtype, precision):
    qkv = operands(1, 257, 257, 2, 2, h, hv, dtype)
    check(*qkv, causal=True, precision=precision)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "h, hv", [(512, 512), (384, 384), (320, 320), (272, 256), (512, 64), (64, 512)]
)
def test_wide_heads(h, hv, dtype):
    """The forward kernel alone."""
    check(*operands(1, 257, 257, 2, 2, h, hv, dtype), causal=True, gradients=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_wide_heads(name, dtype):
    qkv = operands(2, 300, 413, 2, 3, 512, dtype=dtype)
    check(*qkv, gradients=False, **as_jax(OPTIONS[name]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_wide_heads_are_those_of_the_reference(dtype):
    q, k, v = operands(1, 300, 300, 2, 2, 512, dtype=dtype)

    def loss(*x):
        out = attend(*x, causal=True)
        return jnp.sum(jnp.sin(out.astype(jnp.promote_types(out.dtype, jnp.float32))))

    slopes = jax.grad(loss, (0, 1, 2))
    with backend("triton"), jax.default_matmul_precision("highest"):
        forward, backward = explain(slopes, q, k, v).rows
        found = jax.jit(slopes)(q, k, v)
    assert forward.runs.startswith("triton: triton.attention.attention")
    assert "gradients at head dims of 512 and 512, above 256" in str(backward)
    with jax.enable_x64(True), backend("xla"):
        truth = jax.jit(slopes)(*(x.astype(jnp.float64) for x in (q, k, v)))
    assert max(relative_errors(found, truth, 1e-2)) < 2 * EPSILON[dtype]


@pytest.mark.parametrize("h", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 300])
def test_whole_blocks(h, window):
    check(*operands(1, 1024, 1024, 2, 4, h), causal=True, window=window)


@pytest.mark.parametrize(
    "t, s", [(9, 1), (9, 1000), (63, 64), (128, 128), (129, 4000), (1000, 10)]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lengths(t, s, causal, dtype):
    check(*operands(2, t, s, 1, 5, 128, dtype=dtype), causal=causal)


def test_long_sequences():
    q, k, v = operands(1, 16384, 16384, 1, 1, 128)
    check(q, k, v, causal=True)
    check(q, k, v, causal=True, window=1000)


def test_lse_far_below_zero():
    """Where cuDNN's backward pass gives NaN."""
    q, k, v = operands(1, 256, 256, 2, 2, 64)
    check(40 * q, 40 * k, v, causal=True, slack=20.0)  # weights of 0 and 1
    far = jnp.full((1, 1, 1, 256), -1000.0)
    check(q, k, v, bias=far, causal=True)
    check(q, k, v, bias=far, mask=jnp.asarray(RNG.random((1, 1, 256, 256)) < 0.6))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_lies_behind_the_lengths_has_no_influence(dtype):
    q, k, v = operands(2, 200, 300, 2, 2, 64, dtype=dtype)
    lengths = jnp.array([100, 290])
    rest = jnp.arange(300)[:, None, None] >= lengths[:, None, None, None]

    def run(k, v):
        def f(*x):
            return attend(*x, kv_lengths=lengths).astype(jnp.float32).sum()

        return jax.value_and_grad(f, (0, 1, 2))(q, k, v)

    with backend("triton", strict=True):
        clean = jax.jit(run)(k, v)
        dirty = jax.jit(run)(jnp.where(rest, jnp.nan, k), jnp.where(rest, jnp.inf, v))
    for y, e in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(np.float32(y), np.float32(e))
        assert np.isfinite(np.float32(y)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_nan_stays_visible(dtype):
    q, k, v = operands(1, 200, 200, 1, 1, 64, dtype=dtype)
    with backend("triton", strict=True):
        by_query = attend(q.at[0, 7].set(jnp.nan), k, v, causal=True)
        by_key = attend(q, k.at[0, 150].set(jnp.nan), v, causal=True)
        slope = jax.grad(lambda q: attend(q, k, v, causal=True).astype("float32").sum())
        dq = slope(q.at[0, 7].set(jnp.nan))
    assert jnp.isnan(dq[0, 7]).all() and jnp.isfinite(dq[0, 8:]).all()
    assert jnp.isnan(by_query[0, 7]).all() and jnp.isfinite(by_query[0, 8:]).all()
    assert jnp.isnan(by_key[0, 150:]).all() and jnp.isfinite(by_key[0, :150]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_same_bits_every_time(dtype):
    q, k, v = operands(2, 1000, 1000, 2, 4, 128, dtype=dtype)

    def f(*x):
        return attend(*x, causal=True).astype(jnp.float32).sum()

    with backend("triton", strict=True):
        slope = jax.jit(jax.grad(f, (0, 1, 2)))
        first = slope(q, k, v)
        for _ in range(5):
            for a, b in zip(first, slope(q, k, v), strict=True):
                assert (a == b).all()


def test_forward_mode_and_vmap():
    q, k, v = operands(3, 64, 64, 2, 2, 64, dtype="float32")

    def loss(q, k, v):
        return jnp.sin(attend(q, k, v, causal=True)).sum()

    def every(q, k, v):
        tangent = jax.jvp(loss, (q, k, v), (q[::-1], k[::-1], v[::-1]))
        batched: Any = tuple(x.reshape(3, 1, *x.shape[1:]) for x in (q, k, v))
        slopes = jax.vmap(jax.grad(loss, (0, 1, 2)))(*batched)
        twice = jax.grad(lambda q: jax.grad(loss)(q, k, v).sum())(q)
        return tangent, slopes, twice

    with jax.default_matmul_precision("highest"):
        with backend("triton", strict=True):
            found = jax.jit(every)(q, k, v)
        with backend("xla"):
            expected = jax.jit(every)(q, k, v)
    for y, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(y, e, rtol=1e-4, atol=1e-4)


def test_memory_grows_with_the_length_alone():
    """64k tokens: the scores of one head alone would be 8 GB in bf16."""
    q, k, v = operands(1, 65536, 65536, 1, 2, 64)

    def f(*x):
        return attend(*x, causal=True).astype(jnp.float32).sum()

    with backend("triton", strict=True):
        compiled = jax.jit(jax.grad(f, (0, 1, 2))).lower(q, k, v).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 4 * q.nbytes
    assert all(jnp.isfinite(x).all() for x in compiled(q, k, v))


def check_64k_tokens(kind):
    """A few queries, and the gradients from them alone, against float64."""
    t, chosen = 65536, jnp.array([0, 1, 127, 128, 30_001, 65_407, 65_408, 65_535])
    operand, cotangent = operands(1, t, t, 1, 2, 128), draw(1, chosen.size, 2, 128)

    def ours(q, k, v):
        return attend(q, k, v, causal=True)[:, chosen]

    def alone(q, k, v):
        seen = jnp.arange(t) <= chosen[:, None]
        return attend(q[:, chosen], k, v, mask=seen[None, None])

    def run(f, operand, cotangent):
        y, pull = jax.vjp(f, *operand)
        return y, *pull(cotangent.astype(y.dtype))

    with backend(kind, strict=True):
        found = jax.jit(run, static_argnums=0)(ours, operand, cotangent)
    with jax.enable_x64(True), backend("xla"):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), (operand, cotangent))
        truth = jax.jit(run, static_argnums=0)(alone, *wide)
    errors = relative_errors(found, truth, 0.0)
    assert max(errors) < EPSILON["bfloat16"], errors


def test_64k_tokens():
    check_64k_tokens("triton")


def check_on_two_gpus(spec, kind, call):
    """Under plain jit, forward and backward, each does its own without the other."""
    mesh = jax.make_mesh((2,), ("m",), axis_types=(AxisType.Auto,))
    whole = operands(2, 300, 300, 2, 2, 128)
    cut = [jax.device_put(x, NamedSharding(mesh, spec)) for x in whole]

    def both(q, k, v):
        y, pull = jax.vjp(lambda *x: attend(*x, causal=True), q, k, v)
        return y, pull(y)

    with backend(kind, strict=True):
        run = jax.jit(both).lower(*cut).compile()
        expected = jax.jit(both)(*whole)
    text = run.as_text()
    assert text.count(call) >= 2
    assert not re.findall(sharding_checks.COLLECTIVES, text)
    for y, e in zip(jax.tree.leaves(run(*cut)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.float32(y), np.float32(e))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("spec", [P("m"), P(None, None, "m")])
def test_two_gpus_share_sequences_or_heads(spec):
    check_on_two_gpus(spec, "triton", "triton_kernel_call")


def test_few_queries_are_refused_in_words():
    q, k, v = operands(1, 8, 64, 1, 1, 64)
    slope = jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum())
    forward, backward = explain(slope, q, k, v).rows
    assert forward.runs.startswith("triton: triton.attention.decode")
    assert "8 queries are no more than 8" in str(backward)


@pytest.mark.parametrize("check, dtype, sinks", ON_A_CARD)
def test_one_key_with_nearly_all_weight(check, dtype, sinks):
    with backend("triton", strict=True), jax.default_matmul_precision("highest"):
        check(jax.jit(slopes_of), 64, dtype, sinks)
