"""GGUFTensor: a pytree of one leaf under every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import GGUFTensor, dequantize, linear
from tests.primitives.quant.block_bytes import weight


def test_shape_is_that_of_the_weights():
    w, _ = weight("Q4_K", 3, 5, 512)
    assert (w.shape, w.ndim, w.size) == ((3, 5, 512), 3, 7680)
    assert w.nbytes == 3 * 5 * 2 * 144
    assert repr(w) == "GGUFTensor(Q4_K, shape=(3, 5, 512))"
    placed = jax.tree.map(lambda _: P("x"), w)
    assert repr(placed) == f"GGUFTensor(Q4_K, blocks={P('x')!r})"


def test_one_leaf_and_a_static_qtype():
    w, _ = weight("Q8_0", 4, 64)
    leaves, structure = jax.tree.flatten(w)
    assert len(leaves) == 1 and leaves[0] is w.blocks
    assert structure != jax.tree.structure(GGUFTensor(w.blocks, "Q4_0"))


def test_jit_compiles_once_for_one_structure():
    traces = []

    @jax.jit
    def f(w):
        traces.append(w.qtype)
        return dequantize(w)

    for seed in (0, 1):
        w, values = weight("Q4_0", 4, 64, seed=seed)
        np.testing.assert_array_equal(f(w), values)
    assert traces == ["Q4_0"]


def test_scan_over_layers():
    layers, values = weight("Q4_1", 3, 32, 32)
    x = np.linspace(-1, 1, 32, dtype=np.float32)
    y, _ = jax.lax.scan(lambda x, w: (linear(x, w), None), jnp.asarray(x), layers)
    for w in values:
        x = w @ x
    np.testing.assert_allclose(y, x, rtol=1e-5)


def test_indexing_leading_dims():
    w, values = weight("Q6_K", 4, 6, 256)
    np.testing.assert_array_equal(dequantize(w[2]), values[2])
    np.testing.assert_array_equal(dequantize(w[1, 3:5]), values[1, 3:5])
    np.testing.assert_array_equal(
        dequantize(w[jnp.array([3, 0])]), values[np.array([3, 0])]
    )
    assert w[...] is w
    for index in [(0, 0, 0), (..., 0)]:
        with pytest.raises(TypeError, match="only the 2 leading dims"):
            w[index]


def test_rows_sharded_over_devices():
    w, values = weight("Q5_1", 16, 64)
    mesh = jax.make_mesh((8,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(w, NamedSharding(mesh, P("m")))
    assert len(sharded.blocks.addressable_shards) == 8
    x = np.ones((2, 64), np.float32)
    y = jax.jit(linear)(x, sharded)
    np.testing.assert_allclose(y, x @ values.T, rtol=1e-5)
    assert y.sharding.spec == P(None, "m")
