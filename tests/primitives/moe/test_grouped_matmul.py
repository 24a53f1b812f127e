"""grouped_matmul against a loop over groups in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxkern import (
    backend,
    dequantize,
    grouped_matmul,
    quantize_fp8,
    quantize_microscaled,
    quantized_matmul_id,
)
from jaxkern.testing.checks import Spec, bf16, case, f32
from jaxkern.testing.sharding_checks import mesh_of
from tests.primitives.quant.block_bytes import weight


def sizes(*values: int) -> Spec:
    return Spec((len(values),), np.int32, lambda rng, s: np.asarray(values))


CASES = [
    case("plain", x=f32(11, 8), w=f32(4, 16, 8), group_sizes=sizes(3, 0, 5, 2)),
    case("empty", x=f32(0, 4), w=f32(2, 3, 4), group_sizes=sizes(0, 0)),
    case("odd", x=bf16(5, 3), w=bf16(2, 5, 3), group_sizes=sizes(5, 0)),
    case(
        "one_column",
        x=f32(11, 1),
        w=bf16(4, 16, 1),
        group_sizes=sizes(3, 0, 5, 2),
        full=True,
    ),
    case(
        "qwen3_30b_on_one_of_8_devices",
        x=bf16(64, 2048),
        w=bf16(16, 768, 2048),
        group_sizes=Spec(
            (16,), np.int32, lambda rng, s: rng.multinomial(60, np.ones(16) / 16)
        ),
        full=True,
    ),
]

SIZES = {
    "several": [3, 0, 7, 1],
    "all to the first": [13, 0, 0, 0],
    "all to the last": [0, 0, 0, 13],
    "none": [0, 0, 0, 0],
    "rows left over": [2, 0, 3, 1],
    "more than there are": [4, 8, 9, 1],
}


def loop(x, w, group_sizes):
    """Dense products, one group at a time; also the gradients of `sum(y * dy)`."""
    y, start = np.zeros((len(x), w.shape[1])), 0
    groups = []
    for g, n in enumerate(group_sizes):
        rows = slice(start, min(start + n, len(x)))
        y[rows] = x[rows] @ w[g].T
        groups.append(rows)
        start += n
    return y, groups


@jax.jit
def product_and_gradients(x, w, group_sizes, dy):
    y, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, group_sizes), x, w)
    return y, *vjp(dy)


@pytest.mark.parametrize("group_sizes", SIZES.values(), ids=SIZES)
def test_equals_the_loop_over_groups(group_sizes):
    check_values_and_gradients(group_sizes, 6, 5)


@pytest.mark.parametrize("d, f", [(1, 5), (6, 1)])
def test_a_single_column(d, f):
    """Of x, whose products take no loop, or of y, which is so for dx."""
    check_values_and_gradients(SIZES["rows left over"], d, f)
    x, w = jnp.ones((13, d)), jnp.ones((4, f, d))
    with backend("xla"):
        product = jax.jit(grouped_matmul).lower(x, w, jnp.ones(4, jnp.int32))
    assert ("while" in product.as_text()) == (d > 1)


def check_values_and_gradients(group_sizes, d, f):
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(s) for s in [(13, d), (4, f, d), (13, f)])
    expected, groups = loop(x, w, group_sizes)
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    for g, rows in enumerate(groups):
        dx[rows], dw[g] = dy[rows] @ w[g], dy[rows].T @ x[rows]
    with jax.enable_x64(True):
        y, *grads = product_and_gradients(x, w, np.asarray(group_sizes), dy)
    for a, e in zip((y, *grads), (expected, dx, dw), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-13, atol=1e-12)
    assert not np.any(np.asarray(y)[sum(group_sizes) :])


def test_many_rows_take_several_blocks_of_a_group():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((900, 4)), rng.standard_normal((3, 2, 4))
    group_sizes = [1, 700, 150]
    y = grouped_matmul(jnp.float32(x), jnp.float32(w), jnp.asarray(group_sizes))
    np.testing.assert_allclose(y, loop(x, w, group_sizes)[0], rtol=1e-4, atol=1e-5)


def test_foreign_rows_do_not_leak():
    """A NaN or infinity stays in its own row, and behind the groups in none."""
    x = jnp.ones((6, 3)).at[1].set(jnp.nan).at[5].set(jnp.inf)
    w, group_sizes = jnp.ones((2, 4, 3)), jnp.asarray([3, 2])
    y, vjp = jax.vjp(lambda x: grouped_matmul(x, w, group_sizes), x)
    np.testing.assert_array_equal(y[:, 0], [3, np.nan, 3, 3, 3, 0])
    dy = jnp.ones((6, 4)).at[5].set(jnp.nan)
    np.testing.assert_array_equal(vjp(dy)[0][:, 0], [4, 4, 4, 4, 4, 0])


def test_the_sums_are_what_is_preferred():
    """Results had the dtype of x in all tests. Packed experts are widened for it."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((4, 32)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((2, 3, 32)), jnp.bfloat16)
    group_sizes = jnp.array([1, 3])
    options = dict(preferred_element_type="float32")
    exact, _ = loop(*(np.float64(np.float32(a)) for a in (x, w)), [1, 3])
    y, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, group_sizes, **options), x, w)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)
    assert [g.dtype for g in vjp(y)] == [jnp.bfloat16] * 2
    same = grouped_matmul(x, w, group_sizes, preferred_element_type=jnp.bfloat16)
    np.testing.assert_array_equal(same, grouped_matmul(x, w, group_sizes))
    packed = quantize_fp8(w.astype(jnp.float32))
    exact, _ = loop(np.float64(np.float32(x)), dequantize(packed), [1, 3])
    for y in (
        grouped_matmul(x, packed, group_sizes, **options),
        quantized_matmul_id(x, packed, jnp.array([0, 1, 1, 1]), **options),
    ):
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="grouped_matmul: `preferred_element_type`"):
        grouped_matmul(x, w, group_sizes, preferred_element_type=jnp.int32)


def test_mixed_dtypes_take_that_of_x():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((1, 3, 8)), jnp.bfloat16)
    y = grouped_matmul(x, w, jnp.asarray([4]))
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, np.float64(x) @ np.float64(w[0]).T, rtol=1e-4)


@pytest.mark.parametrize("group_sizes", [[3, 0, 4], [0, 9, 0], [1, 1, 1]])
def test_quantised_experts(group_sizes):
    """`quantized_matmul_id_ggml`: values, and the gradient of the activations."""
    w, values = weight("Q4_K", 3, 8, 256)
    rng = np.random.default_rng(1)
    x, dy = (rng.standard_normal(s).astype(np.float32) for s in [(9, 256), (9, 8)])
    y, vjp = jax.vjp(lambda x: grouped_matmul(x, w, jnp.asarray(group_sizes)), x)
    expected, groups = loop(np.float64(x), values, group_sizes)
    np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())
    dx = np.zeros((9, 256))
    for g, rows in enumerate(groups):
        dx[rows] = dy[rows] @ values[g]
    np.testing.assert_allclose(vjp(dy)[0], dx, atol=1e-5 * np.abs(dx).max())


@pytest.mark.parametrize("quantize", [quantize_fp8, quantize_microscaled])
def test_rows_name_the_experts_of_a_float_format(quantize):
    w = quantize(jax.random.normal(jax.random.key(0), (3, 4, 32)))
    values = np.float64(dequantize(w))
    x = np.random.default_rng(1).standard_normal((3, 32)).astype(np.float32)
    ids = np.asarray([2, 0, 0, 5, -1, 2])
    y = jax.jit(quantized_matmul_id, static_argnames="top_k")(x, w, ids, top_k=2)
    for r, i in enumerate(ids):
        expected = values[i] @ x[r // 2] if 0 <= i < 3 else np.zeros(4)
        np.testing.assert_allclose(y[r], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [2**31 - 1, 100])
def test_a_group_that_reaches_beyond_the_rows_ends_with_them(size):
    x, w = jnp.eye(4), jnp.arange(24.0).reshape(2, 3, 4)
    y = grouped_matmul(x, w, jnp.array([size, size]))
    np.testing.assert_array_equal(y, w[0].T)


def test_experts_may_be_arrays_of_numpy():
    w = quantize_fp8(jax.random.normal(jax.random.key(0), (3, 4, 32)))
    x, group_sizes = jnp.ones((5, 32)), np.array([2, 0, 3])
    y = grouped_matmul(x, jax.tree.map(np.asarray, w), group_sizes)
    np.testing.assert_array_equal(y, grouped_matmul(x, w, group_sizes))


def test_quantised_experts_are_decoded_one_at_a_time():
    w, _ = weight("Q8_0", 64, 128, 256)
    shape = jax.ShapeDtypeStruct((16, 256), jnp.float32)
    sizes = jax.ShapeDtypeStruct((64,), jnp.int32)
    compiled = jax.jit(grouped_matmul).lower(shape, w, sizes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < w.size  # 4 bytes a weight


def test_errors_name_the_dim():
    with pytest.raises(TypeError, match="grouped_matmul: dim `e` is 2 in `w` but 3"):
        grouped_matmul(jnp.ones((4, 8)), jnp.ones((2, 5, 8)), jnp.zeros(3, jnp.int32))
    w, _ = weight("Q8_0", 2, 4, 32)
    with pytest.raises(TypeError, match=r"`x` must be \[r, 32\] as `w` is"):
        grouped_matmul(jnp.ones((4, 8)), w, jnp.zeros(2, jnp.int32))
    with pytest.raises(TypeError, match=r"must be \[e, f, d\] with a size"):
        grouped_matmul(jnp.ones((4, 32)), w, jnp.zeros(3, jnp.int32))


def test_gradients_inside_shard_map_with_checked_axes():
    # the check of shard_map asked only ops whose every result has leading dims
    x, w = jnp.linspace(-1, 1, 48).reshape(2, 6, 4), jnp.linspace(0, 1, 24)
    w, group_sizes = w.reshape(2, 3, 4), jnp.array([[2, 4], [5, 0]], jnp.int32)

    def loss(y):
        return jnp.sum(jnp.sin(y))

    def local(x, w, group_sizes):
        return grouped_matmul(x[0], w, group_sizes[0])[None]

    mesh = mesh_of(2, AxisType.Auto)
    specs = (P("m"), P(), P("m"))
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("m"))
    mapped = jax.vmap(grouped_matmul, (0, None, 0))
    actual, expected = (
        jax.jit(jax.grad(lambda x, w, f=f: loss(f(x, w, group_sizes)), (0, 1)))(x, w)
        for f in (sharded, mapped)
    )
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(3, 0, 5), (0, 8, 0), (2, 2, 1)])
def test_a_stack_is_decoded_once_for_many_narrow_rows(sizes):
    """To bfloat16, the products in float32 and rounded once."""
    rng = np.random.default_rng(0)
    w = quantize_microscaled(jnp.float32(rng.standard_normal((3, 32, 64))))
    x = jnp.asarray(rng.standard_normal((8, 64)), jnp.bfloat16)
    sizes = jnp.array(sizes)

    def f(x):
        return grouped_matmul(x, w, sizes)

    assert "dequantize" in str(jax.make_jaxpr(f)(x))
    assert "dequantize" not in str(jax.make_jaxpr(f)(x[:2]))
    assert "dequantize" not in str(jax.make_jaxpr(f)(x.astype(jnp.float32)))
    values = np.float64(dequantize(w, dtype=jnp.bfloat16))
    group = np.repeat(np.arange(4), (*sizes, 8 - sum(sizes)))
    rows = np.concatenate([values, np.zeros((1, 32, 64))])[group]
    expected = np.einsum("rd,rfd->rf", np.float64(x), rows)
    np.testing.assert_allclose(np.float64(f(x)), expected, rtol=2**-8, atol=1e-5)
    dx = jax.grad(lambda x: jnp.float32(f(x)).sum())(x)
    np.testing.assert_allclose(np.float64(dx), rows.sum(1), rtol=2**-8, atol=1e-5)
