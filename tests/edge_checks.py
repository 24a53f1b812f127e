"""What every op must pass at its edges: dims of size 1 and 0, operands that do not fit.

`tests/checks.py` has the rest.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.primitives.family import KernelPrimitive
from tests.checks import (
    Case,
    as_tuple,
    assert_near,
    bound,
    in_float64,
    label_of,
    operands_of,
)
from tests.sharding_checks import run_each


def check_degenerate_dims(p: KernelPrimitive, case: Case) -> None:
    """Every named dim at size 1 and 0: right, or refused with the op's name."""
    operands = operands_of(p, case)
    labels = {
        label_of(p, operands, i, d)
        for i, x in enumerate(operands)
        if x is not None
        for d in range(x.ndim)
    }
    kept, resized = [], []
    for label in sorted(name for name in labels if name.isidentifier()):
        for n in (1, 0):
            given = [
                None if x is None else take_label(p, operands, i, label, n)
                for i, x in enumerate(operands)
            ]
            try:
                jax.eval_shape(bound(p, case), *given)
            except (TypeError, ValueError) as error:
                assert_speaks(p, error)
                continue
            kept.append(f"{label}={n}")
            resized.append(given)
    found = run_each(bound(p, case), resized)
    with jax.enable_x64(True):
        wide = [[in_float64(x) for x in given] for given in resized]
        expected = run_each(bound(p, case, reference=True), wide)
    for size, actual, of_case in zip(kept, found, expected, strict=True):
        for y, e in zip(as_tuple(actual), as_tuple(of_case), strict=True):
            assert_near(y, np.asarray(e), case.ulps, what=f"{p.name} {size}")


def take_label(p: KernelPrimitive, operands: Sequence, i: int, label: str, n: int):
    x = operands[i]
    for d in range(x.ndim):
        names = label_of(p, operands, i, d).removeprefix("#").split("*")
        if label in names and x.shape[d] > 1:
            sizes = [1 if name != label else n for name in names]
            others = x.shape[d] // size_of(p, operands, label) if len(names) > 1 else 1
            x = jax.lax.slice_in_dim(x, 0, math.prod(sizes) * others, axis=d)
    return x


def size_of(p: KernelPrimitive, operands: Sequence, label: str) -> int:
    return next(
        x.shape[d]
        for i, x in enumerate(operands)
        if x is not None
        for d in range(x.ndim)
        if label_of(p, operands, i, d) == label
    )


def assert_speaks(p: KernelPrimitive, error: Exception) -> None:
    """The message begins with the op's name."""
    family = {q.name for q in (p, p.fwd, p.bwd) if q is not None}
    assert str(error).split(":")[0] in family, f"{type(error).__name__}: {error}"


def check_errors(p: KernelPrimitive, case: Case) -> None:
    """Wrong rank, dtype or size: a TypeError that names the op and the operand."""
    operands = operands_of(p, case)
    f = bound(p, case)
    counts: dict[str, int] = {}
    for i, x in enumerate(operands):
        if x is not None:
            for d in range(x.ndim):
                label = label_of(p, operands, i, d)
                counts[label] = counts.get(label, 0) + 1
    for i, (a, x) in enumerate(zip(p.operands, operands, strict=True)):
        if x is None:
            continue
        wrong: list[Any] = ["text", x.astype(jnp.complex64)]
        if not a.has_leading:
            wrong.append(x[None])
        wrong += [
            jnp.concatenate([x, x], d)
            for d in range(x.ndim)
            if x.shape[d]
            and counts[label_of(p, operands, i, d)] > 1
            # a dim that may be 1 or n has no wrong size if it is 1
            and (x.shape[d] > 1 or not label_of(p, operands, i, d).startswith("#"))
        ]
        for bad in wrong:
            with pytest.raises(TypeError) as raised:
                f(*operands[:i], bad, *operands[i + 1 :])
            assert_speaks(p, raised.value)
            if isinstance(bad, str) or bad.dtype == jnp.complex64:
                assert f"`{a.name}`" in str(raised.value)
