"""One lowering for all the calls of an operator on the shards of a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import rms_norm
from jaxkern.lowering import lower
from jaxkern.lowering.lowered_once import LoweredOnce, once_a_shape
from jaxkern.primitives.call import Backend, backend_context
from jaxkern.primitives.norm.rms_norm import rms_norm_p
from jaxkern.testing.checks import own_rows
from tests.lowering.test_sharded_call import mesh_of

LAYERS = 6


def norms(x):
    for _ in range(LAYERS):
        x = jnp.sin(rms_norm(x))
    return x


def test_layers_on_a_mesh_share_one_lowering_of_the_kernel():
    traced = []

    def kernel(*operands, **static):
        traced.append(operands[0].shape)
        return rms_norm_p.reference(*operands, **static)

    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    sharded = jax.device_put(x, NamedSharding(mesh_of(m=8), P("m")))
    with own_rows(rms_norm_p), backend_context(Backend("counted", strict=True)):
        row = lower.Row("counted", kernel, lower.never_refuses)
        lower.add_row(rms_norm_p, "cpu", row)
        compiled = jax.jit(norms).lower(sharded).compile()
    np.testing.assert_allclose(compiled(sharded), jax.jit(norms)(x), rtol=1e-6)
    # of the arrays' own shapes and of the shards', and no more for further layers
    assert traced.count((1, 8)) == 1
    assert len(traced) <= 3


def test_every_call_gets_the_same_bytes_and_constants():
    table = np.arange(4.0, dtype=np.float32)
    lookups = []

    def f(x):
        lookups.append(x.shape)
        return [x + table, jnp.flip(jnp.asarray(table)) * x]

    shared = once_a_shape("added", f)

    def every(x, y):
        return [shared(x), shared(y), shared(x[:2]), shared(2 * x)]

    x = np.ones((3, 4), np.float32)
    found = jax.jit(every)(x, 3 * x)
    for (added, turned), given in zip(found, (x, 3 * x, x[:2], 2 * x), strict=True):
        np.testing.assert_array_equal(added, given + table)
        np.testing.assert_array_equal(turned, table[::-1] * given)
    assert lookups == [(3, 4), (2, 4)]


def test_one_module_a_platform():
    lowered = LoweredOnce("sin", lambda x: [jnp.sin(x)], [np.ones(3, np.float32)])
    assert lowered.module(["cpu"]) is lowered.module(("cpu",))
    assert lowered.module(("cuda",)) is not lowered.module(("cpu",))
