"""Nodes, kinds, bytes, conflicts, levels and barriers of recorded functions."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich
from jax.extend.core import Primitive

import jaxkern
from jaxkern.primitives.kernel_primitive import REGISTRY
from jaxkern.runtime import OpKind, Region
from jaxkern.runtime.graph.graph import graph
from jaxkern.runtime.graph.op_kind import KIND_BY_NAME, kind_of_primitive, kinds_of_jax

X = jax.ShapeDtypeStruct((4, 3), jnp.float32)
ROW = jax.ShapeDtypeStruct((1, 3), jnp.float32)

foreign_p = Primitive("add")  # a name that the table has, of a primitive it has not
foreign_p.def_impl(lambda x: x)
foreign_p.def_abstract_eval(lambda x: x)


def named(g, *names):
    """Ids of the nodes with these names, one each."""
    found = [[n.id for n in g.nodes if n.name == name] for name in names]
    assert all(len(ids) == 1 for ids in found), g
    return [ids[0] for ids in found]


def test_kinds_of_every_operator_and_of_jax():
    unknown = [n for n in KIND_BY_NAME if n not in REGISTRY and n != "adamw_tree"]
    assert not unknown
    for p in REGISTRY.values():
        kinds = {kind_of_primitive(q) for q in (p, p.fwd, p.bwd, p.tangent) if q}
        assert len(kinds) == 1, p.name
    expected = {
        "rms_norm": OpKind.NORM,
        "quantized_matmul": OpKind.MATMUL,
        "grouped_matmul": OpKind.MATMUL_ID,
        "apply_rope": OpKind.ROPE,
        "attention": OpKind.SDPA,
        "softmax": OpKind.SOFTMAX,
        "route": OpKind.MOE_GATE,
        "embedding": OpKind.GATHER,
        "gated_delta_rule": OpKind.OTHER,
        "dynamic_tanh": OpKind.NORM,  # by its family: the table does not name it
        "selective_scan": OpKind.OTHER,
    }
    assert {n: kind_of_primitive(REGISTRY[n]) for n in expected} == expected
    assert {k for k in OpKind if k.reorderable} == {
        OpKind.MATMUL,
        OpKind.MATMUL_ID,
        OpKind.NORM,
        OpKind.ROPE,
        OpKind.ELEMENTWISE,
        OpKind.COPY,
        OpKind.GATHER,
    }
    assert kinds_of_jax()[jax.lax.dot_general_p] is OpKind.MATMUL
    assert kinds_of_jax()[jax.lax.reduce_sum_p] is OpKind.OTHER
    assert kind_of_primitive(foreign_p) is None


def test_nodes_of_a_function_with_jit_and_bodies():
    @jax.jit
    def f(x, w):
        y = jax.nn.silu(x @ w)  # jax.nn.silu is a jit of its own: opened
        y = jax.nn.relu(y)  # its own derivative: one node
        return jax.lax.scan(lambda c, _: (c + 1, None), y, length=2)[0]

    g = graph(f, jax.ShapeDtypeStruct((4, 4), jnp.float32), X)
    assert [(n.name, n.kind) for n in g.nodes] == [
        ("dot_general", OpKind.MATMUL),
        ("logistic", OpKind.ELEMENTWISE),
        ("mul", OpKind.ELEMENTWISE),
        ("custom_jvp_call", OpKind.ELEMENTWISE),
        ("scan", OpKind.OTHER),
    ]
    first = g.nodes[0]
    assert first.inputs == (0, 1) and first.outputs == (2,)
    assert first.reads == (Region("v0", 0, 64), Region("v1", 0, 48))
    assert first.writes == (Region("v2", 0, 48),)
    assert g.unannotated_dispatch_count == 0
    assert g.conflicts(0, 1) == g.conflicts(1, 0) == {"RAW"}
    assert g.conflicts(3, 3) == set()
    assert g.conflicts(g.nodes[0], 3) == set()  # by way of another only
    x, w = jnp.linspace(-1, 1, 16).reshape(4, 4), jnp.linspace(0, 1, 12).reshape(4, 3)
    np.testing.assert_array_equal(g(x, w), f(x, w))


def test_views_of_a_donated_buffer_conflict_by_their_bytes():
    def f(cache, row):
        first = cache[0] * 2  # reads row 0
        second = cache.reshape(2, 6)[0, 3:] * 3  # row 1, through two views
        column = jnp.tanh(cache[:, 1])  # rows 0 to 3
        number = jnp.exp(cache[:, 1][1])  # of a view with gaps: not known where
        cache = jax.lax.dynamic_update_slice(cache, row, (1, 0))
        return cache, first, second, column, number, cache[2] - 1, cache[1] / 2

    g = graph(f, X, ROW, donate=0)
    assert not g.copies
    update, column, number, minus, divide = named(
        g, "dynamic_update_slice", "tanh", "exp", "sub", "div"
    )
    first, second = (n.id for n in g.nodes if n.name == "mul")
    assert g.node(update).writes == (Region("arg0", 12, 24),)
    assert g.conflicts(first, update) == set()
    assert g.conflicts(second, update) == {"WAR"}
    assert g.conflicts(column, update) == {"WAR"}
    assert g.conflicts(number, update) == {"WAR"}
    assert g.conflicts(update, minus) == set()
    assert g.conflicts(update, divide) == {"RAW"}
    levels = {id: k for k, ids in enumerate(g.levels()) for id in ids}
    assert levels[first] == 0 and levels[update] == 1 and levels[divide] == 2
    assert g.barriers() == (update, divide)
    assert g.dispatch_count == 7 and g.barrier_count == 2
    # Without donation the update goes to a buffer of its own: no barrier before it.
    free = graph(f, X, ROW)
    assert free.conflicts(second, update) == set()


def test_an_output_is_written_to_the_donated_argument_of_its_shape():
    g = graph(jax.jit(lambda x, y: (y * 2, x + 1), donate_argnums=(0, 1)), X, X)
    double, plus = named(g, "mul", "add")
    assert g.donated == (True, True)
    # x + 1 reads arg0 after y * 2 has replaced it: XLA must copy, nothing waits.
    assert g.conflicts(double, plus) == {"WAR"} and "output 0" in g.copies[0]
    g = graph(lambda x, y: (x * y, y - 1), X, X, donate=(0,))
    assert g.nodes[0].writes == (Region("arg0", 0, 48),) and not g.copies


def test_an_old_value_that_is_still_read_needs_a_copy():
    def f(cache, row):
        new = jax.lax.dynamic_update_slice(cache, row, (0, 0))
        return new, jnp.tanh(cache[0])

    g = graph(f, X, ROW, donate=0)
    assert "donated argument 0" in g.copies[0] and "tanh" in g.copies[0]
    assert g.conflicts(*named(g, "dynamic_update_slice", "tanh")) == set()
    assert graph(lambda c, r: (c.at[0].set(0), c), X, ROW, donate=0).copies


def test_references_conflict_by_the_rows_they_touch():
    def f(ref, x):
        a = ref[0]
        ref[1:3] = x[:2]
        b = ref[2] * 2
        ref[0] = a + b
        inner = jax.new_ref(x)
        inner[0] = b
        return jax.freeze(inner)

    ref = jax.new_ref(jnp.zeros((4, 3)))
    g = graph(f, ref, X)
    get_0, get_2 = (n.id for n in g.nodes if n.name == "get")
    set_12, set_0, set_inner = (n.id for n in g.nodes if n.name == "swap")
    assert g.node(set_12).writes[-1] == Region("ref0", 12, 36)
    assert g.conflicts(get_0, set_12) == set()
    assert g.conflicts(set_12, get_2) == {"RAW"}
    assert g.conflicts(get_0, set_0) == {"WAR"}
    assert g.conflicts(set_0, set_inner) == set()
    assert g.conflicts(set_inner, named(g, "freeze")[0]) == {"RAW", "WAW"}
    assert g.unannotated_dispatch_count == 0
    x = jnp.arange(12.0).reshape(4, 3)
    other = jax.new_ref(jnp.zeros((4, 3)))
    np.testing.assert_array_equal(g(ref, x), f(other, x))
    np.testing.assert_array_equal(ref[...], other[...])


def test_a_loop_that_writes_a_reference_conflicts_with_all_of_it():
    def f(ref, i):
        def body(k, x):
            ref[k] = x
            return x + 1

        before = ref[3]
        jax.lax.fori_loop(0, 2, body, 0.0)
        ref[i] = 1.0  # a traced index: anywhere
        return before + ref[3]

    ref = jax.new_ref(jnp.zeros(4))
    g = graph(f, ref, 1)
    loop, write = named(g, "scan", "swap")
    before, after = (n.id for n in g.nodes if n.name == "get")
    assert g.conflicts(before, loop) == {"WAR"}
    assert g.conflicts(loop, write) == {"WAW"}
    assert g.conflicts(write, after) == {"RAW"}


def test_unknown_operators_and_effects_are_barriers():
    """D33: an unknown operator counts as reorderable in the origin."""

    def f(x, y):
        a = jnp.sin(x)
        b = foreign_p.bind(y)
        c = jnp.cos(y)
        jax.debug.callback(lambda _: None, c)
        d = jax.pure_callback(np.asarray, x, x)
        inside = lambda: jax.pure_callback(np.asarray, x, x)  # noqa: E731
        e = jax.lax.cond(y[0, 0] > 0, inside, lambda: y)
        return a, b, c, d, e, jnp.tan(x)

    g = graph(f, X, X)
    reasons = {n.name: n.barrier for n in g.nodes if n.barrier}
    assert reasons.pop("add") == "unknown primitive add"
    assert set(reasons) == {"debug_callback", "pure_callback", "cond"}
    assert g.unannotated_dispatch_count == 4
    (sin, foreign, cos, tan) = named(g, "sin", "add", "cos", "tan")
    levels = {id: k for k, ids in enumerate(g.levels()) for id in ids}
    assert levels[sin] < levels[foreign] < levels[cos] < levels[tan]
    assert {foreign, cos, tan} <= set(g.barriers())
    order = [n.id for n in g.reorder().nodes]
    assert order.index(sin) < order.index(foreign) < order.index(cos)
    assert order.index(tan) == len(order) - 1


def test_a_graph_is_the_function():
    def f(p, x):
        y = jaxkern.rms_norm(x @ p["w"], p["g"])
        return {"y": y, "z": (jnp.tanh(y), x)}

    k = jax.random.split(jax.random.key(0), 3)
    p = {"w": jax.random.normal(k[0], (3, 3)), "g": jax.random.normal(k[1], 3)}
    x = jax.random.normal(k[2], (4, 3))
    before = str(jax.make_jaxpr(f)(p, x))
    g = graph(f, p, X)
    assert str(jax.make_jaxpr(f)(p, x)) == before  # recording leaves no trace
    assert str(jax.make_jaxpr(g)(p, x)) == before

    def loss(h):
        return lambda p, x: h(p, x)["z"][0].sum()

    def check(a, b):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, 1e-6), a, b)

    @jax.jit
    def every_way(p, x):
        return [
            (h(p, x), jax.grad(loss(h))(p, x), jax.vmap(h, (None, 0))(p, x[None]))
            for h in (g, f)
        ]

    check(*every_way(p, x))

    constant = graph(lambda x: (x, 3, None), x)(x)
    assert isinstance(constant[1], jax.Array) and constant[1] == 3
    with pytest.raises(TypeError, match="recorded for arguments"):
        g(p)
    with pytest.raises(TypeError, match=r"recorded for .*4,3.*, got .*3,3"):
        g(p, x[:3])
    with pytest.raises(ValueError, match=r"donate.*\[2\], got 2 arguments"):
        graph(f, p, x, donate=2)
    with pytest.raises(ValueError, match="lookahead"):
        g.reorder(-1)


def test_a_graph_prints_as_text_and_as_a_table():
    g = graph(lambda x: jnp.sin(foreign_p.bind(x)[0]), X)
    assert repr(g).startswith("Graph of 4 nodes, 2 dispatches, 1 barriers, 2 levels")
    assert "unknown primitive add" in repr(g) and "Elementwise  sin" in repr(g)
    out = io.StringIO()
    rich.print(g, file=out)
    assert "unknown" in out.getvalue() and "sin" in out.getvalue()
