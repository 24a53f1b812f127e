"""What every op must pass under grad, jvp, vmap, checkpoint and scan.

`tests/checks.py` has the rest.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.test_util import check_grads

from jaxkern.primitives.family import KernelPrimitive
from tests.checks import (
    Case,
    as_tuple,
    bound,
    differentiable,
    float_operands,
    gradients,
    in_float64,
    is_float,
    loss_of,
    operands_of,
    same,
)


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
        direction = tuple(jnp.asarray(rng.standard_normal(v.shape)) for v in values)

        def every_mode(f, values, direction):
            loss = loss_of(f, operands, wrt)
            grad = jax.grad(loss, tuple(range(len(wrt))))

            def along(*values):
                return jax.jvp(loss, values, direction)[1]

            def pulled_along(*values):
                pairs = zip(grad(*values), direction, strict=True)
                return sum(jnp.vdot(g, d) for g, d in pairs)

            every = tuple(range(len(wrt)))
            return {
                "forward": along(*values),
                "reverse": grad(*values),
                "forward over reverse": jax.jvp(grad, values, direction)[1],
                "reverse over forward": jax.grad(along, every)(*values),
                "reverse over reverse": jax.grad(pulled_along, every)(*values),
            }

        actual, expected = (
            jax.jit(functools.partial(every_mode, bound(p, case, reference)))(
                values, direction
            )
            for reference in (False, True)
        )
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
        grads = jax.grad(loss_of(bound(p, case), operands, wrt))(
            *(operands[i] for i in wrt)
        )
        for g in as_tuple(grads):
            assert not np.any(np.asarray(g))


def check_numerical_gradients(p: KernelPrimitive, case: Case) -> None:
    """Finite differences to order 2, forward and reverse, in float64."""
    with jax.enable_x64(True):
        operands = [in_float64(x) for x in operands_of(p, case)]
        if not differentiable(p, operands):
            return
        wrt = float_operands(operands)
        loss = jax.jit(loss_of(bound(p, case), operands, wrt))
        values = tuple(operands[i] for i in wrt)
        check_grads(loss, values, order=2, modes=["fwd", "rev"], atol=1e-4, rtol=1e-4)


def batched_operands(operands: Sequence, size: int, at: Sequence[int]) -> list:
    """`size` variants of the operands at positions `at`, on a new leading axis."""

    def variant(x, k):
        if jnp.issubdtype(x.dtype, jnp.floating):
            return x * (1 + 0.25 * k)
        return jnp.roll(x, k)

    return [
        jnp.stack([variant(x, k) for k in range(size)]) if i in at else x
        for i, x in enumerate(operands)
    ]


def check_vmap(p: KernelPrimitive, case: Case) -> None:
    """vmap over each operand, all, an inner axis, nested, and of gradients."""
    operands = operands_of(p, case)
    present = [i for i, x in enumerate(operands) if x is not None]
    f, reference = bound(p, case), bound(p, case, reference=True)
    for at in [*([i] for i in present), present]:
        mapped = batched_operands(operands, 3, at)
        axes = tuple(0 if i in at else None for i in range(len(operands)))
        check_one_vmap(p, f, reference, mapped, axes)
    # nested: everything on the outer level, the first operand alone on the inner one
    outer = batched_operands(batched_operands(operands, 2, present[:1]), 3, present)
    inner_axes = tuple(0 if i == present[0] else None for i in range(len(operands)))
    outer_axes = tuple(None if x is None else 0 for x in operands)

    def nested(*outer):
        vmaps = (jax.vmap(jax.vmap(g, inner_axes), outer_axes) for g in (f, reference))
        return [g(*outer) for g in vmaps]

    same(*jax.jit(nested)(*outer), what="nested vmap")


def check_one_vmap(p, f, reference, mapped: Sequence, axes: tuple) -> None:
    last = tuple(None if a is None else -1 for a in axes)

    def values(*mapped):
        inner = [
            x if a is None else jnp.moveaxis(x, 0, -1)
            for x, a in zip(mapped, axes, strict=True)
        ]
        expected = jax.vmap(reference, axes)(*mapped)
        return expected, jax.vmap(f, axes)(*mapped), jax.vmap(f, last)(*inner)

    expected, first_axis, last_axis = jax.jit(values)(*mapped)
    same(first_axis, expected, what="vmap")
    same(last_axis, expected, what="vmap over the last axis")
    first = [x if a is None else x[0] for x, a in zip(mapped, axes, strict=True)]
    if not differentiable(p, first):
        return

    def grads(*mapped):
        return [
            order(g)
            for order in (
                lambda g: gradients(jax.vmap(g, axes), mapped)(*mapped),
                lambda g: jax.vmap(gradients(g, first), axes)(*mapped),
            )
            for g in (f, reference)
        ]

    with jax.enable_x64(True):
        outer, outer_expected, inner, inner_expected = jax.jit(grads)(
            *map(in_float64, mapped)
        )
    same(outer, outer_expected, ulps=2**20, what="grad of vmap")
    same(inner, inner_expected, ulps=2**20, what="vmap of grad")


def check_transforms(p: KernelPrimitive, case: Case) -> None:
    """checkpoint and scan, values and gradients."""
    f, reference = bound(p, case), bound(p, case, reference=True)

    def scanned(f):
        def run(*operands):
            def step(total, k):
                held = [x * (1 + k) if is_float(x) else x for x in operands]
                out = as_tuple(f(*held))
                return total + sum(jnp.sum(jnp.nan_to_num(y)) for y in out), out

            return jax.lax.scan(step, 0.0, jnp.arange(2) / 8)[1]

        return run

    def values(*operands):
        return [scanned(g)(*operands) for g in (f, reference)]

    def grads(*operands):
        variants = (jax.checkpoint(f), reference, scanned(f), scanned(reference))
        return [gradients(g, operands)(*operands) for g in variants]

    with jax.enable_x64(True):
        operands = [in_float64(x) for x in operands_of(p, case)]
        same(*jax.jit(values)(*operands), what="scan")
        if differentiable(p, operands):
            checkpoint, expected, scan, scan_expected = jax.jit(grads)(*operands)
            same(checkpoint, expected, ulps=2**20, what="checkpoint")
            same(scan, scan_expected, ulps=2**20, what="grad of scan")
