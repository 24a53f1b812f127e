"""sharded_moe_ffn: the same as moe_ffn of all tokens and experts, and what moves."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import moe_ffn, quantize_int, route, sharded_moe_ffn
from jaxkern.testing.interpreter import evaluated
from jaxkern.testing.sharding_checks import collectives
from tests.parallel.test_ring_attention import DEVICES, agree, everything, mesh_of

T, D, F, E, K = 12, 8, 6, 8, 3
RNG = np.random.default_rng(0)
OPTIONS = {
    "swiglu": {},
    "biases, weighed input": {"biases": True, "weigh_input": True},
    "GPT-OSS": {"biases": True, "alpha": 1.702, "limit": 7.0, "up_offset": 1.0},
    "packed": {"packed": True},
    "without a gate": {"packed": True, "gated": False, "activation": "relu2"},
}


def draw(*shape):
    return jnp.float32(RNG.standard_normal(shape))


def routed(rows=(T,)):
    weights, ids = route(draw(*rows, E), K)
    return draw(*rows, D), ids, weights


def experts_of(packed=False, biases=False):
    """gate, up, down and their biases; packed, both halves are one of 2 f rows."""
    wide = 2 * F if packed else F
    gate, down = 0.3 * draw(E, wide, D), 0.3 * draw(E, D, F)
    up = None if packed else 0.3 * draw(E, F, D)
    found = [draw(E, F), draw(E, F), draw(E, D)] if biases else [None] * 3
    return gate, up, down, *found


def case_of(name):
    """(x, ids, weights, gate, ...) and the options of the call."""
    options = dict(OPTIONS[name])
    packed, biases = (options.pop(n, False) for n in ("packed", "biases"))
    x, ids, weights = routed()
    gate, up, down, *more = experts_of(packed=packed, biases=biases)
    if not options.get("gated", True):
        down = 0.3 * draw(E, D, 2 * F)
    return (x, ids, weights, gate, up, down, *more), options


def sharded(**options):
    return functools.partial(sharded_moe_ffn, axis_name="x", mesh=mesh_of(), **options)


def moves(f, *operands):
    return Counter(collectives(jax.jit(f).lower(*operands).compile()))


def of_floats(f, operands):
    """f of those operands that have a gradient, and them."""
    at = [
        i
        for i, x in enumerate(operands)
        if x is not None and jnp.issubdtype(x.dtype, jnp.floating)
    ]

    def g(*floats):
        given = dict(zip(at, floats, strict=True))
        return f(*(given.get(i, x) for i, x in enumerate(operands)))

    return g, tuple(operands[i] for i in at)


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_moe_ffn_of_all_tokens_and_experts(name):
    """Values, tangents and the gradient of each operand."""
    operands, options = case_of(name)
    found = everything(*of_floats(sharded(**options), operands))
    whole = functools.partial(moe_ffn, **options)
    expected = everything(*of_floats(whole, operands), call=evaluated)
    agree(found, expected, 1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_it_is_called_around_and_inside_shard_map(kind):
    """With `check_vma`, which is the default."""
    mesh, cut = mesh_of(kind), P("x")
    operands = *routed(), *experts_of()[:3]
    expected = moe_ffn(*operands)
    placed = [jax.device_put(x, NamedSharding(mesh, cut)) for x in operands]
    f = functools.partial(sharded_moe_ffn, axis_name="x")
    with jax.set_mesh(mesh):
        agree(jax.jit(f)(*placed), expected, 1e-5)
        inside = jax.shard_map(f, in_specs=(cut,) * 6, out_specs=cut)
        agree(jax.jit(inside)(*placed), expected, 1e-5)


@pytest.mark.parametrize("expert", [0, E - 1])
def test_all_tokens_may_choose_one_device(expert):
    """Nothing is dropped; ids of no expert count nothing."""
    x, ids, weights = routed()
    gate, up, down, *_ = experts_of()
    of_devices, of_all = jax.jit(sharded()), jax.jit(moe_ffn)
    for chosen in (jnp.full_like(ids, expert), jnp.full_like(ids, E), ids - E):
        operands = x, chosen, weights, gate, up, down
        found = of_devices(*operands)
        agree(found, of_all(*operands), 1e-5)
        assert bool(jnp.any(found)) == bool(jnp.any((chosen >= 0) & (chosen < E)))


def test_batches_of_sequences_quantised_experts_and_bfloat16():
    x, ids, weights = routed((4, 3))
    gate, up, down, *_ = experts_of()
    assert up is not None
    operands = x, ids, weights, gate, up, down
    agree(jax.jit(sharded())(*operands), evaluated(moe_ffn, *operands), 1e-5)
    packed = x, ids, weights, quantize_int(gate), quantize_int(up), quantize_int(down)
    agree(jax.jit(sharded())(*packed), evaluated(moe_ffn, *packed), 1e-5)
    narrow = tuple(a.astype(jnp.bfloat16) for a in (x, gate, up, down))
    exact = tuple(a.astype(jnp.float32) for a in narrow)
    found = jax.jit(sharded())(narrow[0], ids, weights, *narrow[1:])
    assert found.dtype == jnp.bfloat16
    expected = evaluated(moe_ffn, exact[0], ids, weights, *exact[1:])
    agree(found / np.abs(expected).max(), expected / np.abs(expected).max(), 0.02)


def test_only_all_to_alls_move_data():
    """x, ids and weights out, one part of the sums back; the gradients likewise."""
    cut = NamedSharding(mesh_of(), P("x"))
    operands = *routed(), *experts_of()[:3]
    placed = [jax.device_put(x, cut) for x in operands]
    assert moves(sharded(), *placed) == {"all-to-all": 4}
    f, floats = of_floats(sharded(), placed)

    def gradients(*floats):
        every = tuple(range(len(floats)))
        return jax.grad(lambda *x: jnp.sum(f(*x) ** 2), every)(*floats)

    # those of x, weights and y beside the three of the forward pass and the sum's own
    assert moves(gradients, *floats) == {"all-to-all": 7}


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(axis_name="y"), ValueError, "no mesh axis 'y', known are 'x'"),
        (dict(axis_name=1), TypeError, "`axis_name` must be the name"),
        (dict(activation="sin"), ValueError, "`activation` must be one of"),
        (dict(activation="glu", alpha=2.0), ValueError, "belong to .*'swiglu'"),
        (dict(gates=1), TypeError, "no option 'gates'"),
        (dict(rows=(DEVICES + 1,)), ValueError, "which do not divide it"),
        (dict(rows=()), TypeError, r"`x` must be \[t, ..., d\]"),
    ],
)
def test_errors_in_words(change, error, message):
    operands = *routed(change.pop("rows", (T,))), *experts_of()[:3]
    with pytest.raises(error, match=f"sharded_moe_ffn: .*{message}"):
        sharded_moe_ffn(*operands, **dict(axis_name="x", mesh=mesh_of()) | change)


def test_every_run_gives_the_same_bits():
    """Values and all gradients, with every token at two experts of two devices."""
    operands, options = case_of("GPT-OSS")
    x, ids, *rest = operands
    ids = jnp.broadcast_to(jnp.array([0, E - 1, 0]), ids.shape)
    f, floats = of_floats(sharded(**options), (x, ids, *rest))

    def loss(*floats):
        return jnp.sin(f(*floats)).sum()

    run = jax.jit(jax.value_and_grad(loss, range(len(floats))))
    first = run(*floats)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, run(*floats), first)
    assert "scatter" not in run.lower(*floats).as_text()
