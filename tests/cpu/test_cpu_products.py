"""C++ products with bfloat16, float16 and affine weights: exact, batched, sharded."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import (
    backend,
    dequantize,
    explain,
    linear,
    matmul_transpose_b,
    quantize_affine,
    quantized_matmul,
    quantized_matmul_id,
)
from jaxkern.primitives.linear.linear import linear_p
from jaxkern.primitives.linear.policy import policy
from jaxkern.primitives.quant.affine_tensor import AffineTensor

COLLECTIVE = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute")


pytestmark = pytest.mark.usefixtures("kernels")


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def in_float64(x):
    return np.asarray(x).astype(np.float64)


def affine(f, d, bits=4, group_size=32, dtype=jnp.float32, packed=True, seed=1):
    options = {"bits": bits, "group_size": group_size, "packed": packed}
    with backend("xla"):
        w = quantize_affine(normal(f, d, seed=seed), **options)
    scales, biases = (a.astype(dtype) for a in (w.scales, w.biases))
    return AffineTensor(w.codes, scales, biases, bits, group_size)


def values_of(w):
    """The weights in float64, and the magnitudes that meet in each."""
    if isinstance(w, jax.Array):
        return in_float64(w), abs(in_float64(w))
    with backend("xla"), jax.enable_x64(True):
        values = in_float64(dequantize(w, dtype=jnp.float64))
        ones = dequantize(
            AffineTensor(w.codes, abs(w.scales), abs(w.biases), w.bits, w.group_size),
            dtype=jnp.float64,
        )
    return values, in_float64(ones)


def assert_product(y, x, w):
    """Within rounding of the float64 product, relative to the sum of magnitudes."""
    values, magnitudes = values_of(w)
    x = in_float64(x)
    error = np.abs(in_float64(y) - x @ values.T)
    eps = max(float(jnp.finfo(y.dtype).eps), 3e-7)
    assert (error <= 2 * eps * (np.abs(x) @ magnitudes.T)).all()


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_products(rows):
    x = normal(rows, 96)
    for w in (normal(37, 96, dtype=jnp.bfloat16), normal(37, 96, dtype=jnp.float16)):
        assert_product(linear(x, w), x, w)
    assert_product(quantized_matmul(x, w := affine(37, 96)), x, w)
    half = x.astype(jnp.bfloat16)
    w = affine(37, 128, bits=8, group_size=64, dtype=jnp.bfloat16)
    half = normal(rows, 128, dtype=jnp.bfloat16)
    assert_product(quantized_matmul(half, w), half, w)


@pytest.mark.full
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 31, 33, 140, 300])
def test_dense_products_of_any_size(rows):
    for d, f in ((1, 1), (35, 70), (576, 33), (2051, 192)):
        for x_dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
            for w_dtype in (jnp.bfloat16, jnp.float16):
                x, w = normal(rows, d, dtype=x_dtype), normal(f, d, dtype=w_dtype)
                assert_product(linear(x, w), x, w)
                with policy("bf16" if w_dtype == jnp.bfloat16 else "f16"):
                    assert_product(linear(x, w), x.astype(w_dtype), w)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_affine_products_of_any_size(bits, dtype):
    for group_size in (32, 64, 128):
        for f, d in ((1, 128), (37, 640), (70, 2048)):
            w = affine(f, d, bits, group_size, dtype)
            for rows in (1, 2, 3, 5, 6, 7, 40, 260):
                for x_dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
                    x = normal(rows, d, dtype=x_dtype)
                    assert_product(quantized_matmul(x, w), x, w)


def test_codes_of_a_byte_each():
    x = normal(3, 64)
    for bits in (3, 4):
        w = affine(10, 64, bits=bits, packed=False)
        assert_product(quantized_matmul(x, w), x, w)


def test_routed_products():
    w = jax.tree.map(lambda *a: jnp.stack(a), affine(19, 64), affine(19, 64, seed=2))
    values = np.stack([values_of(w[e])[0] for e in range(2)])
    for k in (2, 9):  # few rows of an expert, and many
        x, ids = normal(4, 64), np.arange(4 * k) % 4 - 1  # two of four are none
        y = quantized_matmul_id(x, w, jnp.asarray(ids, jnp.int8), top_k=k)
        expected = np.zeros((4 * k, 19))
        for i in np.flatnonzero((ids == 0) | (ids == 1)):
            expected[i] = values[ids[i]] @ in_float64(x)[i // k]
        np.testing.assert_allclose(y, expected, atol=1e-5)


def test_a_group_of_matrices_shares_a_weight():
    x, w = normal(2, 6, 5, 40), normal(2, 2, 19, 40, seed=1, dtype=jnp.bfloat16)
    y = matmul_transpose_b(x, w)
    expected = in_float64(x) @ np.repeat(in_float64(w), 3, axis=1).swapaxes(2, 3)
    np.testing.assert_allclose(y, expected, atol=1e-5)


def test_the_compute_dtype_rounds_x():
    x, w = normal(2, 64), normal(8, 64, seed=1, dtype=jnp.bfloat16)
    with policy("bf16"):
        rounded = linear(x, w)
    assert_product(rounded, x.astype(jnp.bfloat16), w)
    assert np.abs(in_float64(rounded - linear(x, w))).max() > 1e-3


def test_not_finite_activations_are_not_hidden():
    x = normal(3, 96).at[0, 3].set(jnp.nan).at[1, 40].set(jnp.inf)
    for w in (normal(37, 96, dtype=jnp.float16), affine(37, 96)):
        y = np.asarray(linear(x, w))
        assert not np.isfinite(y[:2]).any()
        assert np.isfinite(y[2]).all()


def test_not_finite_scales_stay_in_their_row():
    w = affine(21, 96, dtype=jnp.float16)
    scales = w.scales.at[7, 1].set(jnp.inf)
    w = AffineTensor(w.codes, scales, w.biases.at[9, 0].set(jnp.nan), 4, 32)
    for rows in (1, 9):
        finite = np.isfinite(quantized_matmul(normal(rows, 96), w)).all(0)
        assert list(np.flatnonzero(~finite)) == [7, 9]


def test_gradients_are_those_of_the_reference():
    x, dense, w = (
        normal(3, 64),
        normal(8, 64, seed=1, dtype=jnp.bfloat16),
        affine(8, 64),
    )

    def loss(x, dense, scales, biases):
        packed = AffineTensor(w.codes, scales, biases, 4, 32)
        y = jnp.sin(linear(x, dense)) + jnp.sin(quantized_matmul(x, packed))
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

    gradients = []
    for name in ("auto", "xla"):
        with backend(name):
            operands = (x, dense, w.scales, w.biases)
            gradients.append(jax.grad(loss, (0, 1, 2, 3))(*operands))
    for a, e in zip(*gradients, strict=True):
        assert a.dtype == e.dtype
        eps = float(jnp.finfo(e.dtype).eps)
        error = np.linalg.norm(in_float64(a) - in_float64(e))
        assert error <= 16 * eps * np.linalg.norm(in_float64(e))


def test_vmap_is_a_batch_dim_of_one_call():
    x = normal(3, 5, 64)
    dense = normal(3, 16, 64, seed=1, dtype=jnp.bfloat16)
    stack = jax.tree.map(lambda *a: jnp.stack(a), *(affine(16, 64),) * 3)
    for f, w, target in (
        (linear, dense, "matmul_transpose_b"),
        (quantized_matmul, stack, "affine_matmul"),
    ):
        mapped = jax.jit(jax.vmap(f)).lower(x, w).compile()
        text = mapped.as_text()
        assert text.count(f'custom_call_target="jaxkern_{target}"') == 1
        assert "while(" not in text
        expected = [f(x[i], w[i]) for i in range(3)]
        np.testing.assert_array_equal(mapped(x, w), expected)
        # nested, each level over another operand
        each = jax.vmap(jax.vmap(f, (0, None)), (None, 0))(x, w)
        np.testing.assert_allclose(each[1, 2], f(x[2], w[1]), atol=1e-5)


def test_sharded_rows_and_columns_gather_nothing():
    mesh = jax.make_mesh((4, 2), ("f", "rows"))

    def on(spec, a):
        return jax.device_put(a, NamedSharding(mesh, spec))

    x = normal(4, 64)
    for f, w, target in (
        (linear, normal(64, 64, dtype=jnp.bfloat16), "matmul_transpose_b"),
        (quantized_matmul, affine(64, 64), "affine_matmul"),
    ):
        expected = f(x, w)
        cut = on(P("rows", None), x), jax.tree.map(lambda a: on(P("f", None), a), w)
        compiled = jax.jit(f).lower(*cut).compile()
        text = compiled.as_text()
        assert f"jaxkern_{target}" in text
        assert not COLLECTIVE.search(text)
        np.testing.assert_allclose(compiled(*cut), expected, atol=1e-5)


def test_cut_columns_are_one_sum():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    x, w = normal(4, 64), normal(64, 64, dtype=jnp.bfloat16)
    cut = [jax.device_put(a, NamedSharding(mesh, P(None, "d"))) for a in (x, w)]
    compiled = jax.jit(linear).lower(*cut).compile()
    text = compiled.as_text()
    assert "jaxkern_matmul_transpose_b" in text
    assert {*COLLECTIVE.findall(text)} == {"all-reduce"}
    np.testing.assert_allclose(compiled(*cut), linear(x, w), atol=1e-5)


def test_refusals_in_words():
    x, w, bits_3 = normal(2, 64), affine(8, 64), affine(8, 64, bits=3)
    dense = normal(8, 64, dtype=jnp.bfloat16)
    cases = {
        "codes of 3 bits": lambda x: quantized_matmul(x, bits_3),
        "compute_dtype is int8": lambda x: quantized_matmul(x, w, compute_dtype="int8"),
        "`w` is float32": lambda x: matmul_transpose_b(x, x),
        "products of float16 with weights of bfloat16": lambda x: linear_p(
            x,
            dense,
            compute_dtype=jnp.dtype(jnp.float16),
            precision=None,
            preferred_element_type=jnp.dtype(jnp.float32),
        ),
    }
    with backend("auto"):
        for reason, f in cases.items():
            [row] = explain(f, x).rows
            assert row.runs.startswith("xla")
            assert reason in " ".join(row.refused)


def test_many_rows_stay_with_xla_unless_named():
    w = affine(8, 64)

    def row(x):
        [row] = explain(quantized_matmul, x, w).rows
        return row

    many = normal(300, 64)
    assert row(many).runs.endswith("cpu.quant.affine_matmul.affine_matmul")
    with backend("auto"):
        assert row(many).runs.startswith("xla")
        assert "XLA is faster, 300 rows" in " ".join(row(many).refused)
        assert row(many[:2]).runs.endswith("affine_matmul.affine_matmul")
