"""What every op must pass at its edges: dims of size 1 and 0, operands that do not fit
or are not there.

`jaxkern/testing/checks.py` has the rest.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxkern.primitives.family import KernelPrimitive
from jaxkern.testing.checks import (
    Case,
    as_tuple,
    assert_near,
    bound,
    label_of,
    num_elements,
    on_device,
    operands_of,
    truths,
)
from jaxkern.testing.interpreter import evaluate_each

SEEDS = 3  # drawn operands that may hide what one of them does


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
    found = evaluate_each(bound(p, case), resized)
    expected = truths(p, case, resized)
    for size, actual, of_case in zip(kept, found, expected, strict=True):
        for y, e in zip(as_tuple(actual), of_case, strict=True):
            assert_near(y, e, case.ulps, what=f"{p.name} {size}")


def take_label(p: KernelPrimitive, operands: Sequence, i: int, label: str, n: int):
    x = operands[i]
    for d in range(x.ndim):
        names = label_of(p, operands, i, d).removeprefix("#").split("*")
        if label in names and x.shape[d] > 1:
            sizes = [1 if name != label else n for name in names]
            others = x.shape[d] // size_of(p, operands, label) if len(names) > 1 else 1
            kept = math.prod(sizes) * others
            x = on_device(np.asarray(x)[(slice(None),) * d + (slice(kept),)])
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
        wrong: list[Any] = ["text", on_device(np.asarray(x).astype(np.complex64))]
        if not a.has_leading:
            wrong.append(on_device(np.asarray(x)[None]))
        wrong += [
            on_device(np.concatenate([np.asarray(x)] * 2, d))
            for d in range(x.ndim)
            if x.shape[d]
            and counts[label_of(p, operands, i, d)] > 1
            # a dim that may be 1 or n has no wrong size if it is 1
            and (x.shape[d] > 1 or not label_of(p, operands, i, d).startswith("#"))
        ]
        for bad in wrong:
            error = type_error_of(f, *operands[:i], bad, *operands[i + 1 :])
            assert error, f"{p.name}: {bad!r} for `{a.name}` raises no TypeError"
            assert_speaks(p, error)
            if isinstance(bad, str) or bad.dtype == np.complex64:
                assert f"`{a.name}`" in str(error)


def type_error_of(f: Callable, *operands: Any) -> TypeError | None:
    try:
        f(*operands)
    except TypeError as error:
        return error
    return None


def check_optional_operands(p: KernelPrimitive, *cases: Case) -> None:
    """Each optional operand changes some result: left out, or else with other values.

    There is a case with it and one without it, if only the same with it left out. An
    operand that others need, such as the second of a pair, is redrawn instead.
    """
    optional = [i for i, a in enumerate(p.operands) if a.optional]

    def given(case):
        return [i for i in optional if case.arguments.get(p.operands[i].name)]

    idle = {i: p.operands[i].name for i in optional}
    absent = {i for i in optional if any(i not in given(case) for case in cases)}
    for case in sorted(
        cases, key=lambda case: (-len(given(case)), num_elements(p, case))
    ):
        for seed in range(SEEDS):
            if not (at := [i for i in given(case) if i in idle]):
                break
            others, without = others_of(p, case, at, seed)
            absent |= without
            for i in changing(p, case, at, others, operands_of(p, case, seed)):
                del idle[i]
    assert not idle, f"{p.name}: no result depends on {list(idle.values())}"
    always = [p.operands[i].name for i in optional if i not in absent]
    assert not always, f"{p.name}: no case leaves out {always}"


def others_of(
    p: KernelPrimitive, case: Case, at: Sequence[int], seed: int
) -> tuple[list, set[int]]:
    """The operands with each at `at` left out or redrawn; which could be left out."""
    operands, redrawn = (operands_of(p, case, s) for s in (seed, seed + SEEDS))
    variants, without = [], set()
    for i in at:
        fewer = [None if k == i else x for k, x in enumerate(operands)]
        try:
            jax.eval_shape(bound(p, case), *fewer)
            without.add(i)
        except Exception:  # the public function refuses it, in its own words
            fewer[i] = redrawn[i]
        variants.append(fewer)
    return variants, without


def changing(
    p: KernelPrimitive, case: Case, at: Sequence[int], others: list, operands: Sequence
) -> list[int]:
    """Those of `at` whose variant has another result; all in one executable."""
    f = bound(p, case)
    base, *results = evaluate_each(f, [operands, *others])

    def bits(results):
        return [np.asarray(y).tobytes() for y in as_tuple(results)]

    return [i for i, y in zip(at, results, strict=True) if bits(y) != bits(base)]
