"""What every op must pass on a mesh: `jit`, explicit axes, shard_map, with kernels.

`jaxkern/testing/checks.py` has the rest; the devices are those of `tests/conftest.py`.
"""

import itertools
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern.lowering.sharded_call import Factors
from jaxkern.primitives.call import Call
from jaxkern.primitives.family import KernelPrimitive
from jaxkern.testing.checks import (
    Case,
    as_tuple,
    bound,
    differentiable,
    gradients,
    in_float64,
    label_of,
    on_device,
    opaque_kernels,
    operands_of,
    same,
    with_gradients,
)
from jaxkern.testing.interpreter import evaluate_each, evaluated
from jaxkern.testing.transform_checks import batched_operands

COLLECTIVES = r"\b(all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\("


def collectives(compiled) -> list[str]:
    return re.findall(COLLECTIVES, compiled.as_text())


def mesh_of(parts: int, kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh(
        (parts,), ("m",), axis_types=(kind,), devices=jax.devices()[:parts]
    )


def parts_of(n: int) -> int:
    """The largest number of our devices that cuts a dim of size n evenly, or 1."""
    return next(parts for parts in (8, 4, 2, 1) if n % parts == 0)


def shardings_of(p: KernelPrimitive, operands: Sequence) -> list[tuple[int, int, int]]:
    """(operand, dim, parts) for every dim of every operand that can be cut evenly."""
    return [
        (i, dim, parts_of(n))
        for i, x in enumerate(operands)
        if x is not None and x.size
        for dim, n in enumerate(x.shape)
        if parts_of(n) > 1
    ]


def check_sharding(p: KernelPrimitive, case: Case, full: bool = False) -> None:
    """Cuts each dim of each operand: plain `jit` gives the unsharded result.

    Up to three dims of every operand at once, each over an axis of its own; in full
    each dim by itself.
    """
    operands = operands_of(p, case)
    every = shardings_of(p, operands)
    rounds = [[cut] for cut in every] if full else in_rounds(every)
    calls = itertools.batched(rounds, 1 if full else 3)
    axes = [over_an_axis_each(several) for several in calls]
    placed = [place_each(operands, axes_of) for axes_of in axes]
    expected = evaluated(bound(p, case), *operands)
    found = run_each(bound(p, case), placed)
    for axes_of, y in zip(axes, found, strict=True):
        dims = ", ".join(f"dim {dim} of {p.operands[i].name}" for i, dim in axes_of)
        same(y, expected, what=f"{p.name}, {dims} cut")


def in_rounds(
    cuts: Sequence[tuple[int, int, int]],
) -> list[list[tuple[int, int, int]]]:
    """The first cut of every operand, then the second of each, and so on."""
    of_operand = [list(g) for _, g in itertools.groupby(cuts, lambda cut: cut[0])]
    rounds = itertools.zip_longest(*of_operand)
    return [[cut for cut in each if cut is not None] for each in rounds]


def over_axes(cuts: Sequence[tuple[int, int, int]], axes: str) -> dict:
    """By (operand, dim) the axes, of 2 devices each, that cut it into its parts."""
    return {
        (i, dim): tuple(axes[: min(parts.bit_length() - 1, len(axes))])
        for i, dim, parts in cuts
    }


AXES = {1: ["abc"], 2: ["ab", "c"], 3: ["a", "b", "c"]}  # of so many groups of cuts


def over_an_axis_each(groups: Sequence[Sequence[tuple[int, int, int]]]) -> dict:
    """`over_axes` of up to three groups of cuts; their axes are not the same."""
    axes = {}
    for cuts, own in zip(groups, AXES[len(groups)], strict=True):
        axes |= over_axes(cuts, own)
    return axes


def place_each(operands: Sequence, axes_of: dict) -> list:
    """The operands on a mesh of 8 devices, whose axes a, b and c have size 2.

    One function may then cut one dim into 8 parts, and another into 2.
    """
    kinds = (AxisType.Auto,) * 3
    mesh = jax.make_mesh(
        (2, 2, 2), tuple("abc"), axis_types=kinds, devices=jax.devices()[:8]
    )

    def sharding(i, x):
        return NamedSharding(mesh, P(*(axes_of.get((i, d)) for d in range(x.ndim))))

    return [
        None if x is None else on_device(x, sharding(i, x))
        for i, x in enumerate(operands)
    ]


def check_kernel_sharding(p: KernelPrimitive, case: Case, full: bool = False) -> None:
    """The same around opaque kernels, with the collectives that the dims imply.

    Three dims are drawn; in full it is every dim of every operand.
    """
    operands = operands_of(p, case)
    f = bound(p, case)
    expected = evaluated(f, *operands)
    grad = gradients(f, operands) if differentiable(p, operands) else None
    expected_grads = evaluated(grad, *operands) if grad else ()
    every = shardings_of(p, operands)
    drawn = random.Random(p.name).sample(every, min(len(every), 3))
    with opaque_kernels(p):
        for i, dim, parts in every if full else drawn:
            mesh = mesh_of(parts, AxisType.Auto)
            sharded = place(operands, i, dim, mesh)
            what = f"{p.name} kernel, operand {p.operands[i].name} dim {dim}"
            compiled = jax.jit(f).lower(*sharded).compile()
            same(compiled(*sharded), expected, what=what)
            assert_expected_collectives(p, operands, i, dim, parts, compiled, what)
            if grad:
                same(
                    jax.jit(grad)(*sharded),
                    expected_grads,
                    ulps=256,
                    what=f"grad {what}",
                )


class NamedDim(NamedTuple):
    """One named dim of a call, and where it may be cut.

    Attributes:
      operands: of the call; those of the case, or with the dim doubled.
      at: (operand, dim, parts).
      gathered: whether the kernel is declared to need the dim whole.
    """

    label: str
    operands: list
    at: tuple[int, int, int]
    gathered: bool


class CutCall(NamedTuple):
    """A call and its cuts, by (operand, dim) the axes of a mesh of 8 devices."""

    title: str
    operands: list
    axes: dict[tuple[int, int], tuple[str, ...]]


def check_every_dim(p: KernelPrimitive, case: Case, full: bool = False) -> None:
    """Cuts each named dim around opaque kernels: values and gradients.

    Up to three dims at once, each over an axis of its own; what is gathered, whatever
    it is, is cut in every operand at once. A dim that divides by no number of devices
    is doubled first, where the op lets it. In full each dim is cut alone, over two
    axes.
    """
    operands = operands_of(p, case)
    f = bound(p, case)
    every = dims_to_cut(p, case, operands)
    if full:
        calls = [CutCall(x.label, x.operands, over_axes([x.at], "ab")) for x in every]
        compare_cuts(p, with_gradients(p, f), calls, operands)
        return
    calls = []
    every = all_doubled(p, case, operands, every)
    for given in {id(x.operands): x.operands for x in every}.values():
        here = [x for x in every if x.operands is given]
        gathered = in_rounds(sorted(x.at for x in here if x.gathered))
        groups = [(x.label, [x.at]) for x in here if not x.gathered]
        groups += [("what is gathered", cuts) for cuts in gathered]
        for several in itertools.batched(groups, 3):
            titles, cuts = zip(*several, strict=True)
            calls.append(CutCall(" and ".join(titles), given, over_an_axis_each(cuts)))
    compare_cuts(p, with_gradients(p, f), calls, operands)


def dims_to_cut(p: KernelPrimitive, case: Case, operands: list) -> list[NamedDim]:
    """Each named dim that can be cut, doubled by itself where its size is odd."""
    holders: dict[str, tuple[int, int]] = {}
    for i, x in enumerate(operands):
        for d in range(0 if x is None else x.ndim):
            if operands[i].shape[d]:
                holders.setdefault(label_of(p, operands, i, d), (i, d))
    found = []
    for label, (i, d) in holders.items():
        given = operands
        if parts_of(given[i].shape[d]) == 1:
            given = with_doubled(p, operands, label)
        found += named_dim(p, case, label, given, (i, d))
    return found


def all_doubled(
    p: KernelPrimitive, case: Case, operands: list, every: list[NamedDim]
) -> list[NamedDim]:
    """The dims of one call in which all those are doubled that have to be.

    Where the op lets them only one by one, each has a call of its own.
    """
    given = operands
    for x in every:
        if x.operands is not operands:
            given = with_doubled(p, given, x.label)
    found = [dim for x in every for dim in named_dim(p, case, x.label, given, x.at[:2])]
    return found if len(found) == len(every) else every


def named_dim(
    p: KernelPrimitive, case: Case, label: str, operands: list, at: tuple[int, int]
) -> list[NamedDim]:
    """The dim as it is cut into at most 4 parts; none where the op or its size refuse.

    Args:
      at: (operand, dim).
    """
    i, d = at
    try:
        out = jax.tree.leaves(jax.eval_shape(bound(p, case), *operands))
    except (TypeError, ValueError):
        return []  # its size is given, by an option or by another dim
    holder = operands[i]
    assert holder is not None  # or it would have no label
    parts = min(parts_of(holder.shape[d]), 4)
    if parts == 1:
        return []
    gathered = not names_cut(p, operands, (i, d, parts), out)[0]
    return [NamedDim(label, operands, (i, d, parts), gathered)]


def compare_cuts(
    p: KernelPrimitive, every: Callable, calls: Sequence[CutCall], operands: list
) -> None:
    """Values and gradients of `every` around opaque kernels are those of whole arrays.

    Args:
      operands: of most calls; what they give is computed once.
    """
    if not calls:
        return
    others = [call.operands for call in calls if call.operands is not operands]
    of_operands, *of_others = evaluate_each(every, [operands, *others])
    with opaque_kernels(p):
        placed = [place_each(call.operands, call.axes) for call in calls]
        found = run_each(every, placed)
    rest = iter(of_others)
    for call, actual in zip(calls, found, strict=True):
        expected = of_operands if call.operands is operands else next(rest)
        what = f"{p.name} kernel, {call.title} cut"
        same(actual[0], expected[0], what=what)
        same(actual[1], expected[1], ulps=256, what=f"grad {what}")


def run_each(f: Callable, calls: Sequence[Sequence]) -> list:
    """The results of several calls of f, in one executable."""
    return jax.jit(lambda calls: [f(*operands) for operands in calls])(calls)


def with_doubled(p: KernelPrimitive, operands: Sequence, label: str) -> list:
    """The operands, twice as long along a dim."""
    return [
        x if x is None else doubled(p, operands, i, label)
        for i, x in enumerate(operands)
    ]


def doubled(p: KernelPrimitive, operands: Sequence, i: int, label: str):
    x = operands[i]
    for d in range(x.ndim):
        own = label_of(p, operands, i, d)
        may_be_one = own.startswith("#") and x.shape[d] == 1
        if label in (own, own.removeprefix("#"), own.split("*")[0]) and not may_be_one:
            x = on_device(np.concatenate([np.asarray(x)] * 2, d))
    return x


def assert_expected_collectives(p, operands, i, dim, parts, compiled, what) -> None:
    """A dim that may be cut moves no operand; a result that lacks it is one sum."""
    out = jax.tree.leaves(compiled.out_info)
    cut, factors = names_cut(p, operands, (i, dim, parts), out)
    found = collectives(compiled)
    if not cut:
        empty = any(x is not None and not x.size for x in operands)
        if empty or all(math.prod(y.shape) == 0 for y in out):
            return  # nothing is computed, or of nothing
        assert "all-gather" in found, f"{what}: expected a gather, found {found}"
        return
    (name,) = cut
    # another operand with the cut dim is held whole here and is sliced, not moved
    summed = any(name not in {f[0] for f in dims} for dims in factors.outs)
    assert set(found) <= ({"all-reduce"} if summed else set()), f"{what}: {found}"


def names_cut(
    p: KernelPrimitive, operands: Sequence, at: tuple[int, int, int], out: Sequence
):
    """By what the rule cuts the kernel where one dim of one operand is cut.

    Args:
      at: (operand, dim, parts).
      out: shapes and dtypes of the results.

    Returns:
      cut: the names; empty where the operand is gathered.
      factors: of the call.
    """
    i, dim, parts = at
    present = [x for x in operands if x is not None]
    absent = tuple(k for k, x in enumerate(operands) if x is None)
    avals = [jax.typeof(x) for x in present]
    factors = Factors.of(p, Call(absent=absent), avals, out)
    k = sum(x is not None for x in operands[:i])
    specs: list[Sequence] = [[None] * x.ndim for x in present]
    specs[k] = ["m" if d == dim else None for d in range(present[k].ndim)]
    return factors.cuts(specs, {"m": parts}), factors


def place(operands: Sequence, i: int, dim: int, mesh) -> list:
    def sharding(k, x):
        spec = ["m" if (k, d) == (i, dim) else None for d in range(x.ndim)]
        return NamedSharding(mesh, P(*spec))

    return [
        None if x is None else on_device(x, sharding(k, x))
        for k, x in enumerate(operands)
    ]


def check_explicit_sharding(p: KernelPrimitive, case: Case) -> None:
    """On an explicit mesh: leading and named dims that may be cut, types and values."""
    operands = operands_of(p, case)
    f = bound(p, case)
    expected = evaluated(f, *operands)
    for i, dim, parts in shardings_of(p, operands):
        label = label_of(p, operands, i, dim)
        if label in p.replicated or not label.isidentifier():
            continue
        mesh = mesh_of(parts, AxisType.Explicit)
        with jax.set_mesh(mesh):
            placed = place_by_label(p, operands, label, mesh)
            what = f"{p.name} explicit {label}"
            with opaque_kernels(p):
                same(jax.jit(f)(*placed), expected, what=what)
            same(jax.jit(f)(*placed), expected, what=what)


def check_explicit_vmap(p: KernelPrimitive, case: Case) -> None:
    """vmap over an axis that an explicit mesh cuts: values, types, gradients."""
    operands = operands_of(p, case)
    present = [i for i, x in enumerate(operands) if x is not None]
    f, mesh = bound(p, case), mesh_of(4, AxisType.Explicit)
    for at in (present, present[:1]):
        mapped = batched_operands(operands, 4, at)
        axes = tuple(0 if i in at else None for i in range(len(operands)))
        mapped_f = jax.vmap(f, axes)

        def every(*mapped, f=f, mapped_f=mapped_f, axes=axes):
            if not differentiable(p, operands):
                return (mapped_f(*mapped),)
            of_map = gradients(mapped_f, mapped)
            return (
                mapped_f(*mapped),
                of_map(*mapped),
                jax.vmap(gradients(f, operands), axes)(*mapped),
            )

        with jax.enable_x64(True):
            mapped = [in_float64(x) for x in mapped]
            expected = jax.jit(every)(*mapped)
            with jax.set_mesh(mesh):
                placed = [
                    None if x is None else jax.device_put(x, P("m") if i in at else P())
                    for i, x in enumerate(mapped)
                ]
                actual = jax.jit(every)(*placed)
        for y, e in zip(actual, expected, strict=True):
            same(y, e, ulps=2**20, what=f"{p.name} {at}")
        assert all(y.sharding.spec[0] == "m" for y in as_tuple(actual[0])), p.name


def place_by_label(p: KernelPrimitive, operands: Sequence, label: str, mesh) -> list:
    def sharding(i, x):
        labels = [label_of(p, operands, i, d) for d in range(x.ndim)]
        major = [name.split("*")[0].removeprefix("#") for name in labels]
        spec = [
            "m" if name == label and (n > 1 or not full.startswith("#")) else None
            for name, full, n in zip(major, labels, x.shape, strict=True)
        ]
        return NamedSharding(mesh, P(*spec))

    return [
        None if x is None else on_device(x, sharding(i, x))
        for i, x in enumerate(operands)
    ]


def check_shard_map(p: KernelPrimitive, case: Case) -> None:
    """Inside shard_map with checked axes: cut leading dims, values and gradients."""
    operands = operands_of(p, case)
    present = [i for i, x in enumerate(operands) if x is not None]
    leading = [
        i for i in present if p.operands[i].has_leading and label_is_cut(p, operands, i)
    ]
    if not leading:
        return
    n = operands[leading[0]].shape[0]
    mesh = mesh_of(parts_of(n), AxisType.Auto)
    specs = tuple(P("m") if i in leading else P() for i in present)
    f, reference = bound(p, case), bound(p, case, reference=True)

    def of_present(f):
        def g(*arrays):
            full: list = [None] * len(operands)
            for i, x in zip(present, arrays, strict=True):
                full[i] = x
            return f(*full)

        return g

    arrays = [operands[i] for i in present]
    if not all(r.has_leading for r in p.results):
        return
    mapped = jax.shard_map(of_present(f), mesh=mesh, in_specs=specs, out_specs=P("m"))
    whole = of_present(reference)
    same(jax.jit(mapped)(*arrays), evaluated(whole, *arrays), what="shard_map")
    if differentiable(p, operands):
        grads = jax.jit(gradients(mapped, arrays))(*arrays)
        expected = evaluated(gradients(whole, arrays), *arrays)
        same(grads, expected, ulps=256, what="grad of shard_map")


def label_is_cut(p: KernelPrimitive, operands: Sequence, i: int) -> bool:
    x = operands[i]
    return x.ndim > len(p.operands[i].labels) and parts_of(x.shape[0]) > 1
