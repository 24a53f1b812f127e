"""Reordering: fewer barriers, the same equations, and the same bytes in memory.

The programs are random: they update a donated cache, read views of it old and new, read
and write a reference, and call operators that nobody knows. Each is run as JAX runs it
and on a memory of bytes, in place where the graph says that an equation writes there.
"""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.extend.core import Literal, Primitive

from jaxkern.runtime import OpKind
from jaxkern.runtime.graph.graph import graph
from jaxkern.runtime.graph.reorder import reordered

unknown_p = Primitive("unknown")
unknown_p.def_impl(lambda x: x)
unknown_p.def_abstract_eval(lambda x: x)

ROWS = 4
ACTIONS = [
    "add",
    "mul",
    "cumsum",
    "read",
    "old",
    "update",
    "sum",
    "get",
    "set",
    "unknown",
]


def program(actions):
    """The function that does `actions`, triples of a name and two numbers."""

    def f(cache, ref, row):
        first, rows, views = cache, [row], {0}  # row is an argument
        for action, i, j in actions:
            if action in ("read", "old"):
                views.add(len(rows))
            x, y, k = rows[i % len(rows)], rows[j % len(rows)], j % ROWS
            if action == "add":
                rows.append(x + y)
            elif action == "mul":
                rows.append(x * y)
            elif action == "cumsum":
                rows.append(jax.lax.cumsum(x, axis=1))  # not reorderable
            elif action == "read":
                rows.append(jax.lax.slice(cache, (k, 0), (k + 1, 3)))
            elif action == "old":
                flat = first.reshape(2, 6)
                rows.append(flat[k % 2, 3 * (k // 2) :][None, :3])
            elif action == "update":
                cache = jax.lax.dynamic_update_slice(cache, x, (k, 0))
            elif action == "sum":
                rows.append(cache.sum(0, keepdims=True))
            elif action == "get":
                rows.append(ref[k : k + 1])
            elif action == "set":
                ref[k : k + 1] = x
            else:
                rows.append(unknown_p.bind(x))
        made = [x for k, x in enumerate(rows) if k not in views]
        return cache, made[-3:]

    return f


def arguments():
    cache = np.arange(12.0, dtype=np.float32).reshape(ROWS, 3) / 7 - 1
    return cache, cache[::-1] * 2, np.float32([[0.5, -1, 2]])


class Memory:
    """Runs nodes on bytes: views share them, updates in place overwrite them."""

    def __init__(self, g, cache, ref, row):
        self.g, self.arg0, self.ref = g, cache.copy(), ref.copy()
        self.values = dict(zip(g.jaxpr.invars, (self.arg0, self.ref, row), strict=True))

    def read(self, v):
        return v.val if isinstance(v, Literal) else self.values[v]

    def run(self, node):
        eqn = node.equation
        x, *others = map(self.read, eqn.invars)
        params, name = eqn.params, node.name
        in_place = any(region.buffer == "arg0" for region in node.writes)
        if name == "slice":
            ends = zip(params["start_indices"], params["limit_indices"], strict=True)
            out = x[tuple(slice(*end) for end in ends)]
        elif name in ("reshape", "squeeze", "broadcast_in_dim"):
            out = x.reshape(eqn.outvars[0].aval.shape)
            assert np.shares_memory(out, x)
        elif name == "dynamic_update_slice":
            out = x if in_place else x.copy()
            assert not in_place or np.shares_memory(x, self.arg0)
            out[others[1] : others[1] + 1] = others[0]
        elif name == "get":
            out = self.ref[indices(eqn, others)].copy()
        elif name == "swap":
            out = self.ref[indices(eqn, others[1:])].copy()
            self.ref[indices(eqn, others[1:])] = others[0]
        else:
            out = {
                "add": lambda: x + others[0],
                "mul": lambda: x * others[0],
                "cumsum": lambda: np.cumsum(x, 1),
                "reduce_sum": lambda: x.sum(0),
                "unknown": lambda: x.copy(),
            }[name]()
        self.values[eqn.outvars[0]] = out

    def results(self):
        return [self.read(v).copy() for v in self.g.jaxpr.outvars], self.ref


def indices(eqn, leaves):
    (transform,) = jax.tree.unflatten(eqn.params["tree"], leaves)
    row = transform.indices[0]
    return slice(int(row.start), int(row.start) + row.size)


def on_memory(g, nodes):
    memory = Memory(g, *arguments())
    for node in nodes:
        memory.run(node)
    return memory.results()


def record(actions):
    cache, ref, row = arguments()
    return graph(program(actions), cache, jax.new_ref(jnp.asarray(ref)), row, donate=0)


def check_reordered(g, h):
    """Same equations, each after what it waits for, no node across a barrier."""
    assert Counter(map(id, (n.equation for n in g.nodes))) == Counter(
        map(id, (n.equation for n in h.nodes))
    )
    assert list(map(id, h.jaxpr.eqns)) == [id(n.equation) for n in h.nodes]
    place = {n.id: k for k, n in enumerate(h.nodes)}
    for b in g.nodes:
        for a in g.nodes[: b.id]:
            if a.barrier or b.barrier or g.conflicts(a, b):
                assert place[a.id] < place[b.id]
    assert h.barrier_count <= g.barrier_count


def check_results(g, h):
    """In order, reordered and in any order that respects the levels: the same."""
    expected, ref = on_memory(g, g.nodes)
    by_level = [g.node(id) for ids in g.levels() for id in ids]
    for nodes in (h.nodes, by_level):
        found, found_ref = on_memory(g, nodes)
        np.testing.assert_array_equal(found_ref, ref)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def check_jax(g, h):
    expected, ref = on_memory(g, g.nodes)
    for f in (g, h, jax.jit(h)):
        cache, ref_value, row = arguments()
        own = jax.new_ref(jnp.asarray(ref_value))
        for a, b in zip(jax.tree.leaves(f(cache, own, row)), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(own[...], ref, rtol=1e-5, atol=1e-6)


steps = st.tuples(st.sampled_from(ACTIONS), st.integers(0, 20), st.integers(0, 20))


# An update that could join the group, but a node that waits, or one that may not move,
# still reads the row that it replaces.
WAITS_AND_READS = [("mul", 0, 0), ("read", 0, 2), ("mul", 1, 2), ("update", 0, 2)]
SKIPPED_AND_READS = [
    ("mul", 0, 0),
    ("mul", 1, 1),
    ("read", 0, 2),
    ("cumsum", 3, 0),
    ("update", 0, 2),
]


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.lists(steps, max_size=20), st.sampled_from([0, 1, 3, 64]))
@example(WAITS_AND_READS, 64)
@example(SKIPPED_AND_READS, 64)
def test_random_programs_keep_their_dependencies_and_results(actions, lookahead):
    g = record(actions)
    h = g.reorder(lookahead)
    check_reordered(g, h)
    check_results(g, h)


@pytest.mark.full
@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@given(st.lists(steps, max_size=40), st.sampled_from([1, 2, 5, 64]))
def test_many_random_programs(actions, lookahead):
    test_random_programs_keep_their_dependencies_and_results.hypothesis.inner_test(
        actions, lookahead
    )


EVERY_ACTION = [(a, k, 3 * k) for k, a in enumerate(ACTIONS[:-1] * 2)]


def test_jax_runs_both_orders_to_the_same_results():
    g = record(EVERY_ACTION)
    h = g.reorder()
    assert [n.id for n in h.nodes] != [n.id for n in g.nodes]
    check_reordered(g, h)
    check_results(g, h)
    check_jax(g, h)


@pytest.mark.full
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.lists(steps.filter(lambda s: s[0] != "unknown"), max_size=20))
def test_jax_runs_random_programs_in_both_orders(actions):
    g = record(actions)
    check_jax(g, g.reorder())


def test_independent_chains_are_interleaved():
    def f(xs):
        return [jnp.exp(jnp.sin(x)) * 2 for x in xs]

    g = graph(f, [jnp.zeros(3)] * 4)
    assert g.barrier_count == 8
    h = g.reorder()
    assert h.barrier_count == 2
    assert [n.name for n in h.nodes] == ["sin"] * 4 + ["exp"] * 4 + ["mul"] * 4
    assert [n.id for n in g.reorder(lookahead=0).nodes] == list(range(12))
    assert g.reorder(lookahead=3).barrier_count == 4
    # Kinds that are not reorderable stay behind what they follow.
    g = graph(lambda x, y: (jnp.cos(jnp.sin(x)), y.sum()), jnp.zeros(3), jnp.zeros(3))
    assert [n.name for n in g.reorder().nodes] == ["sin", "cos", "reduce_sum"]


def test_d33_unknown_operators_are_not_moved():
    """CapturedOpKind::Other is reorderable: an unknown write would pass a read."""
    g = record([("mul", 0, 0), ("mul", 1, 1), ("unknown", 0, 0), ("get", 0, 0)])
    (unknown,) = (n.id for n in g.nodes if n.name == "unknown")
    assert [n.id for n in g.reorder().nodes] == [n.id for n in g.nodes]

    def as_in_the_origin(node):
        if node.id != unknown:
            return node
        return dataclasses.replace(node, barrier=None, kind=OpKind.ELEMENTWISE)

    order = [n.id for n in reordered([as_in_the_origin(n) for n in g.nodes], 64)]
    assert order.index(unknown) < unknown


def test_d36_operators_without_known_bytes_keep_their_barriers():
    """The origin's barriers are computed from annotations alone, after reordering."""
    g = record([("unknown", 0, 0), ("get", 0, 0), ("unknown", 0, 0), ("set", 0, 0)])
    first, second = (n.id for n in g.nodes if n.name == "unknown")
    h = g.reorder()
    between = [n.id for n in h.nodes if first < n.id < second and not n.is_view]
    assert {between[0], second, second + 1} <= set(h.barriers())
    assert h.unannotated_dispatch_count == 2
    unannotated = [
        dataclasses.replace(n, barrier=None, reads=(), writes=()) for n in g.nodes
    ]
    assert dataclasses.replace(g, nodes=tuple(unannotated)).barriers() == ()
