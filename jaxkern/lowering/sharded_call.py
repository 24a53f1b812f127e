"""Lets an opaque kernel run on the shards of its operands.

XLA cannot look into a kernel: without help it gathers every operand and runs the whole
call on every device. The dims of the op say what is safe: a dim may be cut wherever it
stands, at the same places in all operands, unless the op declares it `replicated`; a
result that lacks a cut dim is a sum over it. On meshes with automatic axes this becomes
a Shardy rule below `custom_partitioning`; on explicit meshes the types already say how
each operand is cut, and `shard_map` runs the kernel.
"""

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import eval_jaxpr
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxkern.lowering.lowered_once import once_a_shape
from jaxkern.primitives.call import NO_MESH, Call, cut_as
from jaxkern.primitives.declared_dims import Annotated
from jaxkern.primitives.family import KernelPrimitive
from jaxkern.primitives.leafwise_primitive import LeafwisePrimitive

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Factors:
    """The dims of one call as factors, the unit in which Shardy cuts.

    A factor is `(k, g)` for a product dim `k*g` and `(d,)` for a plain one; recorded
    vmaps and leading dims have factors of their own.

    Attributes:
      ins, outs: for each array the factors of each dim.
      sizes: the size of each single name.
      whole: names that must not be cut.
    """

    ins: list[list[Axes]]
    outs: list[list[Axes]]
    sizes: dict[str, int]
    whole: frozenset[str]

    @classmethod
    def of(
        cls, p: KernelPrimitive, call: Call, avals_in: Sequence, avals_out: Sequence
    ):
        """Those of a call, its vmaps first, as its arrays have them."""
        operands, results = p.array_annotations(call)
        unique = (f"whole{i}" for i in itertools.count())
        levels = range(len(call.vmaps) - 1, -1, -1)  # outermost first
        ins = [
            factors_of(
                a, x, [f"v{k}" for k in levels if call.vmaps[k][i] is not None], unique
            )
            for i, (a, x) in enumerate(zip(operands, avals_in, strict=True))
        ]
        outs = [
            factors_of(a, x, [f"v{k}" for k in levels], unique)
            for a, x in zip(results, avals_out, strict=True)
        ]
        dims = [
            (factor, n)
            for factors, x in zip(ins + outs, [*avals_in, *avals_out], strict=True)
            for factor, n in zip(factors, x.shape, strict=True)
        ]
        sizes = {f[0]: n for f, n in dims if len(f) == 1}
        for factor, n in dims:  # g of `k*g` stands alone nowhere
            unknown = [name for name in factor if name not in sizes]
            known = math.prod(sizes[name] for name in factor if name in sizes)
            if len(unknown) == 1:
                sizes[unknown[0]] = n // known if known else 1
        whole = frozenset(
            name
            for name in sizes
            if name in p.replicated
            or name.startswith("whole")
            or ("..." in p.replicated and name[0] == "l" and name[1:].isdigit())
        )

        def without_ones(factor: Axes) -> Axes:
            return tuple(n for n in factor if sizes[n] != 1) or factor[:1]

        ins, outs = (
            [[without_ones(f) for f in dims] for dims in side] for side in (ins, outs)
        )
        return cls(ins, outs, sizes, whole)

    def with_held(self, arrays: Sequence) -> "Factors":
        """These factors with further operands, whole on each device."""
        ins = [
            [(f"held{i}_{d}",) for d in range(len(x.shape))]
            for i, x in enumerate(arrays)
        ]
        sizes = {
            name: n
            for x, dims in zip(arrays, ins, strict=True)
            for (name,), n in zip(dims, x.shape, strict=True)
        }
        return dataclasses.replace(
            self,
            ins=[*self.ins, *ins],
            sizes=self.sizes | sizes,
            whole=self.whole | set(sizes),
        )

    def joined(self, num_devices: int) -> Callable[[Axes], Axes]:
        """How Shardy is to see a factor: `(k, g)` as such, or as one name.

        Shardy cuts a product by parts of a mesh axis where the axis is longer than k,
        which no PartitionSpec can say. Then the product is a factor of its own, which
        propagates to other products but not to k alone.
        """

        def join(factor: Axes) -> Axes:
            safe = len(factor) == 1 or self.sizes[factor[0]] % num_devices == 0
            return factor if safe else ("_".join(factor),)

        return join

    def rule(self, num_devices: int = 1) -> str:
        """The Shardy rule, such as `b (k g), b k -> b (k g)`."""
        join = self.joined(num_devices)

        def text(factor: Axes) -> str:
            factor = join(factor)
            return factor[0] if len(factor) == 1 else f"({' '.join(factor)})"

        sides = (self.ins, self.outs)
        return " -> ".join(
            ", ".join(" ".join(map(text, dims)) for dims in side) for side in sides
        )

    def cuts(self, specs: Sequence[Sequence], mesh_shape) -> dict[str, Axes]:
        """Which factor is cut over which mesh axes; the first operand's wish counts.

        An axis cuts one factor only, and only evenly: a kernel cannot see padding.
        """
        cut: dict[str, Axes] = {}
        taken: set[str] = set()
        for dims, spec in zip(self.ins, specs, strict=True):
            for (major, *_), entry in zip(dims, spec, strict=False):
                axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
                parts = math.prod(mesh_shape[a] for a in axes)
                if major in self.whole or major in cut or self.sizes[major] % parts:
                    continue
                if axes and not taken & set(axes):
                    cut[major] = axes
                    taken |= set(axes)
        return cut

    def specs(self, cut: dict[str, Axes]) -> tuple[list[P], list[P]]:
        """The partition specs of operands and results under these cuts."""

        def spec(dims):
            return P(*(cut.get(major) for major, *_ in dims))

        return [spec(d) for d in self.ins], [spec(d) for d in self.outs]

    def all_reduced(self, out: Sequence, cut: dict[str, Axes]) -> list:
        """Each result summed over the mesh axes that cut a factor it lacks."""

        def reduced(y, dims):
            present = {major for major, *_ in dims}
            axes = tuple(a for f, axes in cut.items() if f not in present for a in axes)
            return jax.lax.psum(y, axes) if axes else y

        return [reduced(y, dims) for y, dims in zip(out, self.outs, strict=True)]


@dataclasses.dataclass(frozen=True)
class LeafFactors(Factors):
    """Factors of a leafwise op: each leaf is cut its own way, nothing is summed."""

    num_leaves: int

    @classmethod
    def of(
        cls, p: KernelPrimitive, call: Call, avals_in: Sequence, avals_out: Sequence
    ):
        f = Factors.of(p, call, avals_in, avals_out)
        vmaps = {name for name in f.sizes if name.startswith("v")}  # all leaves share
        num_leaves = len(call.ranks)  # pyright: ignore[reportAttributeAccessIssue]
        return cls(f.ins, f.outs, f.sizes, f.whole | vmaps, num_leaves)

    def cuts(self, specs: Sequence[Sequence], mesh_shape) -> dict[str, Axes]:
        cut: dict[str, Axes] = {}
        for k in range(self.num_leaves):
            every = slice(k, None, self.num_leaves)
            leaf = Factors(self.ins[every], [], self.sizes, self.whole)
            cut |= leaf.cuts(specs[every], mesh_shape)
        return cut

    def all_reduced(self, out: Sequence, cut: dict[str, Axes]) -> list:
        return list(out)


def factors_of_call(
    p: KernelPrimitive, call: Call, avals_in: Sequence, avals_out: Sequence
) -> Factors:
    kind = LeafFactors if isinstance(p, LeafwisePrimitive) else Factors
    return kind.of(p, call, avals_in, avals_out)


def factors_of(
    annotation: Annotated, aval, levels: list[str], unique: Iterator[str]
) -> list[Axes]:
    labels = annotation.labels
    num_leading = aval.ndim - len(levels) - len(labels)
    names: list[Axes] = [(v,) for v in levels]
    names += [(f"l{k}",) for k in range(num_leading)]
    for label, n in zip(labels, aval.shape[aval.ndim - len(labels) :], strict=True):
        factor = tuple(label.removeprefix("#").split("*"))
        # Shardy takes a factor once per array: of a square `c c` the second is whole
        if label.isdigit() or (label.startswith("#") and n == 1) or factor in names:
            factor = (next(unique),)
        names.append(factor)
    return names


def partitioned(
    p: KernelPrimitive,
    local: Callable,
    call: Call,
    avals_in: Sequence,
    avals_out: Sequence,
    num_devices: int,
) -> Callable:
    """`local` on each device's shards, on a mesh with automatic axes.

    custom_partitioning takes no function that holds arrays, such as a table: they are
    operands of the whole call. On the shards `local` brings its own.
    """
    traced = jax.make_jaxpr(local)(*avals_in)
    num_operands = len(avals_in)
    factors = factors_of_call(p, call, avals_in, avals_out).with_held(traced.consts)

    on_shards = once_a_shape(p.name, local)

    def partition(mesh, arg_infos, result_infos):
        del result_infos  # they follow from the operands
        # need_replication_factors only guides propagation: the specs are cut here.
        wishes = [axes_of_dims(x.sharding, x.shape, mesh) for x in arg_infos]
        cut = factors.cuts(wishes, mesh.shape)
        in_specs, out_specs = factors.specs(cut)

        def local_and_reduced(*arrays):
            with jax.sharding.use_abstract_mesh(NO_MESH):  # whatever mesh is set
                return factors.all_reduced(on_shards(*arrays[:num_operands]), cut)

        def shardings(specs):
            return [NamedSharding(mesh, s) for s in specs]

        return mesh, local_and_reduced, shardings(out_specs), tuple(shardings(in_specs))

    def whole(*arrays):
        operands, held = arrays[:num_operands], arrays[num_operands:]
        return eval_jaxpr(traced.jaxpr, held, *operands)

    whole.__signature__ = inspect.Signature(
        [
            inspect.Parameter(f"operand{i}", inspect.Parameter.POSITIONAL_ONLY)
            for i in range(num_operands + len(traced.consts))
        ]
    )
    f = custom_partitioning(whole)
    join = factors.joined(num_devices)
    shown = [join(f) for dims in factors.ins + factors.outs for f in dims]
    seen = dict.fromkeys(n for f in shown for n in f)
    alone = {f[0] for f in shown if len(f) == 1}
    in_products: dict[str, Any] = {n: factors.sizes[n] for n in seen if n not in alone}
    f.def_partition(
        partition,
        sharding_rule=factors.rule(num_devices),
        decode_shardings=False,  # JAX refuses cuts by a part of an axis
        # Shardy wants the order of first appearance.
        need_replication_factors=tuple(n for n in seen if n in factors.whole),
        **in_products,
    )
    return lambda *arrays: f(*arrays, *traced.consts)


def axes_of_dims(sharding: Sharding, shape: Sequence[int], mesh: Mesh) -> list[Axes]:
    """Which mesh axes cut each dim, major first; none where no PartitionSpec says it.

    Around a reshape Shardy may cut by a part of an axis, or into uneven pieces. Such a
    dim is gathered for the kernel.
    """
    if mesh.empty:  # of arrays that lie on no mesh, while one is set
        return [()] * len(shape)
    try:
        index_of = sharding.devices_indices_map(tuple(shape))
    except ValueError:  # uneven
        return [()] * len(shape)
    size = dict(mesh.shape)
    place = dict(zip(size, np.indices(mesh.devices.shape), strict=True))

    def axes_of(start: np.ndarray, n: int) -> Axes:
        """For the start of each device's piece of one dim."""
        step = {a: start[tuple(int(a == b) for b in size)] for a in size if size[a] > 1}
        axes = tuple(sorted(filter(step.get, step), key=lambda a: -step[a]))
        sizes = [size[a] for a in axes]
        if not axes or n % math.prod(sizes):
            return ()
        number = np.ravel_multi_index([place[a] for a in axes], sizes)
        return axes if (start == n // math.prod(sizes) * number).all() else ()

    pieces = [index_of[device] for device in mesh.devices.flat]
    starts = [[piece[k].start or 0 for piece in pieces] for k in range(len(shape))]
    return [
        axes_of(np.reshape(start, mesh.devices.shape), n)
        for start, n in zip(starts, shape, strict=True)
    ]


def cuts_by_type(factors: Factors, avals: Sequence) -> dict[str, Axes]:
    return factors.cuts([a.sharding.spec for a in avals], avals[0].sharding.mesh.shape)


def refusal_by_type(
    p: KernelPrimitive, call: Call, avals: Sequence, static: dict
) -> str | None:
    """On an explicit mesh: why the kernel cannot run on operands cut like these."""
    mesh = avals[0].sharding.mesh if avals else None
    if mesh is None or mesh.empty or not mesh.explicit_axes:
        return None
    # a result may be all that says how a product splits
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    with jax.sharding.use_abstract_mesh(NO_MESH):
        results = jax.eval_shape(
            functools.partial(p.evaluate, call=call, **static), *shapes
        )
    factors = factors_of_call(p, call, avals, results)
    in_specs, _ = factors.specs(cuts_by_type(factors, avals))
    operands, _ = p.array_annotations(call)
    for operand, aval, spec in zip(operands, avals, in_specs, strict=True):
        if tuple(aval.sharding.spec) != tuple(spec):
            return (
                f"`{operand.name}` is cut as {aval.sharding.spec}, the kernel needs "
                f"{spec}; reshard it"
            )
    return None


def sharded_by_type(
    p: KernelPrimitive,
    local: Callable,
    call: Call,
    avals_in: Sequence,
    avals_out: Sequence,
) -> Callable:
    """`local` on each device's shards, cut as the operands' types say."""
    factors = factors_of_call(p, call, avals_in, avals_out)
    cut = cuts_by_type(factors, avals_in)
    sharded = jax.shard_map(
        lambda *arrays: factors.all_reduced(local(*arrays), cut),
        mesh=avals_in[0].sharding.mesh,
        in_specs=tuple(a.sharding.spec for a in avals_in),
        out_specs=factors.specs(cut)[1],
        check_vma=False,  # the kernel's result types do not carry manual axes
    )

    def as_typed(*arrays):
        # a gradient is cut as its operand, not as the kernel leaves it
        return [
            cut_as(y, aval) for y, aval in zip(sharded(*arrays), avals_out, strict=True)
        ]

    return as_typed
