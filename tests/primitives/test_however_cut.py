"""Public functions on explicit meshes whose operands are cut one by one.

What stands around an op is plain JAX, which refused masks and orders of heads there.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern

B, T, K, N, H = 2, 4, 2, 4, 4
RNG = np.random.default_rng(0)


def f32(*shape):
    return RNG.standard_normal(shape).astype(np.float32) / 2


IDS = np.array([[0, 0, 1, 1], [0, 1, 1, 1]])
LENGTHS = np.array([4, 2])
TOKENS = {"query": f32(B, T, K, H), "key": f32(B, T, K, H), "value": f32(B, T, N, H)}
GATED = {**TOKENS, "g": -np.abs(f32(B, T, N)), "beta": np.abs(f32(B, T, N))}
GATED["initial_state"] = f32(B, N, H, H)
KIMI = {**GATED, "g": -np.abs(f32(B, T, N, H))}
DUAL = {
    "x": f32(B, T, N, H),
    "step": np.abs(f32(B, T, N)),
    "a": -np.abs(f32(N)),
    "b": f32(B, T, K, H),
    "c": f32(B, T, K, H),
    "initial_state": f32(B, N, H, H),
}
SCAN = {
    "x": f32(B, T, 4),
    "delta": np.abs(f32(B, T, 4)),
    "a": -np.abs(f32(4, 4)),
    "b": f32(B, T, 4),
    "c": f32(B, T, 4),
    "initial_state": f32(B, 4, 4),
}
CONV = {"x": f32(B, T, 4), "weight": f32(4, 4), "initial_state": f32(B, 3, 4)}
STEP = {k: x[:, 0] for k, x in GATED.items() if k != "initial_state"}
POOL = {**STEP, "state": f32(8, N, H, H), "state_indices": np.array([5, 1])}
EXPERTS = {
    "x": f32(8, 8),
    "ids": RNG.integers(0, 4, (8, 2), np.int32),
    "weights": f32(8, 2),
    "gate": f32(4, 8, 8),
    "up": f32(4, 8, 8),
    "down": f32(4, 8, 8),
}
CALLS = {
    "segments": ("gated_delta_rule", {**GATED, "segment_ids": IDS}, {}),
    "tiled": ("gated_delta_rule", GATED, {"gqa": "tiled"}),
    "kimi": ("kimi_delta_attention", {**KIMI, "segment_ids": IDS}, {}),
    "dual": ("state_space_dual", {**DUAL, "active_length": LENGTHS}, {}),
    "scan": ("selective_scan", {**SCAN, "segment_ids": IDS}, {}),
    "conv": ("causal_conv1d", {**CONV, "active_length": LENGTHS}, {}),
    "pool": ("gated_delta_step", POOL, {}),
    "experts": ("moe_ffn", EXPERTS, {}),
}
FEW = [  # each a kind of refusal of its own
    ("segments", "g", 0),
    ("tiled", "value", 2),
    ("dual", "active_length", 0),
    ("conv", "x", 1),
    ("pool", "state", 0),
    ("experts", "ids", 0),
    ("experts", "gate", 0),
]


def explicit_mesh():
    devices = jax.devices()[:2]
    return jax.make_mesh((2,), ("m",), axis_types=(AxisType.Explicit,), devices=devices)


def placed(operands, operand, dim, mesh):
    def spec(name, x):
        at = dim if name == operand else None
        return P(*("m" if d == at else None for d in range(x.ndim)))

    return {
        name: jax.device_put(x, NamedSharding(mesh, spec(name, x)))
        for name, x in operands.items()
    }


def both_passes(name):
    """Results and gradients of a call, of its operands by name."""
    op, operands, options = CALLS[name]
    floats = {k: x for k, x in operands.items() if x.dtype == np.float32}

    def f(floats, others):
        return getattr(jaxkern, op)(**floats, **others, **options)

    def both(operands):
        own = {k: operands[k] for k in floats}
        others = {k: x for k, x in operands.items() if k not in floats}
        y, pull = jax.vjp(lambda own: f(own, others), own)
        return y, pull(jax.tree.map(jnp.ones_like, y))[0]

    return both


@pytest.mark.parametrize("name, operand, dim", FEW)
def test_one_operand_may_be_cut_alone(name, operand, dim):
    operands, both = CALLS[name][1], both_passes(name)
    expected = jax.jit(both)(operands)
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        cut = placed(operands, operand, dim, mesh)
        found = jax.jit(both)(cut)
    for y, e in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(y, e, rtol=1e-4, atol=1e-5)
    for k, d in found[1].items():
        assert d.sharding.spec == cut[k].sharding.spec


@pytest.mark.full
@pytest.mark.parametrize("name", CALLS)
def test_each_dim_of_each_operand_may_be_cut_alone(name):
    operands, both = CALLS[name][1], both_passes(name)
    expected = jax.eval_shape(both, operands)
    mesh = explicit_mesh()
    for operand, x in operands.items():
        for dim in (d for d, n in enumerate(x.shape) if n % 2 == 0):
            with jax.set_mesh(mesh):
                cut = jax.tree.map(jax.typeof, placed(operands, operand, dim, mesh))
                found = jax.eval_shape(both, cut)
            for y, e in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
                assert (y.shape, y.dtype) == (e.shape, e.dtype), (operand, dim)
            for k, d in found[1].items():
                assert d.sharding.spec == cut[k].sharding.spec, (operand, dim)


def test_results_are_cut_as_the_dims_of_their_names():
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        cut = placed(GATED, "g", 0, mesh)
        ids = jnp.asarray(IDS)
        out, state = jaxkern.gated_delta_rule(**cut, segment_ids=ids)  # eager, too
        assert out.sharding.spec == P("m", None, None, None)
        assert state.sharding.spec == P("m", None, None, None)
    expected, _ = jaxkern.gated_delta_rule(**GATED, segment_ids=IDS)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_packed_experts_may_be_cut():
    w = jax.random.normal(jax.random.key(0), (4, 32, 32))
    packed = jaxkern.quantize_gguf(w, "Q8_0")
    x, ids, weights = jnp.asarray(f32(8, 32)), EXPERTS["ids"], EXPERTS["weights"]
    expected = jaxkern.moe_ffn(x, ids, weights, packed, packed, packed)
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        cut = jax.tree.map(
            lambda b: jax.device_put(b, NamedSharding(mesh, P("m"))), packed
        )
        found = jax.jit(jaxkern.moe_ffn)(x, ids, weights, cut, packed, cut)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_what_is_wrong_is_told_as_without_a_mesh():
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        cut = placed(GATED, "g", 0, mesh)
        with pytest.raises(TypeError, match=r"`segment_ids` must have shape \(2, 4\)"):
            jaxkern.gated_delta_rule(**cut, segment_ids=jnp.zeros((2, 3), int))
        with pytest.raises(ValueError, match="`chunk_size` is 0"):
            jaxkern.gated_delta_rule(**cut, chunk_size=0)
