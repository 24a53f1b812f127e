"""All modes of `jax.lax.ragged_dot_general`, against it; derivatives by linearity.

JAX's own has no derivatives where summed or batch dims lie in groups. The tangent of a
product is the product of the tangent, and a gradient has the same inner product.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxkern import explain
from jaxkern.interop.jax_nn import ragged_dot, ragged_dot_general

RNG = np.random.default_rng(0)
EACH = [[4, 0, 5], [1, 2, 7]]  # of 10 rows: one has no group


def numbers(summed, batch, ragged, group):
    return lax.RaggedDotDimensionNumbers((summed, batch), ragged, group)


NONE = ((), ())
ROWS = numbers(((1,), (1,)), NONE, (0,), (0,))
SUMS = numbers(((0,), (0,)), NONE, (0,), ())
CASES = {  # shapes of lhs and rhs, sizes, numbers
    "rows": ((10, 6), (3, 6, 4), [4, 0, 5], ROWS),
    "output_major": (
        *((10, 6), (3, 4, 6), [4, 0, 5]),
        numbers(((1,), (2,)), NONE, (0,), (0,)),
    ),
    "rows_of_two_dims": (
        *((2, 10, 5, 6), (3, 6, 4), [4, 0, 5]),
        numbers(((3,), (1,)), NONE, (1,), (0,)),
    ),
    "rows_of_many_dims": (
        *((5, 2, 10, 3, 6, 7), (4, 7, 2, 3, 6, 2), [[[1, 2, 3]] * 5, [[4, 0, 5]] * 5]),
        numbers(((4, 5), (4, 1)), ((1,), (2,)), (2,), (3,)),
    ),
    "batch": (
        *((2, 10, 6), (3, 2, 6, 4), EACH),
        numbers(((2,), (2,)), ((0,), (1,)), (1,), (0,)),
    ),
    "sums": ((10, 6), (10, 4), [4, 0, 5], SUMS),
    "sums_of_a_batch": (
        *((2, 6, 10), (2, 10, 4), EACH),
        numbers(((2,), (1,)), ((0,), (0,)), (2,), ()),
    ),
    "sums_of_many_dims": (
        *((2, 6, 10, 2), (10, 2, 4, 2), EACH),
        numbers(((0, 2, 3), (3, 0, 1)), NONE, (2,), ()),
    ),
    "sums_alike": (
        *((2, 6, 10), (10, 4, 2), [4, 0, 5]),
        numbers(((0, 2), (2, 0)), NONE, (2,), ()),
    ),
    "batches": (
        *((5, 4, 6), (5, 6, 3), [2, 1]),
        numbers(((2,), (1,)), ((0,), (0,)), (0,), ()),
    ),
}


def draw(*shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


CHEAP = ("output_major", "rows_of_two_dims", "batch", "sums_of_many_dims", "batches")
ALL = [n if n in CHEAP else pytest.param(n, marks=pytest.mark.full) for n in CASES]


@pytest.mark.parametrize("name", ALL)
def test_every_mode_and_its_derivatives(name):
    left, right, sizes, dims = CASES[name]
    (x, dx), (w, dw) = draw(2, *left), draw(2, *right)
    sizes = jnp.array(sizes)

    def ours(x, w):
        return ragged_dot_general(x, w, sizes, dims)

    def theirs(x, w):
        return lax.ragged_dot_general(x, w, sizes, dims)

    along_x, along_w = theirs(dx, w), theirs(x, dw)
    dy = draw(*along_x.shape)

    @jax.jit
    def found(x, w):
        y, tangent = jax.jvp(ours, (x, w), (dx, dw))
        both = jax.vmap(ours, (0, None))(jnp.stack([x, dx]), w)
        return y, tangent, both[1], jax.vjp(ours, x, w)[1](dy)

    y, tangent, mapped, gradients = found(x, w)
    np.testing.assert_allclose(y, theirs(x, w), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(tangent, along_x + along_w, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mapped, along_x, rtol=1e-4, atol=1e-5)
    for gradient, along, change in zip(
        gradients, (dx, dw), (along_x, along_w), strict=True
    ):
        np.testing.assert_allclose(
            (gradient * along).sum(), (dy * change).sum(), rtol=1e-4, atol=1e-3
        )


def test_an_offset_says_which_groups_rhs_has():
    x, w, sizes = draw(12, 6), draw(5, 6, 4), jnp.array([3, 0, 4, 2, 9])
    whole = ragged_dot(x, w, sizes)  # the last group ends at the last row
    of_group = jnp.repeat(jnp.arange(5), sizes, total_repeat_length=12)
    part = jax.jit(lambda w, n: ragged_dot(x, w, sizes, group_offset=n))
    for first, groups in ((0, 5), (0, 2), (2, 2), (3, 2), (4, 1)):
        mine = (of_group >= first) & (of_group < first + groups)
        expected = jnp.where(mine[:, None], whole, 0)
        found = part(w[first : first + groups], jnp.array([first]))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(part(w[:2], jnp.int32(5)), jnp.zeros((12, 4)))


def test_parts_of_the_groups_have_the_gradients_of_the_whole():
    x, w, sizes = draw(9, 6), draw(4, 6, 3), jnp.array([3, 0, 4, 2])

    def halves(x, w):
        y = (ragged_dot(x, w[i : i + 2], sizes, group_offset=i) for i in (0, 2))
        return jnp.sin(sum(y)).sum()

    def whole(x, w):
        return jnp.sin(ragged_dot(x, w, sizes)).sum()

    found, expected = (jax.jit(jax.grad(f, (0, 1)))(x, w) for f in (halves, whole))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dims, right", [(ROWS, (2, 6, 3)), (SUMS, (4, 3))])
def test_dtypes_are_those_of_jax_and_sums_float32(dims, right):
    x, w, sizes = draw(4, 6, dtype="bfloat16"), draw(*right), jnp.array([3, 1])
    narrow = w.astype("bfloat16")
    for right, wanted in ((w, None), (narrow, None), (narrow, jnp.float32)):
        found, expected = (
            f(x, right, sizes, dims, preferred_element_type=wanted)
            for f in (ragged_dot_general, lax.ragged_dot_general)
        )
        assert found.dtype == expected.dtype
        found, expected = found.astype("float32"), expected.astype("float32")
        np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)


def test_an_explicit_mesh_and_the_sharding_that_is_asked_for():
    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Explicit,))
    x, w, sizes = draw(8, 6), draw(2, 6, 4), jnp.array([3, 5])
    expected = ragged_dot(x, w, sizes)
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, jax.P("x", None))
        found = jax.jit(lambda x: ragged_dot(x, w, sizes, out_sharding=jax.P("x")))(
            rows
        )
        assert jax.typeof(found).sharding.spec[0] == "x"
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_sums_of_each_device_inside_shard_map():
    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,))
    x, w, sizes = draw(8, 3), draw(8, 4), jnp.array([3, 1, 2, 2])
    cut = jax.P("x")
    sums = jax.shard_map(
        lambda *operands: ragged_dot_general(*operands, SUMS),
        mesh=mesh,
        in_specs=(cut, cut, cut),
        out_specs=cut,
    )
    expected = [
        lax.ragged_dot_general(x[i : i + 4], w[i : i + 4], sizes[i // 2 :][:2], SUMS)
        for i in (0, 4)
    ]
    found = jax.jit(sums)(x, w, sizes)
    np.testing.assert_allclose(found, jnp.concatenate(expected), rtol=1e-5, atol=1e-6)


def test_sizes_of_few_bits_do_not_wrap_and_sums_are_one_kernel():
    x, y = draw(300, 2), draw(300, 3)
    sizes = jnp.array([100, 200], jnp.uint8)
    found = ragged_dot_general(x, y, sizes, SUMS)
    np.testing.assert_allclose(found[1], x[100:].T @ y[100:], rtol=1e-4, atol=1e-4)
    rows = explain(lambda x, y: ragged_dot_general(x, y, sizes, SUMS), x, y).rows
    assert [row.op for row in rows] == ["grouped_matmul_bwd"]


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"lhs": jnp.ones((4, 6), "int8")}, TypeError, "`lhs` must .* int8.4, 6"),
        ({"rhs": [[1.0]]}, TypeError, "`rhs` must be an array, got list"),
        ({"rhs": jnp.ones((2, 5, 3))}, TypeError, r"same shape.*\(2, 5, 3\)"),
        ({"group_sizes": jnp.array([1, 2, 3])}, TypeError, "to be 3, got 2"),
        ({"group_sizes": jnp.array([1.0, 2.0])}, TypeError, "dtype is subtype of"),
        ({"group_offset": jnp.ones(2, int)}, TypeError, r"one integer, got int32\[2\]"),
        ({"preferred_element_type": "int32"}, TypeError, "must be a float dtype"),
        ({"precision": ("high", "highest")}, ValueError, "`precision` must be"),
        (
            {"group_offset": 0, "group_sizes": jnp.array([4])},
            *(TypeError, "rhs has 2 groups, `group_sizes` only 1"),
        ),
        (
            {
                "rhs": jnp.ones((4, 3)),
                "group_offset": 0,
                "ragged_dot_dimension_numbers": SUMS,
            },
            *(NotImplementedError, "rhs has no group dimension"),
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, error, message):
    operands = {"lhs": jnp.ones((4, 6)), "rhs": jnp.ones((2, 6, 3))}
    fits = operands | {
        "group_sizes": jnp.array([1, 3]),
        "ragged_dot_dimension_numbers": ROWS,
    }
    with pytest.raises(error, match=rf"^ragged_dot_general: .*{message}"):
        ragged_dot_general(**(fits | change))
