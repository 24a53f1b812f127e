"""C++ products with dense experts: exact, of any sizes, one call, refused in words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, explain, grouped_matmul, moe_ffn
from jaxkern.cpu.cpu_call import library
from tests.cpu.test_cpu_products import in_float64, normal

pytestmark = pytest.mark.usefixtures("kernels")


def assert_groups(y, x, w, sizes):
    """Within rounding of float64 products, relative to the sum of magnitudes."""
    x, w = in_float64(x), in_float64(w)
    group = np.repeat(np.arange(len(sizes)), sizes)[: len(x)]
    eps = max(float(jnp.finfo(y.dtype).eps), 3e-7)
    for i in range(len(x)):
        of_row = w[group[i]] if i < len(group) else 0 * w[0]
        error = np.abs(in_float64(y)[i] - of_row @ x[i])
        assert (error <= 2 * eps * (np.abs(of_row) @ np.abs(x[i]))).all()


DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def assert_any_dtypes(r, d, f, sizes):
    for x_dtype in DTYPES:
        for w_dtype in DTYPES:
            x = normal(r, d, dtype=x_dtype)
            w = normal(len(sizes), f, d, seed=1, dtype=w_dtype)
            y = grouped_matmul(x, w, jnp.asarray(sizes))
            assert y.dtype == x_dtype
            assert_groups(y, x, w, sizes)


def test_groups_of_any_dtype():
    """Empty groups, rows behind the last one, and a group that reaches beyond."""
    assert_any_dtypes(9, 35, 19, (3, 0, 4))
    x, w = normal(5, 40), normal(2, 6, 40, seed=1, dtype=jnp.bfloat16)
    for sizes in ((2, 7), (0, 0), (2**31 - 1, 2**31 - 1)):
        y = grouped_matmul(x, w, jnp.asarray(sizes, jnp.int32))
        assert_groups(y, x, w, np.minimum(sizes, 5))


@pytest.mark.full
def test_groups_of_any_size():
    for r, d, f, sizes in (
        (1, 2, 1, (1,)),
        (70, 33, 5, (0, 70, 0)),
        (300, 2051, 130, (1, 131, 0, 140)),
        (40, 64, 512, (2,) * 19),
    ):
        assert_any_dtypes(r, d, f, sizes)


def test_sums_of_narrow_operands_unrounded():
    x, w = (normal(*s, dtype=jnp.bfloat16) for s in ((4, 70), (2, 9, 70)))
    y = grouped_matmul(x, w, jnp.array([1, 3]), preferred_element_type=jnp.float32)
    assert y.dtype == jnp.float32
    assert_groups(y, x, w, (1, 3))


def mixture(t, e, f, d, k, dtype=jnp.float32):
    rng = np.random.default_rng(t)
    x, weights = normal(t, d, dtype=dtype), abs(normal(t, k, dtype=dtype))
    gate, up = (normal(e, f, d, seed=s, dtype=dtype) / d**0.5 for s in (1, 2))
    down = normal(e, d, f, seed=3, dtype=dtype) / f**0.5
    ids = jnp.asarray(rng.integers(-1, e + 1, (t, k)), jnp.int32)  # some are none
    return x, ids, weights, gate, up, down


def assert_mixture(t, activation):
    x, ids, *floats = mixture(t, 3, 21, 37, 2)
    op = functools.partial(moe_ffn, activation=activation)
    with backend("auto"):  # sorting rows, of many tokens, has no kernel
        y = op(x, ids, *floats)
    with jax.enable_x64(True), backend("xla"):
        wide = (jnp.asarray(in_float64(a)) for a in (x, *floats))
        expected = op(next(wide), ids, *wide)
    np.testing.assert_allclose(y, expected, atol=2e-5)


def test_a_mixture():
    assert_mixture(2, "swiglu")


@pytest.mark.full
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "geglu_tanh"])
@pytest.mark.parametrize("t", [1, 8, 9])
def test_mixtures(t, activation):
    assert_mixture(t, activation)


@pytest.mark.full
def test_a_mixture_rounds_where_the_reference_does():
    x, ids, *floats = mixture(2, 3, 21, 37, 2, dtype=jnp.bfloat16)
    actual = in_float64(moe_ffn(x, ids, *floats))
    with backend("xla"):
        expected = in_float64(moe_ffn(x, ids, *floats))
    assert np.abs(actual - expected).max() < 0.01 * np.abs(expected).max()


def test_rows_that_are_not_finite_stay_alone():
    x = normal(4, 70).at[1, 3].set(jnp.nan).at[2, 69].set(jnp.inf)
    for dtype in DTYPES:
        w = normal(2, 9, 70, seed=1, dtype=dtype)
        finite = np.isfinite(grouped_matmul(x, w, jnp.array([2, 2])))
        assert finite.all(1).tolist() == [True, False, False, True]
        assert finite.any(1).tolist() == [True, False, False, True]


def test_vmap_is_a_batch_dim_of_one_call():
    x, w = normal(3, 6, 40), normal(3, 2, 9, 40, seed=1, dtype=jnp.bfloat16)
    sizes = jnp.array([[1, 5], [6, 0], [2, 2]])
    for axes in ((0, 0, 0), (0, None, 0), (None, 0, None)):
        one = [
            a if axis == 0 else a[0]
            for a, axis in zip((x, w, sizes), axes, strict=True)
        ]
        mapped = jax.jit(jax.vmap(grouped_matmul, axes)).lower(*one).compile()
        calls = mapped.as_text().count('custom_call_target="jaxkern_expert_matmul"')
        assert calls == 1
        for i, y in enumerate(mapped(*one)):
            each = (
                a if axis is None else a[i] for a, axis in zip(one, axes, strict=True)
            )
            np.testing.assert_array_equal(y, grouped_matmul(*each))


@pytest.mark.full
def test_gradients_are_those_of_the_reference():
    x, ids, *floats = mixture(3, 3, 8, 16, 2)

    def loss(x, *floats):
        return jnp.sum(jnp.sin(moe_ffn(x, ids, *floats)))

    every = tuple(range(5))
    with backend("auto"):
        actual = jax.grad(loss, every)(x, *floats)
    with backend("xla"):
        expected = jax.grad(loss, every)(x, *floats)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=1e-5)


def test_refusals_in_words():
    x, w = normal(2, 1), normal(2, 3, 1)
    sizes = jnp.array([1, 1])
    cases = {
        "`d` is 1: XLA gathers": (x, w),
        "`x` is empty": (x[:0], w),
        "there are no groups": (x, w[:0]),
    }
    with backend("auto"):
        for reason, operands in cases.items():
            [row] = explain(grouped_matmul, *operands, sizes[: len(operands[1])]).rows
            assert row.runs.startswith("xla")
            assert reason in " ".join(row.refused)
        [row] = explain(grouped_matmul, normal(2, 9), normal(2, 3, 9), sizes).rows
        assert row.runs.endswith("cpu.moe.grouped_matmul.grouped_matmul")
        names = {
            row.op: row.runs for row in explain(moe_ffn, *mixture(2, 3, 4, 5, 2)).rows
        }
        assert names["moe_ffn_few"].endswith("cpu.moe.moe_ffn_few.moe_ffn_few")


def test_many_narrow_rows_of_an_expert_stay_with_xla_without_avx512(monkeypatch):
    monkeypatch.setattr(library(), "instruction_set", "avx2")
    x, w, sizes = normal(18, 11), normal(2, 3, 11), jnp.array([9, 9])
    with backend("auto"):
        [row] = explain(grouped_matmul, x, w, sizes).rows
        assert row.runs.startswith("cpp")
        [row] = explain(grouped_matmul, x, w.astype(jnp.bfloat16), sizes).rows
    assert row.runs.startswith("xla")
    assert "9 rows an expert without AVX-512" in " ".join(row.refused)
