"""The C++ kernels as JAX sees them: chosen, exact, batched, sharded, differentiable."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import (
    attention,
    backend,
    explain,
    interleave,
    quantized_embedding,
    quantized_matmul,
    quantized_matmul_add,
    quantized_matmul_id,
    quantized_rms_norm_matmul,
    quantized_swiglu,
)
from jaxkern.cpu import cpu_call
from jaxkern.cpu.quant.quantized_matmul import WITHOUT_KERNEL
from jaxkern.primitives.quant.fused_products import interleaved_swiglu_p
from jaxkern.primitives.quant.interleaved_tensor import UNITS
from tests.primitives.quant.block_bytes import QTYPES, weight

BLOCKS = [q for q in QTYPES if q not in ("F32", "F16", "BF16", *WITHOUT_KERNEL)]
COLLECTIVE = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute")


pytestmark = pytest.mark.usefixtures("kernels")


def normal(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def rounded_to_int8(x):
    """By blocks of 32, in float64."""
    blocks = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    return (np.rint(blocks / scale) * scale).reshape(x.shape)


def assert_product(x, w, values, compute_dtype):
    """Within float32 rounding of the float64 product with the rounded activations."""
    y = np.asarray(quantized_matmul(x, w, compute_dtype=compute_dtype), np.float64)
    x64 = np.asarray(x, np.float64)
    if compute_dtype is not None:
        x64 = rounded_to_int8(x64)
    bound = np.abs(x64) @ np.abs(values).T
    eps = max(float(jnp.finfo(x.dtype).eps), 3e-7)
    assert (np.abs(y - x64 @ values.T) <= 2 * eps * bound).all()


@pytest.mark.parametrize("qtype", ["Q4_1", "Q8_0", "Q6_K"])
def test_products_with_rounded_activations(qtype):
    w, values = weight(qtype, 32, 512)
    for rows, dtype in ((1, jnp.float32), (5, jnp.bfloat16)):
        for tensor in (w, interleave(w)):
            assert_product(normal(rows, 512, dtype=dtype), tensor, values, jnp.int8)


@pytest.mark.full
@pytest.mark.parametrize("compute_dtype", [None, jnp.int8])
@pytest.mark.parametrize("qtype", BLOCKS)
def test_products_of_every_format(qtype, compute_dtype):
    for f in (16, 37, 160):
        w, values = weight(qtype, f, 768)
        tensors = [w] if f % 16 or qtype not in UNITS else [w, interleave(w)]
        for rows in (1, 2, 3, 9, 140):
            for tensor in tensors:
                assert_product(normal(rows, 768), tensor, values, compute_dtype)


@pytest.mark.parametrize(
    "rows, dtype, compute_dtype",
    [(1, jnp.float32, jnp.int8), (9, jnp.bfloat16, jnp.int8), (3, jnp.float32, None)],
)
def test_gated_and_added_products(rows, dtype, compute_dtype):
    w, values = weight("Q4_1", 96, 512)
    x, residual = normal(rows, 512, dtype=dtype), normal(rows, 96, seed=1, dtype=dtype)
    x64 = np.asarray(x, np.float64)
    x64 = x64 if compute_dtype is None else rounded_to_int8(x64)
    product, bound = x64 @ values.T, np.abs(x64) @ np.abs(values).T
    eps = 2 * max(float(jnp.finfo(dtype).eps), 3e-7)
    options = {"compute_dtype": compute_dtype}
    y = quantized_matmul_add(x, interleave(w), residual, **options)
    error = np.abs(np.asarray(y, np.float64) - product - np.asarray(residual))
    assert (error <= eps * (bound + np.abs(residual))).all()
    y = np.asarray(quantized_swiglu(x, interleave(w), **options), np.float64)
    gate, up = product[:, :48], product[:, 48:]
    expected = gate / (1 + np.exp(-np.maximum(gate, -700))) * up
    # silu grows by at most 1.1 a unit
    bound = 1.1 * bound[:, :48] * np.abs(up) + np.abs(gate) * bound[:, 48:]
    assert (np.abs(y - expected) <= eps * bound).all()


@pytest.mark.parametrize(
    "rows, dtype, compute_dtype",
    [(1, jnp.float32, jnp.int8), (19, jnp.bfloat16, jnp.int8), (3, jnp.bfloat16, None)],
)
def test_products_of_normalised_rows(rows, dtype, compute_dtype):
    w, values = weight("Q4_1", 96, 512)
    x, norm = normal(rows, 512, dtype=dtype), normal(512, seed=1, dtype=jnp.bfloat16)
    x64 = np.asarray(x, np.float64)
    x64 /= np.sqrt((x64**2).mean(-1, keepdims=True) + 0.5)
    x64 *= np.asarray(norm, np.float64)
    one_code = 0
    if compute_dtype is not None:  # float32 may round one code the other way
        one_code = np.abs(x64).max() / 127 * np.abs(values).max()
        x64 = rounded_to_int8(x64)
    product, bound = x64 @ values.T, np.abs(x64) @ np.abs(values).T
    bound = 2 * max(float(jnp.finfo(dtype).eps), 6e-7) * bound + one_code
    options = {"eps": 0.5, "compute_dtype": compute_dtype}
    y = quantized_rms_norm_matmul(x, norm, interleave(w), **options)
    assert (np.abs(np.asarray(y, np.float64) - product) <= bound).all()
    y = np.asarray(quantized_swiglu(x, interleave(w), norm, **options), np.float64)
    gate, up = product[:, :48], product[:, 48:]
    expected = gate / (1 + np.exp(-np.maximum(gate, -700))) * up
    bound = 1.1 * bound[:, :48] * np.abs(up) + np.abs(gate) * bound[:, 48:]
    eps = 2 * float(jnp.finfo(dtype).eps) * np.abs(expected)
    assert (np.abs(y - expected) <= 1.01 * bound + eps).all()


def test_gated_products_under_vmap_and_sharded():
    w = interleave(weight("Q4_0", 2, 64, 64)[0])
    x, norm = normal(2, 8, 64), normal(64, seed=1)

    def product(x, w):
        return quantized_swiglu(x, w, norm, compute_dtype=jnp.int8)

    mapped = jax.jit(jax.vmap(product)).lower(x, w).compile()
    assert mapped.as_text().count('custom_call_target="jaxkern_rms_norm_matmul"') == 1
    expected = [product(x[i], w[i]) for i in range(2)]
    np.testing.assert_array_equal(mapped(x, w), expected)
    mesh = jax.make_mesh((2, 2), ("f", "rows"))
    tiles = w.tiles[0].reshape(2, 2, -1)

    def of_tiles(x, tiles):
        options = dict(qtype="Q4_0", compute_dtype=jnp.dtype(jnp.int8), eps=1e-6)
        return interleaved_swiglu_p(x, tiles, norm, None, activation="silu", **options)

    cut = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in ((x[0], P("rows", None)), (tiles, P(None, "f", None)))
    ]
    compiled = jax.jit(of_tiles).lower(*cut).compile()
    assert not COLLECTIVE.search(compiled.as_text())
    np.testing.assert_array_equal(compiled(*cut).reshape(8, 32), expected[0])


def test_explain_names_the_form_of_the_activations():
    w = interleave(weight("Q4_0", 16, 32)[0])

    def runs(**options):
        [row] = explain(lambda x: quantized_matmul(x, w, **options), normal(2, 32)).rows
        return row.runs

    assert runs().endswith("cpu.quant.interleaved_matmul.f32_activations")
    assert runs(compute_dtype=jnp.int8).endswith(".int8_activations")
    with backend("auto"):
        assert runs(compute_dtype=jnp.bfloat16).startswith("xla")


def test_not_finite_activations_are_not_hidden():
    w, _ = weight("Q4_0", 16, 64)
    x = normal(3, 64).at[0, 3].set(jnp.nan).at[1, 40].set(jnp.inf)
    for options in ({}, {"compute_dtype": jnp.int8}):
        y = np.asarray(quantized_matmul(x, interleave(w), **options))
        assert not np.isfinite(y[:2]).any()
        assert np.isfinite(y[2]).all()


def test_int8_activations_have_a_straight_through_gradient():
    w, values = weight("Q4_1", 16, 64)
    x = normal(2, 64)

    def loss(x):
        return jnp.sum(quantized_matmul(x, interleave(w), compute_dtype=jnp.int8))

    with backend("auto"):
        gradient = jax.grad(loss)(x)
    expected = np.broadcast_to(values.sum(0), x.shape)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


def test_vmap_is_a_batch_dim_of_one_call():
    w, _ = weight("Q4_0", 3, 16, 64)
    tiles = interleave(w)
    x = normal(3, 5, 64)

    def products(x, w):
        return quantized_matmul(x, w, compute_dtype=jnp.int8)

    mapped = jax.jit(jax.vmap(products))
    text = mapped.lower(x, tiles).compile().as_text()
    assert text.count('custom_call_target="jaxkern_quantized_matmul"') == 1
    assert "while(" not in text
    expected = [products(x[i], tiles[i]) for i in range(3)]
    np.testing.assert_array_equal(mapped(x, tiles), expected)
    # nested, each level over another operand
    each = jax.vmap(jax.vmap(products, (0, None)), (None, 0))(x, tiles)
    expected = [[products(x[i], tiles[j]) for i in range(3)] for j in range(3)]
    np.testing.assert_array_equal(each, expected)


def test_sharded_rows_and_columns_gather_nothing():
    w = interleave(weight("Q4_0", 64, 64)[0])
    x = normal(8, 64)
    mesh = jax.make_mesh((4, 2), ("f", "rows"))

    def on(spec, a):
        return jax.device_put(a, NamedSharding(mesh, spec))

    def product(x, w):
        return quantized_matmul(x, w, compute_dtype=jnp.int8)

    expected = product(x, w)
    cut = on(P("rows", None), x), jax.tree.map(lambda a: on(P("f", None), a), w)
    compiled = jax.jit(product).lower(*cut).compile()
    text = compiled.as_text()
    assert "jaxkern_quantized_matmul" in text
    assert not COLLECTIVE.search(text)
    np.testing.assert_array_equal(compiled(*cut), expected)


def test_routed_products_and_rows():
    w, values = weight("Q8_0", 3, 16, 64)
    x, ids = normal(4, 64), jnp.array([2, 0, 1, 1, -1, 3, 0, 2], jnp.int8)
    expected = np.zeros((8, 16))
    for r, e in enumerate(np.asarray(ids)):
        if 0 <= e < 3:
            expected[r] = np.asarray(x, np.float64)[r // 2] @ values[e].T
    for tensor in (w, interleave(w)):
        y = quantized_matmul_id(x, tensor, ids, top_k=2)
        np.testing.assert_allclose(y, expected, atol=1e-5)
        rows = quantized_embedding(jnp.array([15, 16, 0]), tensor[1])
        np.testing.assert_array_equal(rows[1], np.zeros(64))
        np.testing.assert_array_equal(rows[0], values[1, 15].astype(np.float32))


def attention_in_float64(q, k, v, lengths, window, softcap):
    """Causal, the last query at the last key."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    t, n, h = q.shape[1:]
    g = n // k.shape[2]
    k, v = (np.repeat(a, g, axis=2) for a in (k, v))
    logits = np.einsum("btnh,bsnh->bnts", q, k) * h**-0.5
    logits = softcap * np.tanh(logits / softcap)
    position = np.arange(t)[None, :] + (lengths - t)[:, None]
    j = np.arange(k.shape[1])
    seen = (j <= position[..., None]) & (j > position[..., None] - window)
    logits = np.where(seen[:, None], logits, -np.inf)
    top = logits.max(-1, keepdims=True)
    p = np.exp(logits - np.where(np.isfinite(top), top, 0))
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-300)
    return np.einsum("bnts,bsnh->btnh", p, v)


@pytest.mark.parametrize(
    "t, s, dtype", [(1, 600, jnp.float32), (21, 40, jnp.float32), (2, 90, jnp.bfloat16)]
)
def test_attention(t, s, dtype):
    q, k, v = (
        normal(2, n, heads, 24, seed=n, dtype=dtype)
        for n, heads in ((t, 6), (s, 2), (s, 2))
    )
    lengths = np.array([s, s // 2])
    y = attention(
        q,
        k,
        v.at[1, s // 2 :].set(jnp.nan),  # behind the length: without influence
        kv_lengths=jnp.asarray(lengths),
        q_offset=jnp.asarray(lengths - t),
        causal=True,
        window=30,
        softcap=4.0,
    )
    expected = attention_in_float64(q, k, v, lengths, 30, 4.0)
    eps = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=max(eps, 2e-6))


def test_attention_under_vmap_and_its_gradient():
    q, k = normal(3, 1, 4, 4, 16), normal(3, 1, 9, 2, 16, seed=1)

    def f(q, k):
        return attention(q, k, k, causal=True)

    batched = jax.jit(jax.vmap(f)).lower(q, k).compile()
    assert batched.as_text().count('custom_call_target="jaxkern_attention"') == 1
    expected = [f(q[i], k[i]) for i in range(3)]
    np.testing.assert_allclose(batched(q, k), expected, atol=1e-6)

    def loss(q, k):
        return jnp.sum(jnp.sin(f(q, k)))

    gradients = []
    for name in ("auto", "xla"):
        with backend(name):
            gradients.append(jax.grad(loss, (0, 1))(q[0], k[0]))
    for a, e in zip(*gradients, strict=True):
        np.testing.assert_allclose(a, e, atol=1e-5)


@pytest.mark.parametrize("qtype", WITHOUT_KERNEL)
def test_a_format_without_a_kernel_is_refused_in_words(qtype):
    w, values = weight(qtype, 16, 256)
    x = normal(2, 256)
    with pytest.raises(ValueError, match=f"{qtype} has no kernel"):
        quantized_matmul(x, w)
    with backend("auto"):
        np.testing.assert_allclose(
            quantized_matmul(x, w), np.asarray(x, np.float64) @ values.T, atol=1e-3
        )
        rows = explain(lambda x: quantized_matmul(x, w), x).rows
    assert [row.runs for row in rows] == ["xla: quantized_matmul_reference"]


def test_where_no_library_is_found_every_op_runs_and_one_notice_says_so(
    monkeypatch, caplog
):
    monkeypatch.setattr(cpu_call, "LIBRARY", "no_such_library.so")
    cpu_call.library.cache_clear()
    try:
        w = interleave(weight("Q4_0", 16, 32)[0])
        with backend("auto"):
            y = quantized_matmul(normal(2, 32), w)
            [row] = explain(lambda x: quantized_matmul(x, w), normal(2, 32)).rows
        assert row.runs == "xla: interleaved_matmul_reference"
        assert any("no compiler" in reason for reason in row.refused)
        assert [r.name for r in caplog.records].count("jaxkern") == 1
    finally:
        monkeypatch.undo()
        cpu_call.library.cache_clear()
        jax.clear_caches()
    np.testing.assert_allclose(quantized_matmul(normal(2, 32), w), y, rtol=1e-5)
