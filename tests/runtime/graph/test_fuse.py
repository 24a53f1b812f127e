"""Fusing: the same results and gradients from fewer equations, or a reason in words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.runtime import Pattern
from jaxkern.runtime.graph.graph import graph
from jaxkern.runtime.graph.patterns import plain_rms_norms

KEYS = iter(jax.random.split(jax.random.key(7), 99))
D = 8


def rows(dtype=jnp.float32):
    return jax.random.normal(next(KEYS), (3, D)).astype(dtype)


def vector(dtype=jnp.float32):
    return jax.random.normal(next(KEYS), (D,)).astype(dtype)


def square():
    return jax.random.normal(next(KEYS), (D, D)) / 3


def names(g):
    return [n.name for n in g.nodes]


def plain_rms_norm(x, eps=1e-6):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps)


def llama_rms_norm(x, weight):
    """Normalises in float32, scales in the dtype of x, as in Hugging Face's models."""
    x32 = x.astype(jnp.float32)
    return weight * plain_rms_norm(x32).astype(x.dtype)


def gemma_rms_norm(x, weight):
    """Scales in float32 by 1 + weight."""
    y = plain_rms_norm(x.astype(jnp.float32)) * (1.0 + weight.astype(jnp.float32))
    return y.astype(x.dtype)


def pre_norm(x, residual, weight):
    total = x + residual
    return jaxkern.rms_norm(total, weight) @ jnp.ones((D, D)), jnp.sin(total)


def between_norms(x, residual, weight, next_weight):
    total = residual + jaxkern.rms_norm(x, weight)
    return jaxkern.rms_norm(total, next_weight), jnp.sin(total)


def block(x, gate, up, down):
    y = gemma_rms_norm(x, jnp.ones(D))
    return x + (jax.nn.silu(y @ gate) * (y @ up)) @ down


def layers(x, gate, up, down):
    return jax.lax.scan(lambda x, w: (block(x, *w), None), x, (gate, up, down))[0]


def biased(f):
    return lambda x, w, b: f(x @ w + b)


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}

# name: (function, arguments, names of the nodes after fusion)
CASES = {
    "plain": (lambda x, w: plain_rms_norm(x) * w, (rows(), vector()), "rms_norm"),
    "offset": (gemma_rms_norm, (rows(), vector()), "rms_norm"),
    "normed row times its scale": (
        lambda x, s, w: s * jaxkern.rms_norm(x, w),
        (rows(), rows(), vector()),
        "rms_norm_mul",
    ),
    "without weight": (
        lambda x, s: jaxkern.rms_norm(x, eps=1e-3) * s,
        (rows(), rows()),
        "rms_norm_mul",
    ),
    "normed row added": (
        lambda x, r, w: jaxkern.rms_norm(x, w, offset=1.0) + r,
        (rows(), rows(), vector()),
        "rms_norm_add",
    ),
    "plain and added": (
        lambda x, r: r + plain_rms_norm(x),
        (rows(), rows()),
        "rms_norm_add",
    ),
    "sum kept": (
        pre_norm,
        (rows(), rows(), vector()),
        "add_rms_norm broadcast_in_dim dot_general sin",
    ),
    "sum used first": (
        lambda x, r: (jnp.sin(total := x + r), jaxkern.rms_norm(total)),
        (rows(), rows()),
        "add_rms_norm sin",
    ),
    "with bias": (
        lambda x, r, w, b: jaxkern.rms_norm(x + r, w, b),
        (rows(), rows(), vector(), vector()),
        "add_rms_norm",
    ),
    "sandwich": (
        between_norms,
        (rows(), rows(), vector(), vector()),
        "sandwich_rms_norm sin",
    ),
    "swiglu": (lambda g, u: u * jax.nn.silu(g), (rows(), rows()), "swiglu"),
    "geglu of ours": (
        lambda g, u: jaxkern.gelu(g, approximate="none") * u,
        (rows(), rows()),
        "geglu",
    ),
    "geglu tanh": (lambda g, u: jax.nn.gelu(g) * u, (rows(), rows()), "geglu"),
    "geglu exact": (
        lambda g, u: jax.nn.gelu(g, approximate=False) * u,
        (rows(), rows()),
        "geglu",
    ),
    "block": (
        block,
        (rows(), square(), square(), square()),
        "broadcast_in_dim rms_norm dot_general dot_general swiglu dot_general add",
    ),
    **{
        name: (
            biased(f),
            (rows(), square(), vector()),
            "dot_general bias_activation",
        )
        for name, f in ACTIVATIONS.items()
    },
}


BY_DEFAULT = ["offset", "sum kept", "sandwich", "swiglu", "geglu tanh", "relu"]


@pytest.mark.parametrize(
    "chosen", [BY_DEFAULT, pytest.param(list(CASES), marks=pytest.mark.full)], ids=len
)
def test_results_and_gradients_equal_those_of_the_chain(chosen):
    """Every case in one compilation: its value, and the gradients of all arguments."""
    cases = {name: CASES[name][:2] for name in chosen}
    fused = {name: graph(f, *args).fuse() for name, (f, args) in cases.items()}

    def differentiated(f, args):
        y, vjp = jax.vjp(f, *args)
        return y, vjp(jax.tree.map(lambda v: jnp.cos(v * 3), y))

    @jax.jit
    def both(every):
        return {
            name: (
                differentiated(f, every[name]),
                differentiated(fused[name], every[name]),
            )
            for name, (f, _) in cases.items()
        }

    results = both({name: args for name, (_, args) in cases.items()})
    for name, (chain, found) in results.items():
        assert jax.tree.structure(chain) == jax.tree.structure(found)
        for a, b in zip(jax.tree.leaves(chain), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(b, a, rtol=2e-4, atol=2e-5, err_msg=name)


def test_every_chain_becomes_its_operator():
    found = {
        name: names(graph(f, *args).fuse()) for name, (f, args, _) in CASES.items()
    }
    assert found == {name: expected.split() for name, (_, _, expected) in CASES.items()}


def test_a_fused_graph_is_jitted_mapped_and_reordered():
    x, w = rows(), (square(), square(), square())
    g = graph(block, x, *w).fuse()
    xs = jnp.stack([x, 2 * x])
    expected = jax.vmap(block, (0, None, None, None))(xs, *w)
    found = jax.jit(jax.vmap(g.reorder(), (0, None, None, None)))(xs, *w)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert [str(fusion) for fusion in g.fusions] == [
        "rms_norm for nodes 1, 2, 3, 4, 5, 6, 7, 8, 9, 10",
        "swiglu for nodes 12, 13, 15",
    ]
    plain = graph(block, x, *w)
    moved = plain.reorder()  # ids go with the nodes
    assert [n.id for n in moved.nodes] != [n.id for n in plain.nodes]
    assert moved.fuse().fusions == g.fusions == g.reorder().fusions
    assert "fused: swiglu for" in repr(g)


@pytest.mark.parametrize("spelled", plain_rms_norms())
def test_every_spelling_of_a_norm_is_found(spelled):
    g = graph(lambda x: spelled(x, 1e-5), jax.ShapeDtypeStruct((2, 3, D), jnp.float32))
    h = g.fuse(["rms_norm"])
    assert names(h) == ["rms_norm"]
    assert h.nodes[0].equation.params["eps"] == pytest.approx(1e-5)
    assert h.fusions[0].nodes == tuple(n.id for n in g.nodes)


@pytest.mark.parametrize(
    ("norm", "weight"),
    [
        (llama_rms_norm, vector(jnp.bfloat16)),
        (gemma_rms_norm, vector(jnp.bfloat16)),
        (
            lambda x, w: jaxkern.rms_norm(x.astype(jnp.float32), w).astype(x.dtype),
            vector(),
        ),
    ],
)
def test_a_norm_in_float32_of_bfloat16_is_one_operator(norm, weight):
    x = rows(jnp.bfloat16)
    h = graph(norm, x, weight).fuse()
    assert names(h)[-1] == "rms_norm" and h(x, weight).dtype == jnp.bfloat16
    assert all(n in ("rms_norm", "convert_element_type") for n in names(h))
    expected = norm(x.astype(jnp.float32), weight.astype(jnp.float32))
    np.testing.assert_allclose(h(x, weight), expected, rtol=8e-3)


def test_bodies_are_fused_too():
    x = rows()
    w = [jnp.stack([square(), square()]) for _ in range(3)]

    @jax.checkpoint
    def f(x, *w):
        return jax.lax.cond(x[0, 0] > 9, lambda x, *_: x, layers, x, *w)

    g = graph(f, x, *w).fuse()
    assert [(fusion.pattern, fusion.inside) for fusion in g.fusions] == [
        (pattern, "remat2 0/cond 4/scan 0") for pattern in ("rms_norm", "swiglu")
    ]
    np.testing.assert_allclose(g(x, *w), f(x, *w), rtol=1e-4, atol=1e-5)
    text = str(jax.make_jaxpr(g)(x, *w))
    assert "swiglu[" in text and "logistic" not in text


def refused(f, *args, pattern=None):
    """The only reason why the function is not fused as the pattern says."""
    g = graph(f, *args)
    h = g.fuse()
    misses = [m for m in h.not_fused if pattern in (None, m.pattern)]
    assert len(misses) == 1, h
    for a, b in zip(jax.tree.leaves(h(*args)), jax.tree.leaves(f(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2)
    return names(h), str(misses[0])


def test_a_value_that_is_used_elsewhere_stays():
    def f(x, s):
        y = jaxkern.rms_norm(x)
        return y * s, jnp.sin(y)

    found, reason = refused(f, rows(), rows())
    assert found == ["rms_norm", "mul", "sin"]
    assert reason == (
        "rms_norm_mul at node 1: node 2 (sin) reads the result of node 0 (rms_norm), "
        "which is inside"
    )

    def f(x):
        v = jnp.mean(x * x, -1, keepdims=True) + 1e-6
        return x * jax.lax.rsqrt(v), v

    found, reason = refused(f, rows())
    assert "rms_norm" not in found and "the function returns the result of" in reason


def test_the_squares_of_bfloat16_are_not_those_of_float32():
    x = rows(jnp.bfloat16)
    found, reason = refused(plain_rms_norm, x)
    assert "rms_norm" not in found
    assert "computed in bfloat16: cast x to float32 before it" in reason


def test_chains_that_nearly_match_say_what_differs():
    x, s = rows(), rows()[:, :1]
    _, reason = refused(
        lambda x, s: jaxkern.rms_norm(x) * s, x, s, pattern="rms_norm_mul"
    )
    assert "`scale` has shape (3, 1), the pattern's has (3, 8)" in reason
    _, reason = refused(lambda x, e: plain_rms_norm(x, e), x, jnp.float32(1e-6))
    assert "`eps` is computed, not a constant" in reason
    _, reason = refused(
        lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, 0, keepdims=True) + 1e-6), x
    )
    assert "node 2 (broadcast_in_dim) has shape=(1, 8) where the pattern has" in reason
    _, reason = refused(lambda x, b: jnp.tanh(x + b), x, vector())
    assert reason.endswith("x is not the result of a matmul")


def test_the_fused_operator_runs_on_the_backend_of_the_chain():
    def f(x, residual, weight, first):
        with jaxkern.backend(first):
            total = residual + jaxkern.rms_norm(x, weight)
        with jaxkern.backend("xla"):
            return jaxkern.rms_norm(total, weight)

    args = rows(), rows(), vector()
    g = graph(lambda *args: f(*args, "xla"), *args).fuse()
    assert names(g) == ["sandwich_rms_norm"]
    assert g.nodes[0].equation.params["call"].backend.name == "xla"
    g = graph(lambda *args: f(*args, "auto"), *args).fuse(["sandwich_rms_norm"])
    assert g.not_fused[0].reason == "`backend` is auto in one operator, xla in another"


def two_norms(**other):
    def f(x, r):
        y = jaxkern.rms_norm(x, jnp.ones(D))
        return jaxkern.rms_norm(r + y, jnp.ones(D), **other)

    return f


def test_operators_with_other_options_are_not_one():
    g = graph(two_norms(eps=1e-2), rows(), rows())
    (miss,) = g.fuse(["sandwich_rms_norm"]).not_fused
    assert miss.reason == "`eps` is 1e-06 in one operator, 0.01 in another"
    assert {"rms_norm_add", "rms_norm"} < set(names(g.fuse()))


def test_an_operand_that_needs_a_result_of_the_chain_prevents_it():
    def f(x, r, weight):
        total = x + r
        return jaxkern.rms_norm(total, weight(total))

    for weight in (jnp.sin, lambda total: total):
        g = graph(lambda x, r: f(x, r, weight), vector(), vector()).fuse()  # noqa: B023
        assert "add_rms_norm" not in names(g)
        assert "computed inside the chain or from its result" in g.not_fused[0].reason


def test_the_norm_of_one_value_does_not_scale_another():
    def f(x, y):
        return x * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)

    found, reason = refused(f, rows(), rows())
    assert "rms_norm" not in found
    assert "two values stand where the pattern has one" in reason


def test_operators_recorded_under_vmap_are_left_alone():
    def f(x, scale, weight):
        return jaxkern.rms_norm(x, weight) * scale

    args = rows(), rows(), rows()
    g = graph(jax.vmap(f), *args).fuse()
    assert names(g) == ["rms_norm", "mul"]
    np.testing.assert_allclose(g(*args), jax.vmap(f)(*args), rtol=1e-6)


def test_a_derivative_of_its_own_must_be_the_same():
    """A custom relu that lets every gradient through is no relu."""

    @jax.custom_jvp
    def relu(x):
        return jax.nn.relu.__wrapped__(x)

    relu.defjvp(lambda p, t: (relu(*p), t[0]))
    args = rows(), square(), vector()
    assert "bias_activation" not in names(graph(biased(relu), *args).fuse())
    # max has half a gradient at 0, relu none.
    g = graph(biased(lambda z: jnp.maximum(z, 0)), *args).fuse()
    assert "bias_activation" not in names(g)


def test_patterns_by_name_and_of_ones_own():
    def chain(gate, up):
        return jnp.sin(gate) * up

    def fused(gate, up):
        return jnp.cos(gate - jnp.pi / 2) * up

    x = rows()
    g = graph(lambda x: jaxkern.rms_norm(chain(x, x)) * x, x)
    h = g.fuse([Pattern("sine gate", chain, fused), "rms_norm_mul"])
    assert [fusion.pattern for fusion in h.fusions] == ["sine gate", "rms_norm_mul"]
    np.testing.assert_allclose(h(x), g(x), rtol=1e-5, atol=1e-6)
    assert names(g.fuse([])) == names(g)
    # What replaces a chain is not searched for the chain again.
    again = g.fuse([Pattern("sine gate", chain, jax.jit(chain))])
    assert len(again.fusions) == 1 and "jit" in names(again)
    with pytest.raises(ValueError, match=r"`patterns` are of .*swiglu.*got 'rms'"):
        g.fuse(["rms"])
    with pytest.raises(ValueError, match=r"parameters of `chain`.*\['z'\]"):
        g.fuse([Pattern("wrong", lambda z: z, lambda z: z)])
