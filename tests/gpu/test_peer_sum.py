"""Sums over two GPUs through each other's memory, against the sum on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxkern import linear
from jaxkern.gpu import launch_chain
from jaxkern.gpu.peer_sum import EACH, MOST
from jaxkern.lowering.chained import chained
from jaxkern.models.tensor_parallel import TensorParallel
from jaxkern.parallel import sum_over_devices
from tests.gpu.test_launch_chain import filled
from tests.lowering.test_chained import llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu" or jax.device_count() < 2,
        reason="needs two GPUs",
    ),
]


def mesh_and_peers():
    mesh = jax.make_mesh((jax.device_count(),), ("x",), (AxisType.Auto,))
    peers = launch_chain.peers_of(mesh, "x")
    if peers is None:
        pytest.skip("the GPUs do not reach each other's memory")
    return mesh, peers


@pytest.mark.parametrize("n", [1, EACH - 1, EACH + 1, 4096, MOST])
@pytest.mark.parametrize("residual", [None, "bfloat16", "float32"])
def test_every_gpu_has_the_same_sum(n, residual):
    mesh, peers = mesh_and_peers()
    devices = mesh.size
    rng = np.random.default_rng(n)
    xs = rng.standard_normal((64, devices, n)).astype(np.float32)
    given = jnp.asarray(rng.standard_normal(n), residual or jnp.float32)

    def total(x, *residual):
        return sum_over_devices(x, *residual, axis_name="x")

    def totals(x, *residual):
        step = chained(total, peers)
        return jax.lax.scan(lambda _, x: (None, step(x, *residual)), None, x[:, 0])[1]

    specs = (P(None, "x"), P())[: 2 if residual else 1]
    run = jax.jit(
        jax.shard_map(
            totals, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=False
        )
    )
    operands = (xs, given)[: len(specs)]
    assert "jaxkern_launch_chain" in run.lower(*operands).as_text()
    y = np.asarray(run(*operands).astype(jnp.float32)).reshape(devices, 64, n)
    want = xs.astype(np.float64).sum(1)
    if residual:
        want = want + np.asarray(given, np.float64)
    tolerance = 1e-2 if residual == "bfloat16" else 1e-5
    np.testing.assert_allclose(y[0], want, rtol=tolerance, atol=tolerance)
    for other in y[1:]:
        np.testing.assert_array_equal(other, y[0])


@pytest.mark.parametrize(
    "rows, d, f", [(1, 256, 4096), (1, 7168, 1001), (4, 1040, 2048)]
)
def test_products_send_what_is_summed_up(rows, d, f):
    """Chains of two products and their sums, again and again with other numbers."""
    mesh, peers = mesh_and_peers()
    devices, turns = mesh.size, 64
    rng = np.random.default_rng(d)
    xs = rng.standard_normal((turns, rows, devices * d)).astype(jnp.bfloat16)
    ws = (rng.standard_normal((2, f, devices * d)) / d**0.5).astype(jnp.bfloat16)
    given = rng.standard_normal((rows, f)).astype(jnp.bfloat16)

    def both(x, residual, w, v):
        part = linear(x, w, preferred_element_type=jnp.float32)
        first = sum_over_devices(part, residual, axis_name="x")
        part = linear(x, v, preferred_element_type=jnp.float32)
        return first, sum_over_devices(part, first, axis_name="x")

    def every(xs, residual, w, v):
        step = chained(both, peers)
        return jax.lax.scan(lambda _, x: (None, step(x, residual, w, v)), None, xs)[1]

    columns = P(None, "x")
    run = jax.jit(
        jax.shard_map(
            every,
            mesh=mesh,
            in_specs=(P(None, None, "x"), P(), columns, columns),
            out_specs=P("x"),
            check_vma=False,
        )
    )
    ys = [np.asarray(y, np.float64) for y in run(xs, given, *ws)]
    ys = [y.reshape(devices, turns, rows, f) for y in ys]
    x, (w, v) = np.asarray(xs, np.float64), np.asarray(ws, np.float64)
    want = x @ w.T + given.astype(np.float64)
    for y, expected in zip(ys, (want, want + x @ v.T), strict=True):
        np.testing.assert_allclose(y[0], expected, rtol=1e-2, atol=2e-2)
        for other in y[1:]:
            np.testing.assert_array_equal(other, y[0])
    again = [np.asarray(y, np.float64) for y in run(xs, given, *ws)]
    for one, other in zip(ys, again, strict=True):
        np.testing.assert_array_equal(one, other.reshape(one.shape))


def test_a_llama_over_gpus_is_the_same_with_sums_in_its_chain(monkeypatch):
    mesh, _ = mesh_and_peers()
    config, weights, _ = llama(layers=4)
    if config.kv_heads % mesh.size:
        pytest.skip("its heads are two")
    weights = jax.tree.map(filled, weights)
    parts = TensorParallel(config, mesh, "x")
    cut = parts.cut(weights)

    def steps():
        cache = parts.empty_cache(1, 64, jnp.bfloat16)
        step, logits = jax.jit(parts.decode, donate_argnums=2), []
        for token in range(16):
            y, cache = step(cut, jnp.full(1, 50 * token), cache)
            logits.append(np.asarray(y))
        return np.stack(logits)

    def greedy():
        cache, token, tokens = parts.empty_cache(1, 64, jnp.bfloat16), 0, []
        step = jax.jit(parts.next_tokens, donate_argnums=2)
        for _ in range(16):
            found, cache = step(cut, jnp.full(1, token), cache)
            tokens.append(token := int(found[0]))
        return tokens

    def likeliest():
        cache, token, tokens = parts.empty_cache(1, 64, jnp.bfloat16), 0, []
        step = jax.jit(parts.decode, donate_argnums=2)
        for _ in range(16):
            y, cache = step(cut, jnp.full(1, token), cache)
            tokens.append(token := int(np.argmax(np.asarray(y))))
        return tokens

    assert greedy() == likeliest()
    found = steps()
    np.testing.assert_array_equal(found, steps())
    monkeypatch.setattr(TensorParallel, "peers", lambda self: None)
    apart = steps()
    np.testing.assert_allclose(found, apart, atol=2e-2 * np.abs(apart).max())
