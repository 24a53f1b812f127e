"""What every op must pass on a mesh of two axes of different sizes, (2, 4).

There a sum over all devices is not a sum over the axis that cuts, and operands may be
cut differently: `sharding_checks.py`, whose meshes have one axis, sees neither.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern.primitives.family import KernelPrimitive
from jaxkern.testing.checks import (
    SMALL,
    Case,
    bound,
    differentiable,
    float_operands,
    gradients,
    in_float64,
    jitted_with_gradients,
    label_of,
    num_elements,
    on_device,
    operands_of,
    same,
    with_gradients,
)
from jaxkern.testing.interpreter import evaluated
from jaxkern.testing.sharding_checks import mesh_of, run_each, shardings_of
from jaxkern.testing.transform_checks import (
    axes_of,
    batched_operands,
    examples_of,
    of_each,
    summed_where_shared,
)

SIZES = {"a": 2, "b": 4}


class Layout(NamedTuple):
    """How the operands of a call are cut.

    Attributes:
      title: such as `batch@a,channel@b in weight`.
      specs: for each operand and dim the mesh axis; None for an absent operand.
      alone: whether one operand is cut and the others that could be are whole.
    """

    title: str
    specs: list[tuple[str | None, ...] | None]
    alone: bool


def names_of(p: KernelPrimitive, operands: Sequence) -> list[list[str]]:
    """The name by which each dim of each operand may be cut, "" for none."""

    def name(i, d, n):
        major = label_of(p, operands, i, d).removeprefix("#").split("*")[0]
        return major if n > 1 and major.isidentifier() else ""

    return [
        [] if x is None else [name(i, d, n) for d, n in enumerate(x.shape)]
        for i, x in enumerate(operands)
    ]


def layouts(p: KernelPrimitive, operands: Sequence) -> Iterator[Layout]:
    """One dim over one axis and every pair of dims over both, where they divide evenly.

    Each in all operands that have the dims, and in each of them alone.
    """
    all_names = names_of(p, operands)
    sizes: dict[str, set[int]] = {}
    for x, names in zip(operands, all_names, strict=True):
        for name, n in zip(names, () if x is None else x.shape, strict=True):
            sizes.setdefault(name, set()).add(n)
    sizes.pop("", None)
    for pair in itertools.product([None, *sorted(sizes)], repeat=2):
        axis_of = {name: axis for name, axis in zip(pair, SIZES, strict=True) if name}
        uneven = any(n % SIZES[a] for name, a in axis_of.items() for n in sizes[name])
        if uneven or not axis_of or pair[0] == pair[1]:
            continue
        title = ",".join(f"{name}@{axis}" for name, axis in axis_of.items())
        specs = [
            None if x is None else cut_once(names, axis_of)
            for x, names in zip(operands, all_names, strict=True)
        ]
        yield Layout(title, specs, alone=False)
        holders = [i for i, spec in enumerate(specs) if spec and any(spec)]
        for i in holders if len(holders) > 1 else ():
            alone = [
                spec if k == i or spec is None else (None,) * len(spec)
                for k, spec in enumerate(specs)
            ]
            yield Layout(f"{title} in {p.operands[i].name}", alone, alone=True)


def cut_once(names: list[str], axis_of: dict[str, str]) -> tuple[str | None, ...]:
    """The axis of each dim; of a square `c c` the first is cut."""
    return tuple(
        axis_of.get(name) if names.index(name) == d else None
        for d, name in enumerate(names)
    )


def few_layouts(p: KernelPrimitive, operands: Sequence) -> list[Layout]:
    """For `make test`: a pair of dims, and an operand that is cut alone.

    One dim where there is no pair; each dim by itself is what `check_every_dim` cuts.
    """
    every = list(layouts(p, operands))
    random.Random(p.name).shuffle(every)
    singles = [x for x in every if "," not in x.title and not x.alone]
    pairs = [x for x in every if "," in x.title and not x.alone]
    return (pairs or singles)[:1] + [x for x in every if x.alone][:1]


def mesh_case(p: KernelPrimitive, cases: Sequence[Case]) -> Case:
    """The small case with the most dims that can be cut, of these the smallest."""

    def rank(case):
        names = {
            name
            for layout in layouts(p, operands_of(p, case))
            for name in layout.title.split(" ")[0].split(",")
        }
        return len(names), -num_elements(p, case)

    return max((c for c in cases if 0 < num_elements(p, c) <= SMALL), key=rank)


def check_two_axes(p: KernelPrimitive, case: Case, full: bool = False) -> None:
    """Values and gradients on automatic and explicit meshes, the gradients' cuts."""
    operands = operands_of(p, case)
    every = with_gradients(p, bound(p, case))
    expected = evaluated(every, *operands)
    chosen = list((layouts if full else few_layouts)(p, operands))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), tuple(SIZES), axis_types=(kind,) * 2)
        # one operand alone is what `check_sharding` cuts on an automatic mesh
        alone = full or kind is AxisType.Explicit
        with jax.set_mesh(mesh):
            placed = {
                layout.title: on_mesh(operands, layout, mesh)
                for layout in chosen
                if alone or not layout.alone
            }
            if kind is AxisType.Explicit and not full:
                placed = {  # others run by the way of automatic axes, compiled anew
                    title: cut
                    for title, cut in placed.items()
                    if not refused_by_jax(p, case, cut)
                }
            found = run_each(every, list(placed.values()))
        for title, (y, grads) in zip(placed, found, strict=True):
            what = f"{p.name} {kind} {title}"
            same(y, expected[0], ulps=64, what=what)
            same(grads, expected[1], ulps=512, what=f"gradient of {what}")


def on_mesh(operands: Sequence, layout: Layout, mesh: jax.sharding.Mesh) -> list:
    return [
        None if x is None else on_device(x, NamedSharding(mesh, P(*(spec or ()))))
        for x, spec in zip(operands, layout.specs, strict=True)
    ]


def refused_by_jax(p: KernelPrimitive, case: Case, operands: Sequence) -> bool:
    """Whether JAX asks for an `out_sharding`, in its reference's value.

    Where no gradient is declared, in JAX's gradient of the reference, too.
    """
    reference = bound(p, case, reference=True)
    try:
        jax.eval_shape(reference, *operands)
        if p.bwd is None and differentiable(p, operands):
            jax.eval_shape(gradients(reference, operands), *operands)
    except Exception:  # JAX has several kinds for it, ValueError and TypeError too
        return True
    return False


def check_every_cut(p: KernelPrimitive, case: Case, full: bool = False) -> None:
    """On an explicit mesh a dim of an operand may be cut alone, by the types.

    Of results and gradients; a gradient is cut as its operand. One dim is drawn; in
    full it is every dim.
    """
    operands = operands_of(p, case)
    f = bound(p, case)
    whole = jax.eval_shape(f, *operands)
    floats = float_operands(operands) if differentiable(p, operands) else []
    every = shardings_of(p, operands)
    drawn = random.Random(p.name).sample(every, min(len(every), 1))
    for i, dim, parts in every if full else drawn:
        mesh = mesh_of(parts, AxisType.Explicit)
        label = label_of(p, operands, i, dim)
        what = f"{p.name}: {label} cut in {p.operands[i].name}"
        with jax.set_mesh(mesh):
            cut: list[Any] = [
                None if x is None else type_of(x, dim if k == i else None, mesh)
                for k, x in enumerate(operands)
            ]
            y = jax.eval_shape(f, *cut)
            same_types(y, whole, what)
            if floats:
                grads = jax.eval_shape(gradients(f, operands), *cut)
                of = [cut[k] for k in floats]
                same_types(grads, of, f"gradient of {what}")
                for d, x in zip(jax.tree.leaves(grads), of, strict=True):
                    assert d.sharding.spec == x.sharding.spec, f"gradient of {what}"


def type_of(x: jax.Array, dim: int | None, mesh: jax.sharding.Mesh):
    spec = P(*("m" if d == dim else None for d in range(x.ndim)))
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def same_types(found, expected, what: str) -> None:
    pairs = zip(*map(jax.tree.leaves, (found, expected)), strict=True)
    assert all((y.shape, y.dtype) == (e.shape, e.dtype) for y, e in pairs), what


def check_manual_types(p: KernelPrimitive, case: Case) -> None:
    """Inside shard_map with checked axes values and gradients are what they say.

    A gradient of what is the same everywhere is the same everywhere: a sum that is
    missing is an error of types. Nothing is computed.
    """
    operands = operands_of(p, case)
    with jax.enable_x64(True):
        for at, sharded, mapped in on_two_devices(p, case, operands):
            y, grads = jax.eval_shape(sharded, *mapped)
            what = f"{p.name} in shard_map, {at} varying"
            own = jax.eval_shape(bound(p, case), *map(in_float64, operands))
            pairs = zip(*map(jax.tree.leaves, (y, own)), strict=True)
            assert all(a.shape == (2, *b.shape) for a, b in pairs), what
            of = [mapped[i] for i in float_operands(mapped)] if len(grads) else []
            same_types(grads, of, f"gradient of {what}")


def check_manual_axes(p: KernelPrimitive, case: Case) -> None:
    """Inside shard_map with checked axes each device has operands of its own.

    All of them, or one that varies over the mesh while the others are the same
    everywhere: values and gradients, whatever the dims are.
    """
    operands = operands_of(p, case)
    with jax.enable_x64(True):
        each, sharded, every = zip(*on_two_devices(p, case, operands), strict=True)
        found = jax.jit(
            lambda every: [g(*x) for g, x in zip(sharded, every, strict=True)]
        )(every)
        every_axes = [axes_of(operands, at) for at in each]
        reference = jitted_with_gradients(p, case, reference=True)
        examples = list(map(examples_of, every, every_axes))
        of_examples = of_each(reference, examples)
        for at, mapped, (values, grads), axes, expected in zip(
            each, every, found, every_axes, of_examples, strict=True
        ):
            summed = summed_where_shared(expected[1], mapped, axes)
            what = f"{p.name} in shard_map, {at} varying"
            same(values, expected[0], ulps=2**20, what=what)
            same(grads, summed, ulps=2**20, what=f"gradient of {what}")


def on_two_devices(p: KernelPrimitive, case: Case, operands: Sequence) -> Iterator:
    """All operands vary over two devices, the first alone, the last alone.

    Yields:
      at: positions of what varies.
      sharded: the op with its gradients inside shard_map.
      mapped: its operands, in float64; what varies has a value for each device.
    """
    present = tuple(i for i, x in enumerate(operands) if x is not None)
    mesh = jax.make_mesh(
        (2,), ("m",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    wide = [in_float64(x) for x in operands]
    for at in sorted({present, present[:1], present[-1:]}):
        on_each = on_each_device(bound(p, case), mesh, operands, at)
        sharded = with_gradients(p, on_each, examples=1)
        yield at, sharded, batched_operands(wide, 2, at)


def on_each_device(f: Callable, mesh, operands: Sequence, at: Sequence[int]):
    """`f` inside shard_map; the operands at positions `at` have a value per device."""
    num_operands = len(operands)
    present = [i for i, x in enumerate(operands) if x is not None]

    def local(*arrays):
        own: list = [None] * num_operands
        for i, x in zip(present, arrays, strict=True):
            own[i] = x[0] if i in at else x
        return jax.tree.map(lambda y: y[None], f(*own))

    def sharded(*operands):
        specs = tuple(P("m") if i in at else P() for i in present)
        whole = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("m"))
        return whole(*(operands[i] for i in present))

    return sharded
