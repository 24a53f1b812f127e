"""The C++ kernels of plain operators: the reference's answers, chosen, batched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    IntCodec,
    add_rms_norm,
    attention,
    backend,
    dequantize_vectors,
    explain,
    gated_delta_rule,
    gated_delta_step,
    layer_norm,
    quantize_vectors,
    quantized_cache_attention,
    rms_norm,
    top_k,
)
from jaxkern.primitives.index.argmax import argmax_p
from jaxkern.primitives.index.top_k import top_k_p
from jaxkern.primitives.sampling.sample import sample_p

pytestmark = pytest.mark.usefixtures("kernels")


def by_both(f, *operands):
    """The kernel's answers and the reference's."""
    kernel = f(*operands)
    with backend("xla"):
        return kernel, f(*operands)


def rows_of(kind: str, b: int, v: int, dtype) -> jax.Array:
    rng = np.random.default_rng(v)
    x = rng.normal(size=(b, v)) * 3
    if kind == "ties":
        x = np.round(x)
        x[x == 0] = np.where(rng.random((x == 0).sum()) < 0.5, 0.0, -0.0)
    if kind == "not finite":
        for value in (-np.inf, np.nan, np.inf):
            x[:, 1:][rng.random((b, v - 1)) < 0.2] = value
        x[0] = -np.inf
        x[-1] = np.nan
    return jnp.asarray(x, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["plain", "ties", "not finite"])
def test_selection(kind, dtype):
    """Exactly the reference: ties, zeros of both signs, NaN, infinities, odd sizes."""
    x = rows_of(kind, 3, 1003, dtype)
    for nan_policy in ("propagate", "ignore"):

        def best(x, nan_policy=nan_policy):
            return argmax_p(x, nan_policy=nan_policy)

        np.testing.assert_array_equal(*by_both(best, x))
    for k in (1, 40, 1003):
        for a, e in zip(*by_both(lambda x, k=k: top_k_p(x, k=k), x), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(e).tobytes()


def assert_same_tokens(b, v, dtype, seed):
    rng = np.random.default_rng(seed)
    for kind in ("plain", "ties", "not finite"):
        logits = rows_of(kind, b, v, dtype)
        uniform = jnp.asarray(rng.random(b), jnp.float32)
        choices = {
            "temperature": [0.0, 0.1, 0.8, np.inf],
            "top_k": [-1, 0, 1, 40, v, 2**31 - 1],
            "top_p": [0.0, 0.1, 0.95, 0.9999, 1.0],
            "min_p": [0.0, 0.05, 1.0, 2.0],
        }
        temperature, k, p, m = (
            jnp.asarray(rng.choice(c, b), jnp.int32 if n == "top_k" else jnp.float32)
            for n, c in choices.items()
        )
        for cuts in ((None, None, None), (k, None, None), (None, p, m), (k, p, m)):
            kernel = sample_p(logits, uniform, temperature, *cuts)
            with jax.enable_x64(True), backend("xla"):
                exact = sample_p(
                    *(
                        x if x is None or x.dtype == jnp.int32 else in_float64(x)
                        for x in (logits, uniform, temperature, *cuts)
                    )
                )
            np.testing.assert_array_equal(kernel, exact)


def in_float64(x):
    return jnp.asarray(np.asarray(x).astype(np.float64))


def test_tokens():
    """Those of the float64 reference, with every cut and temperature at once."""
    assert_same_tokens(7, 700, "float32", 0)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("v", [2, 127, 129, 5003, 49152])
def test_tokens_of_rows_of_any_length(v, dtype):
    for b in (1, 2, 9):  # fewer rows than threads are divided
        assert_same_tokens(b, v, dtype, b)


def test_tokens_follow_their_probabilities():
    p = np.array([0.1, 0.2, 0.0, 0.4, 0.3])
    u = jnp.arange(1000, dtype=jnp.float32) / 1000 + 0.0005
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (1000, 5))
    tokens = sample_p(logits, u, jnp.ones(1000), None, None, None)
    np.testing.assert_allclose(np.bincount(tokens, minlength=5) / 1000, p, atol=1e-3)


def test_sampling_under_vmap_is_one_call():
    logits = rows_of("plain", 6, 300, "float32").reshape(2, 3, 300)
    u = jnp.linspace(0.05, 0.95, 3)

    def draw(logits, u):  # one row of logits, mapped over two of the axes
        return sample_p(logits, u, jnp.ones(()), None, None, None)

    mapped = jax.jit(jax.vmap(jax.vmap(draw), (0, None)))
    text = mapped.lower(logits, u).compile().as_text()
    assert text.count('custom_call_target="jaxkern_sample"') == 1
    expected = [[draw(logits[i, j], u[j]) for j in range(3)] for i in range(2)]
    np.testing.assert_array_equal(mapped(logits, u), expected)


def test_short_rows_stay_with_xla_unless_named():
    def runs():
        [row] = explain(lambda x: top_k(x, 8), jnp.ones((4, 64))).rows
        return row

    assert runs().runs.endswith("cpu.index.top_k.top_k")
    with backend("auto"):
        assert runs().runs.startswith("xla")
        assert "XLA is faster" in " ".join(runs().refused)


@pytest.mark.parametrize("t", [2, 7])  # rows as in decoding, and as in prefill
def test_attention_over_caches_of_bytes(t):
    rng = np.random.default_rng(t)
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, n, heads, 32)), jnp.float32)
        for n, heads in ((t, 6), (90, 2), (90, 2))
    )
    codec = IntCodec(8)
    with backend("xla"):
        keys, values = quantize_vectors(k, codec), quantize_vectors(v, codec)
        decoded = {id(x): dequantize_vectors(x) for x in (keys, values)}
    lengths = jnp.array([90, 50])
    options = {"kv_lengths": lengths, "q_offset": lengths - t, "causal": True}
    options |= {"window": 40, "softcap": 5.0, "return_lse": True}
    for key, value in ((keys, values), (k, values), (keys, v)):
        exact = (decoded.get(id(x), x) for x in (key, value))
        with jax.enable_x64(True), backend("xla"):
            expected = attention(*map(in_float64, (q, *exact)), **options)
        actual = quantized_cache_attention(q, key, value, **options)
        for a, e in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, e, atol=3e-6)

    def each(q, key, value):
        return quantized_cache_attention(q[None], key, value)[0]

    mapped = jax.jit(jax.vmap(each, (0, None, None)))
    first = jax.tree.map(lambda x: x[:1], (keys, values))
    text = mapped.lower(q, *first).compile().as_text()
    assert text.count('custom_call_target="jaxkern_attention"') == 1
    for a, row in zip(mapped(q, *first), q, strict=True):
        np.testing.assert_allclose(a, each(row, *first), atol=1e-6)


def test_other_codecs_are_refused_in_words():
    with backend("auto"):
        x = quantize_vectors(jnp.ones((1, 4, 1, 32)), IntCodec(4))
        [row] = explain(quantized_cache_attention, jnp.ones((1, 1, 2, 32)), x, x).rows
    assert row.runs.startswith("xla")
    assert "codes of 8 bits" in " ".join(row.refused)


NORMS = {
    "rms_norm": lambda x, r, w, b: rms_norm(x, w, b, offset=1.0),
    "no weight": lambda x, r, w, b: rms_norm(x),
    "add_rms_norm": lambda x, r, w, b: add_rms_norm(x, r, w),
    "layer_norm": lambda x, r, w, b: layer_norm(x, w, b),
}


def values_and_gradients(f, *operands):
    out, pull = jax.vjp(f, *operands)
    cotangents = jax.tree.map(lambda y: jnp.cos(y.astype("float32") * 3), out)
    return out, pull(jax.tree.map(lambda c, y: c.astype(y.dtype), cotangents, out))


def assert_norm(f, dtype, rows, d):
    rng = np.random.default_rng(d)
    shapes = (*rows, d), (*rows, d), (d,), (d,)
    operands = [jnp.asarray(rng.normal(size=s) + 1, dtype) for s in shapes]
    actual = values_and_gradients(f, *operands)
    with jax.enable_x64(True), backend("xla"):
        expected = values_and_gradients(f, *map(in_float64, operands))
    eps = float(jnp.finfo(dtype).eps)
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        a, e = np.asarray(a).astype(np.float64), np.asarray(e)
        assert np.linalg.norm(a - e) <= 8 * eps * np.linalg.norm(e)


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    assert_norm(NORMS[name], jnp.float32, (2, 3), 37)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_any_size(name, dtype):
    for rows, d in (((1,), 3), ((3,), 16), ((700,), 129), ((2, 40), 4099)):
        assert_norm(NORMS[name], dtype, rows, d)


def test_norms_of_rows_that_are_not_finite():
    x = jnp.ones((3, 40)).at[0, 3].set(jnp.nan).at[1, 5].set(jnp.inf)
    for name in ("no weight", "layer_norm"):
        w = jnp.ones(40)
        y = np.asarray(NORMS[name](x, x, w, w))
        assert np.isnan(y[0]).any() and np.isnan(y[1, 5])
        assert np.isfinite(y[2]).all()


def test_the_gradient_of_a_norm_under_vmap_is_one_call():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 20)), jnp.float32)
    w = jnp.linspace(1, 2, 20)

    def gradients(x, w):
        return jax.vjp(rms_norm, x, w)[1](jnp.cos(x))

    mapped = jax.jit(jax.vmap(gradients, (0, None)))
    text = mapped.lower(x, w).compile().as_text()
    assert text.count('custom_call_target="jaxkern_norm_gradient"') == 1
    for i in range(3):
        for a, e in zip(mapped(x, w), gradients(x[i], w), strict=True):
            np.testing.assert_allclose(a[i], e, atol=1e-5)


def test_norms_run_where_they_are_faster():
    def rows(count):
        x, w = jnp.ones((count, 8)), jnp.ones(8)
        with backend("auto"):
            found = explain(lambda x, w: jax.vjp(rms_norm, x, w)[1](x), x, w).rows
        return {row.op: row for row in found}

    few, many = rows(8), rows(4096)
    assert "XLA is faster" in " ".join(few["rms_norm_fwd"].refused)
    assert few["rms_norm_bwd"].runs.startswith("xla")
    assert many["rms_norm_bwd"].runs.endswith("cpu.norm.rms_norm.rms_norm_bwd")


def test_a_norm_that_is_never_faster_runs_under_no_vmap_unasked():
    """Recorded vmaps too: the test above has none, and there the answer was skipped."""
    x, weights = jnp.ones((3, 5, 8)), jnp.ones((3, 8))
    for axes, w in ((0, None), weights[0]), ((None, 0), weights):
        mapped = jax.vmap(rms_norm, axes)
        operand = x if axes[0] == 0 else x[0]
        with backend("auto"):
            (row,) = explain(mapped, operand, w).rows
        assert row.runs.startswith("xla") and "XLA is faster" in row.refused[0]
        with backend("cpp"):
            (row,) = explain(mapped, operand, w).rows
        assert row.runs.startswith("cpp"), "asked for by name"


def delta_rule_operands(b, t, k, n, h, hv):
    rng = np.random.default_rng(t)
    sizes = (b, t, k, h), (b, t, k, h), (b, t, n, hv), (b, t, n), (b, t, n)
    q, key, v, g, beta = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in sizes)
    state = jnp.asarray(rng.normal(size=(b, n, h, hv)), jnp.float32)
    return q, key / h**0.5, v, -jnp.abs(g), jax.nn.sigmoid(beta), state


def assert_delta_rule(op, operands, dtype=jnp.float32):
    operands = [x.astype(dtype) for x in operands]
    actual = op(*operands)
    with jax.enable_x64(True), backend("xla"):
        expected = op(*map(in_float64, operands))
    for a, e in zip(actual, expected, strict=True):
        a, e = np.asarray(a).astype(np.float64), np.asarray(e)
        eps = float(jnp.finfo(dtype).eps)
        assert np.linalg.norm(a - e) <= 16 * eps * np.linalg.norm(e)


def in_chunks(q, k, v, g, beta, state):
    return gated_delta_rule(q, k, v, g, beta, initial_state=state, chunk_size=4)


def test_delta_rule():
    """The recurrence against the chunked form, and its step."""
    q, k, v, g, beta, state = delta_rule_operands(2, 9, 2, 4, 7, 37)
    assert_delta_rule(in_chunks, (q, k, v, g.at[0, 3].set(-jnp.inf), beta, state))
    token = (x[:, 0] for x in (q, k, v, g, beta))
    assert_delta_rule(gated_delta_step, (*token, state))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_delta_rule_of_any_size(dtype):
    sizes = ((1, 1, 1, 1, 1, 1), (1, 130, 2, 2, 64, 64), (3, 5, 1, 3, 128, 33))
    for b, t, k, n, h, hv in sizes:
        operands = delta_rule_operands(b, t, k, n, h, hv)
        assert_delta_rule(in_chunks, operands, dtype)
    assert_delta_rule(gated_delta_rule, operands[:5], dtype)  # from zeros


@pytest.mark.full
def test_delta_step_under_vmap_and_its_gradient():
    operands = [x[:, 0] for x in delta_rule_operands(3, 1, 1, 2, 8, 32)[:5]]
    state = delta_rule_operands(3, 1, 1, 2, 8, 32)[5]

    def each(state, *token):
        return gated_delta_step(*(x[None] for x in token), state[None])[0][0]

    mapped = jax.jit(jax.vmap(each))
    text = mapped.lower(state, *operands).compile().as_text()
    assert text.count('custom_call_target="jaxkern_delta_rule"') == 1
    expected = gated_delta_step(*operands, state)[0]
    np.testing.assert_allclose(mapped(state, *operands), expected, atol=1e-6)

    def loss(state):
        return jnp.sum(jnp.sin(gated_delta_step(*operands, state)[0]))

    with backend("auto"):
        actual = jax.grad(loss)(state)
    with backend("xla"):
        np.testing.assert_allclose(actual, jax.grad(loss)(state), atol=1e-5)


@pytest.mark.parametrize("t", [1, 8])
def test_gradients_of_few_queries_with_large_scores(t):
    """The others have scores of about 1, where the order of a sum does not show."""
    rng = np.random.default_rng(t)
    shapes = (1, t, 4, 64), (1, 1024, 4, 64), (1, 1024, 4, 64), (1, t, 4, 64)
    q, k, v, dout = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    q *= 8

    def gradients(name, *operands):
        with backend(name):
            return jax.vjp(attention, *operands[:3])[1](operands[3])

    operands = (q, k, v, dout)
    ours, theirs = (gradients(name, *operands) for name in ("auto", "xla"))
    with jax.enable_x64(True):
        exact = gradients("xla", *(np.float64(x) for x in operands))
    for a, b, e in zip(ours, theirs, exact, strict=True):
        a, b, e = (np.asarray(x) for x in (a, b, e))
        assert np.linalg.norm(a - e) <= 1.1 * np.linalg.norm(b - e)
