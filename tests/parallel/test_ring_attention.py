"""ring_attention: the same as attention of the whole sequence, and what moves."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import attention, ring_attention, sequence_positions, zigzag
from jaxkern.testing.interpreter import evaluated

DEVICES, T = 4, 16
RNG = np.random.default_rng(0)
OPTIONS = {
    "all keys": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 5},
    "both sides": {"window": (3, 2)},
    "softcap and scale": {"causal": True, "softcap": 2.0, "scale": 0.7},
    "segments": {"causal": True, "segment_ids": True},
    "sinks": {"causal": True, "sinks": True},
}
COLLECTIVE = r"= \S+ (all-gather|all-reduce|collective-permute|all-to-all)(?:-start)?\("


def mesh_of(kind=AxisType.Auto, devices=DEVICES):
    return jax.make_mesh((devices,), ("x",), (kind,), devices=jax.devices()[:devices])


def draw(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def qkv(dtype=jnp.float32, t=T):
    return draw(2, t, 4, 8, dtype=dtype), *(draw(2, t, 2, 8, dtype=dtype) for _ in "kv")


def options_of(name):
    options = dict(OPTIONS[name])
    if options.pop("segment_ids", False):
        options["segment_ids"] = jnp.array([[0] * 3 + [1] * 7 + [2] * 6, [5] * T])
    if options.pop("sinks", False):
        options["sinks"] = jnp.array([0.5, -1.0, 3.0, 0.0])
    return options


def agree(found, expected, limit):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float64(x), np.float64(y), rtol=limit, atol=limit)


def everything(f, operands, dtype=jnp.float32, call=lambda f, *x: jax.jit(f)(*x)):
    """Results, tangents and gradients of f in one executable, or interpreted."""

    def run(operands, tangents):
        out, moved = jax.jvp(f, operands, tangents)
        _, pull = jax.vjp(f, *operands)
        return out, moved, pull(jax.tree.map(jnp.sin, out))

    tangents = tuple(0.1 * jnp.cos(x).astype(dtype) for x in operands)
    return call(run, operands, tangents)


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_attention_of_the_whole_sequence(name):
    options = options_of(name)
    ring = functools.partial(
        ring_attention, axis_name="x", mesh=mesh_of(), return_lse=True, **options
    )
    whole = functools.partial(attention, return_lse=True, **options)
    operands = qkv()
    expected = everything(whole, operands, call=evaluated)
    agree(everything(ring, operands), expected, 1e-5)


def test_zigzag_gives_the_same_in_its_order():
    def ring(*operands):
        turned = (zigzag(x, DEVICES) for x in operands)
        options = dict(causal=True, order="zigzag", return_lse=True)
        found = ring_attention(*turned, axis_name="x", mesh=mesh_of(), **options)
        return tuple(zigzag(y, DEVICES, back=True) for y in found)

    whole = functools.partial(attention, causal=True, return_lse=True)
    operands = qkv()
    agree(everything(ring, operands), everything(whole, operands), 1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_it_is_called_around_and_inside_shard_map(kind):
    """With `check_vma`, which is the default, results are said to vary."""
    mesh, cut = mesh_of(kind), P(None, "x")
    operands = qkv()
    expected = attention(*operands, causal=True)
    placed = [jax.device_put(x, NamedSharding(mesh, cut)) for x in operands]
    f = functools.partial(ring_attention, axis_name="x", causal=True)
    with jax.set_mesh(mesh):
        agree(jax.jit(f)(*placed), expected, 1e-5)
        inside = jax.shard_map(f, in_specs=(cut,) * 3, out_specs=cut)
        agree(jax.jit(inside)(*placed), expected, 1e-5)


def test_other_axes_cut_batch_and_heads():
    devices = jax.devices()[:8]
    mesh = jax.make_mesh((2, 2, 2), ("b", "x", "h"), devices=devices)
    operands = qkv()
    spec = NamedSharding(mesh, P("b", "x", "h"))
    placed = [jax.device_put(x, spec) for x in operands]
    f = functools.partial(ring_attention, axis_name="x", mesh=mesh, causal=True)
    found = jax.jit(f)(*placed)
    agree(found, attention(*operands, causal=True), 1e-5)


def collectives(f, *operands):
    text = jax.jit(f).lower(*operands).compile().as_text()
    return Counter(re.findall(COLLECTIVE, text))


def test_only_permutes_move_data():
    """Two arrays in each of n - 1 steps; a window of one shard reaches one step."""
    operands, f = qkv(), functools.partial(ring_attention, axis_name="x")
    f = functools.partial(f, mesh=mesh_of(), causal=True)
    cut = NamedSharding(mesh_of(), P(None, "x"))
    placed = [jax.device_put(x, cut) for x in operands]
    assert collectives(f, *placed) == {"collective-permute": 2 * (DEVICES - 1)}
    near = functools.partial(f, window=T // DEVICES)
    assert collectives(near, *placed) == {"collective-permute": 2}

    def gradients(*operands):
        return jax.grad(lambda *x: f(*x).sum(), (0, 1, 2))(*operands)

    assert set(collectives(gradients, *placed)) == {"collective-permute"}


def test_a_device_more_is_keys_and_values_more_at_most():
    """XLA may fetch those of all steps at once; nothing else grows with the devices."""

    def held(devices):
        mesh = mesh_of(devices=devices)
        f = functools.partial(ring_attention, axis_name="x", mesh=mesh, causal=True)
        x = jax.ShapeDtypeStruct(
            (1, 512 * devices, 2, 64),
            jnp.float32,
            sharding=NamedSharding(mesh, P(None, "x")),
        )
        grad = jax.jit(jax.grad(lambda *x: f(*x).sum(), (0, 1, 2)))
        return grad.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    shard = 512 * 2 * 64 * 4
    assert held(4) - held(2) <= 2 * 4 * shard  # and their gradients


def test_bfloat16_and_vmap():
    operands = qkv(jnp.bfloat16)
    f = functools.partial(ring_attention, axis_name="x", mesh=mesh_of(), causal=True)
    expected = attention(*(x.astype(jnp.float32) for x in operands), causal=True)
    agree(jax.jit(f)(*operands), expected, 0.03)
    stacked = [jnp.stack([x, 2 * x]) for x in qkv()]
    found = jax.jit(jax.vmap(f))(*stacked)
    whole = jax.vmap(functools.partial(attention, causal=True))(*stacked)
    agree(found, whole, 1e-5)


def test_positions_are_those_of_the_rows():
    mesh, cut = mesh_of(), P("x")
    for order in ("contiguous", "zigzag"):
        f = functools.partial(sequence_positions, axis_name="x", order=order)
        parts = jax.shard_map(
            lambda x, f=f: x + f(len(x)), mesh=mesh, in_specs=cut, out_specs=cut
        )
        rows = jnp.arange(T)
        expected = zigzag(rows, DEVICES, axis=0) if order == "zigzag" else rows
        np.testing.assert_array_equal(parts(jnp.zeros(T, int)), expected)
        if order == "zigzag":
            back = zigzag(expected, DEVICES, axis=0, back=True)
            np.testing.assert_array_equal(back, rows)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(axis_name="y"), ValueError, "no mesh axis 'y', known are 'x'"),
        (dict(axis_name=1), TypeError, "`axis_name` must be the name"),
        (dict(order="snake"), ValueError, "'contiguous' or 'zigzag', got 'snake'"),
        (dict(order="zigzag", window=3), ValueError, "window with order='zigzag'"),
        (dict(softcap=0.0), ValueError, "softcap is 0"),
        (dict(t=18), ValueError, "which do not divide it"),
    ],
)
def test_errors_in_words(change, error, message):
    operands = qkv(t=change.pop("t", T))
    options = dict(axis_name="x", mesh=mesh_of(), causal=True) | change
    with pytest.raises(error, match=f"ring_attention: .*{message}"):
        ring_attention(*operands, **options)
    with pytest.raises(ValueError, match="zigzag: `parts` is 3 and there are 16 rows"):
        zigzag(operands[0][:, :16], 3)
