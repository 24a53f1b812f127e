"""What every op must pass under grad, jvp, vmap, checkpoint and scan.

`jaxkern/testing/checks.py` has the rest.
"""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.primitives.family import KernelPrimitive
from jaxkern.testing.checks import (
    Case,
    as_tuple,
    bound,
    differentiable,
    float_operands,
    gradients,
    in_float64,
    jitted,
    jitted_with_gradients,
    loss_of,
    on_device,
    operands_of,
    same,
)
from jaxkern.testing.interpreter import evaluate_each, evaluated


def check_gradients(p: KernelPrimitive, case: Case) -> None:
    """Gradients and their directional derivatives equal those of the reference."""
    with jax.enable_x64(True):
        operands = [in_float64(x) for x in operands_of(p, case)]
        if not differentiable(p, operands):
            check_no_gradient(p, case, operands)
            return
        wrt = float_operands(operands)
        values = tuple(operands[i] for i in wrt)
        rng = np.random.default_rng(1)
        direction = tuple(on_device(rng.standard_normal(v.shape)) for v in values)

        orders = (
            "forward over reverse",
            "reverse over forward",
            "reverse over reverse",
        )

        def every_mode(f, of_second_order):
            """What is of first order comes of what is of second order."""
            loss = loss_of(f, operands, wrt)
            every = tuple(range(len(wrt)))
            grad = jax.grad(loss, every)

            def along(*values):
                return jax.jvp(loss, values, direction)[1]

            def pulled_along(*values):
                return dot(grad(*values), direction)

            def modes(*values):
                reverse, tangents = jax.jvp(grad, values, direction)
                found = {"reverse": reverse, orders[0]: tangents}
                if orders[1] not in of_second_order:
                    return found | {"forward": along(*values)}
                forward, of_forward = jax.value_and_grad(along, every)(*values)
                found |= {"forward": forward, orders[1]: of_forward}
                return found | {orders[2]: jax.grad(pulled_along, every)(*values)}

            return modes

        actual = evaluated(every_mode(bound(p, case), orders), *values)
        # the second derivatives of plain JAX are the same in each order, but where
        # the reverse pass rounds
        compared = orders if case.straight_through else orders[:1]
        of_reference = every_mode(bound(p, case, reference=True), compared)
        expected = evaluated(of_reference, *values)
        first = expected[orders[0]]
        expected |= {mode: first for mode in orders if mode not in compared}
        for mode in expected:
            leaves = (jax.tree.leaves(x[mode]) for x in (actual, expected))
            for g, e in zip(*leaves, strict=True):
                np.testing.assert_allclose(
                    g, e, rtol=1e-8, atol=1e-9, err_msg=f"{p.name} {mode}"
                )


def check_no_gradient(p: KernelPrimitive, case: Case, operands: Sequence) -> None:
    """Integer results have zero tangents, and differentiating through them works."""
    wrt = float_operands(operands)
    if wrt:
        loss = loss_of(bound(p, case), operands, wrt)
        grads = evaluated(jax.grad(loss), *(operands[i] for i in wrt))
        for g in as_tuple(grads):
            assert not np.any(np.asarray(g))


STEP = 1e-4  # of differences


def check_numerical_gradients(p: KernelPrimitive, case: Case) -> None:
    """Finite differences to order 2, forward and reverse, in float64.

    Not of what is straight-through, which has none.
    """
    if case.straight_through:
        return
    with jax.enable_x64(True):
        operands = [in_float64(x) for x in operands_of(p, case)]
        if not differentiable(p, operands):
            return
        wrt = float_operands(operands)
        loss = loss_of(bound(p, case), operands, wrt)
        every = tuple(range(len(wrt)))
        values = tuple(operands[i] for i in wrt)
        rng = np.random.default_rng(1)
        u, v = (
            tuple(on_device(rng.standard_normal(x.shape)) for x in values)
            for _ in range(2)
        )

        def forward(f, at):
            return lambda *values: jax.jvp(f, values, at)[1]

        def reverse(f, at):
            return lambda *values: dot(jax.grad(f, every)(*values), at)

        def differences(f, at):
            """Of f a step each way."""
            a, b = (
                f(*(x + step * d for x, d in zip(values, at, strict=True)))
                for step in (STEP, -STEP)
            )
            return (a - b) / (2 * STEP)

        def all_orders():
            along = forward(loss, u)
            firsts = [mode(loss, u)(*values) for mode in (forward, reverse)]
            seconds = [
                outer(inner(loss, u), v)(*values)
                for outer in (forward, reverse)
                for inner in (forward, reverse)
            ]
            return (differences(loss, u), firsts), (differences(along, v), seconds)

        for order, (expected, found) in enumerate(evaluated(all_orders), 1):
            what = f"{p.name}, differences of order {order}"
            np.testing.assert_allclose(
                found, len(found) * [expected], rtol=1e-4, atol=1e-4, err_msg=what
            )


def dot(xs: Sequence[jax.Array], ys: Sequence[jax.Array]) -> jax.Array:
    """The sum of the products of all elements of all arrays."""
    return sum(
        (jnp.vdot(x, y) for x, y in zip(xs, ys, strict=True)), start=jnp.zeros(())
    )


def batched_operands(operands: Sequence, size: int, at: Sequence[int]) -> list:
    """`size` variants of the operands at positions `at`, on a new leading axis."""

    def variant(x, k):
        if jnp.issubdtype(x.dtype, jnp.floating):
            return x * np.asarray(1 + 0.25 * k, x.dtype)
        return np.roll(x, k)

    return [
        on_device(np.stack([variant(np.asarray(x), k) for k in range(size)]))
        if i in at
        else x
        for i, x in enumerate(operands)
    ]


def examples_of(mapped: Sequence, axes: Sequence) -> list[list]:
    """The operands of each example of a vmap over the first axis of some operands."""
    size = next(x.shape[0] for x, a in zip(mapped, axes, strict=True) if a == 0)
    held: list = [None if x is None else np.asarray(x) for x in mapped]
    return [
        [x if a is None else x[k] for x, a in zip(held, axes, strict=True)]
        for k in range(size)
    ]


def of_each(f: Callable, maps: Sequence[Sequence[Sequence]]) -> list:
    """For each map the results of f for its examples, stacked on a first axis.

    An example that several maps have, such as their first, is evaluated once.
    """
    keys = [list(map(key_of, examples)) for examples in maps]
    pairs = zip(itertools.chain(*keys), itertools.chain(*maps), strict=True)
    different = dict(pairs)
    found = evaluate_each(f, list(different.values()))
    results = dict(zip(different, found, strict=True))
    return [stacked([results[key] for key in of_map]) for of_map in keys]


def key_of(example: Sequence) -> tuple:
    return tuple(
        None if x is None else (x.shape, x.dtype, np.asarray(x).tobytes())
        for x in example
    )


def stacked(results: Sequence):
    return jax.tree.map(lambda *ys: np.stack([np.asarray(y) for y in ys]), *results)


def summed_where_shared(grads: Sequence, operands: Sequence, axes: Sequence) -> list:
    """Gradients of the sum of the examples' losses, from those of each example."""
    if not grads:  # no result depends on them
        return []
    pairs = zip(float_operands(operands), grads, strict=True)
    return [g if axes[i] == 0 else g.sum(0) for i, g in pairs]


def axes_of(operands: Sequence, at: Sequence[int]) -> tuple:
    return tuple(0 if i in at else None for i in range(len(operands)))


def check_vmap(p: KernelPrimitive, case: Case, full: bool = False) -> None:
    """vmap over each operand, all, the last axis, nested, and of gradients.

    The reference is evaluated for each example by itself.
    """
    operands = operands_of(p, case)
    present = [i for i, x in enumerate(operands) if x is not None]
    f, reference = bound(p, case), jitted(p, case, reference=True)
    each = [[i] for i in present] + ([present] if len(present) > 1 else [])
    every_axes = [axes_of(operands, at) for at in each]
    every = [batched_operands(operands, 3, at) for at in each]
    # nested: everything on the outer level, the first operand alone on the inner one
    outer = batched_operands(batched_operands(operands, 2, present[:1]), 3, present)
    outer_axes, inner_axes = axes_of(operands, present), axes_of(operands, present[:1])
    # which axis it is is the shared rule's business, so the last one is mapped once
    last = tuple(None if a is None else -1 for a in every_axes[-1])

    def values(every, outer):
        moved = [x if x is None else jnp.moveaxis(x, 0, -1) for x in every[-1]]
        along_first = [
            jax.vmap(f, axes)(*mapped)
            for mapped, axes in zip(every, every_axes, strict=True)
        ]
        nested = jax.vmap(jax.vmap(f, inner_axes), outer_axes)(*outer)
        return along_first, jax.vmap(f, last)(*moved), nested

    along_first, along_last, nested = evaluated(values, every, outer)
    examples = list(map(examples_of, every, every_axes))
    rows = [examples_of(inner, inner_axes) for inner in examples_of(outer, outer_axes)]
    of_examples = of_each(reference, [*examples, *rows])
    expected, of_rows = of_examples[: len(every)], of_examples[len(every) :]
    for at, first, e in zip(each, along_first, expected, strict=True):
        same(first, e, what=f"vmap over {at}")
    same(along_last, expected[-1], what="vmap over the last axis")
    same(nested, stacked(of_rows), what="nested vmap")
    if differentiable(p, operands):
        halves = [present[::2], present[1::2]] if len(present) > 1 else [present]
        if full:
            check_gradients_of_vmap(p, case, each, each)
        else:
            check_gradients_of_vmap(p, case, halves, [present])


def check_gradients_of_vmap(
    p: KernelPrimitive,
    case: Case,
    outer: Sequence[Sequence[int]],
    inner: Sequence[Sequence[int]],
) -> None:
    """grad of vmap and vmap of grad, each over the operands at several positions.

    Args:
      outer: positions of the operands of each vmap that a gradient is taken of.
      inner: the same of each vmap of a gradient.
    """
    f, operands = bound(p, case), operands_of(p, case)
    axes_of_outer, axes_of_inner = (
        [axes_of(operands, at) for at in each] for each in (outer, inner)
    )

    def grads(of_outer, of_inner):
        return [
            gradients(jax.vmap(f, axes), mapped, examples=1)(*mapped)
            for mapped, axes in zip(of_outer, axes_of_outer, strict=True)
        ], [
            jax.vmap(gradients(f, mapped), axes)(*mapped)
            for mapped, axes in zip(of_inner, axes_of_inner, strict=True)
        ]

    with jax.enable_x64(True):
        wide = [in_float64(x) for x in operands]
        of_outer, of_inner = (
            [batched_operands(wide, 3, at) for at in each] for each in (outer, inner)
        )
        found = itertools.chain(*evaluated(grads, of_outer, of_inner))
        reference = jitted_with_gradients(p, case, reference=True)
        every, every_axes = of_outer + of_inner, axes_of_outer + axes_of_inner
        of_examples = of_each(reference, list(map(examples_of, every, every_axes)))
        for k, (mapped, axes, actual, (_, expected)) in enumerate(
            zip(every, every_axes, found, of_examples, strict=True)
        ):
            if k < len(outer):
                expected = summed_where_shared(expected, mapped, axes)
            what = "grad of vmap" if k < len(outer) else "vmap of grad"
            same(actual, expected, ulps=2**20, what=f"{what}, {axes}")


def check_transforms(p: KernelPrimitive, case: Case) -> None:
    """checkpoint and scan, values and gradients."""
    f, reference = bound(p, case), jitted_with_gradients(p, case, reference=True)

    def scanned(*several):
        def step(total, operands):
            out = as_tuple(f(*operands))
            return total + sum(jnp.sum(jnp.nan_to_num(y)) for y in out), out

        # unrolled where it is lowered: its rules are those of the loop
        return jax.lax.scan(step, 0.0, several, unroll=True)[1]

    def every(operands, several):
        if not differentiable(p, operands):
            return scanned(*several), (), ()
        return (
            scanned(*several),
            gradients(scanned, several, examples=1)(*several),
            gradients(jax.checkpoint(f), operands)(*operands),
        )

    with jax.enable_x64(True):
        operands = [in_float64(x) for x in operands_of(p, case)]
        present = [i for i, x in enumerate(operands) if x is not None]
        several = batched_operands(operands, 2, present)
        axes = axes_of(operands, present)
        ((values, expected),) = of_each(reference, [examples_of(several, axes)])
        scan, scan_grads, checkpoint_grads = evaluated(every, operands, several)
        same(scan, values, what="scan")
        same(scan_grads, expected, ulps=2**20, what="grad of scan")
        first = [g[0] for g in expected]
        same(checkpoint_grads, first, ulps=2**20, what="checkpoint")
