"""How the results of an op are cut on an explicit mesh, by the dims that it declares.

For calls of which JAX cannot tell: a dim that is cut in an operand is cut so in each
result that has it, unless the op needs it whole. An axis cuts one dim only, and the
first operand's wish counts.
"""

import math
from collections.abc import Sequence, Set

import jax
from jax.sharding import PartitionSpec as P

from jaxkern.primitives.call import Call, axis_names, mesh_of
from jaxkern.primitives.declared_dims import Annotated

Sides = tuple[Sequence[Annotated], Sequence[Annotated]]


def cuts_of_results(
    sides: Sides,
    replicated: Sequence[str],
    call: Call,
    arrays: Sequence,
    results: Sequence,
) -> list[P]:
    """The cut of each result, without the dims of recorded vmaps."""
    specs = [jax.typeof(x).sharding.spec for x in arrays]
    depths = [
        sum(level[i] is not None for level in call.vmaps) for i in range(len(specs))
    ]
    pairs = list(zip(specs, depths, strict=True))
    taken = {a for spec, n in pairs for entry in spec[:n] for a in axis_names(entry)}
    own = [spec[n:] for spec, n in pairs]
    cut = cut_names(sides[0], own, taken)
    whole = {*replicated}
    if "..." in whole:
        whole |= {name for name in cut if name.startswith("...")}
    cut = {name: axes for name, axes in cut.items() if name not in whole}
    sizes, levels = mesh_of(arrays).shape, len(call.vmaps)
    return [
        spec_of(names_of(a, y.ndim - levels), y.shape[levels:], cut, sizes)
        for a, y in zip(sides[1], results, strict=True)
    ]


def cut_names(
    operands: Sequence[Annotated], specs: Sequence[P], taken: Set[str] = frozenset()
) -> dict[str, tuple[str, ...]]:
    """Which axes cut which dims, but for axes that are `taken`."""
    cut: dict[str, tuple[str, ...]] = {}
    for operand, spec in zip(operands, specs, strict=True):
        names = names_of(operand, len(spec))
        for name, entry in zip(names, spec, strict=True):
            axes = axis_names(entry)
            if axes and name and name not in cut and taken.isdisjoint(axes):
                cut[name] = axes
                taken = {*taken, *axes}
    return cut


def spec_of(names: Sequence[str], shape: Sequence[int], cut, sizes) -> P:
    left, entries = dict(cut), []
    for name, n in zip(names, shape, strict=True):
        axes = left.pop(name, ())  # of a square `c c` the first is cut
        entries.append(axes if n % math.prod(sizes[a] for a in axes) == 0 else None)
    return P(*(axes or None for axes in entries))


def names_of(annotation: Annotated, ndim: int) -> list[str]:
    """The name by which each dim is cut: of a product the major, "" for none."""
    labels = annotation.labels
    majors = [label.removeprefix("#").split("*")[0] for label in labels]
    if "..." in labels:  # behind others, of a public function
        return [""] * ndim
    leading = [f"...{i}" for i in range(ndim - len(labels))]
    return leading + [name if name.isidentifier() else "" for name in majors]
