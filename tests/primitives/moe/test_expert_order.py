"""expert_order against Python's stable sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import expert_order


@pytest.mark.parametrize("shape", [(7, 3), (2, 4, 2), (5,), (0, 2)])
@pytest.mark.parametrize("dtype", ["int32", "uint8", "int8"])
def test_a_stable_sort(shape, dtype):
    ids = np.random.default_rng(0).integers(0, 6, shape).astype(dtype)
    for f in (expert_order, jax.jit(expert_order, static_argnums=1)):
        order, sizes = f(jnp.asarray(ids), 6)
        assert order.dtype == sizes.dtype == jnp.int32
        flat = ids.ravel().tolist()
        assert order.tolist() == sorted(range(len(flat)), key=lambda i: flat[i])
        assert sizes.tolist() == [flat.count(e) for e in range(6)]


def test_foreign_experts_come_last_and_count_for_none():
    order, sizes = expert_order(jnp.asarray([[5, 0], [-1, 1], [0, 2]]), 2)
    np.testing.assert_array_equal(order, [1, 4, 3, 0, 2, 5])
    np.testing.assert_array_equal(sizes, [2, 1])


def test_more_experts_than_the_dtype_of_the_ids_holds():
    _, sizes = expert_order(jnp.asarray([127, 3], jnp.int8), 200)
    assert sizes[127] == sizes[3] == 1 and sizes.sum() == 2
