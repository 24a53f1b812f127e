"""Writes docs/collectives.md: what a cut of each dim of each operator moves.

python -m docs.collectives_table             # every operator: some minutes
python -m docs.collectives_table rms_norm    # these, and those that have no line yet

Compiles every declared operator on a mesh of four devices of the CPU, the operator as a
kernel that XLA cannot look into, and counts the collectives in the HLO. The operands
are those of the operator's own tests.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from jaxkern.primitives.family import KernelPrimitive
from jaxkern.primitives.kernel_primitive import REGISTRY
from jaxkern.testing.check_op import smallest_case
from jaxkern.testing.checks import (
    SMALL,
    Case,
    bound,
    differentiable,
    gradients,
    num_elements,
    opaque_kernels,
    operands_of,
)
from jaxkern.testing.mesh_checks import names_of
from jaxkern.testing.sharding_checks import collectives, doubled
from tests.cases import cases_of

PAGE = Path(__file__).parent / "collectives.md"
DEVICES = 4
SHORT = {
    "all-gather": "gather",
    "all-reduce": "reduce",
    "all-to-all": "all-to-all",
    "collective-permute": "permute",
}
HEAD = """# Collectives

What moves between four devices when one dim of an operator is cut over them, in all
operands that have it, under plain `jit`. The collectives are counted in compiled HLO,
where the operator is a kernel that XLA cannot look into. "gather" is an all-gather,
"reduce" an all-reduce, "permute" a collective-permute, "-" nothing. The last column has
those of the forward pass too. A dim that is in no line could not be cut in the case at
hand. `l0` is a leading dim; `k` of `k*g` cuts the product.

A dim that moves nothing forward may cost an all-reduce backward: the gradient of what
does not have the dim is a sum over it. Where a kernel needs a dim whole (the operator
declares it `replicated`), it is gathered. Inside `shard_map` nothing moves by itself:
what a device's part means is up to the caller, and `jaxkern.parallel` has the forms
that exchange something.

This file is written by `python -m docs.collectives_table`; with names of operators it
writes their lines alone.

| operator | dims cut | forward | with its gradient |
"""
RULE = "|---|---|---|---|\n"


class Moves(NamedTuple):
    """What one cut moves, in words."""

    forward: str
    gradient: str


def cuts(p: KernelPrimitive, case: Case) -> Iterator[tuple[str, list]]:
    """Each dim that four devices can cut, and the operands as they lie then.

    A dim that four does not divide is doubled first, where the operator lets it.
    """
    operands = operands_of(p, case)
    names = names_of(p, operands)
    mesh = jax.make_mesh(
        (DEVICES,), ("x",), (AxisType.Auto,), devices=jax.devices()[:DEVICES]
    )
    for label in dict.fromkeys(name for each in names for name in each if name):
        given = even(p, operands, label)
        if given is not None:
            yield label, placed(p, given, label, mesh)


def even(p: KernelPrimitive, operands: Sequence, label: str) -> list | None:
    """The operands with a dim that four divides, or None."""
    given = list(operands)
    for _ in range(3):
        sizes = {
            n
            for x, names in zip(given, names_of(p, given), strict=True)
            for n, name in zip(() if x is None else x.shape, names, strict=True)
            if name == label
        }
        if all(n % DEVICES == 0 for n in sizes):
            return given
        given = [
            x if x is None else doubled(p, given, i, label) for i, x in enumerate(given)
        ]
    return None


def placed(p: KernelPrimitive, operands: Sequence, label: str, mesh: Any) -> list:
    def cut(x: Any, names: list[str]) -> Any:
        if x is None:
            return None
        at = names.index(label) if label in names else -1  # of a square the first
        spec = P(*("x" if d == at else None for d in range(x.ndim)))
        return jax.device_put(np.asarray(x), NamedSharding(mesh, spec))

    return list(map(cut, operands, names_of(p, operands)))


def counted(f: Callable, operands: Sequence) -> str:
    """Such as `1 gather, 2 reduce`; `-` for none."""
    compiled = jax.jit(f).lower(*operands).compile()
    found = Counter(collectives(compiled))
    return ", ".join(f"{n} {SHORT[c]}" for c, n in sorted(found.items())) or "-"


def case_of(p: KernelPrimitive) -> Case:
    """The small case of its tests with the most dims, of these the smallest."""

    def rank(case: Case) -> tuple[bool, int, int]:
        operands = operands_of(p, case)
        names = {name for each in names_of(p, operands) for name in each if name}
        filled = all(x is None or x.size for x in operands)
        return filled, len(names), -num_elements(p, case)

    cases = cases_of(p)
    small = [c for c in cases if num_elements(p, c) <= SMALL]
    return max(small, key=rank) if small else smallest_case(p, cases)


def moves_of(p: KernelPrimitive) -> dict[str, Moves]:
    """By dim, for the case of the operator's tests with the most dims to cut."""
    case = case_of(p)
    f, found = bound(p, case), {}
    with opaque_kernels(p):
        for label, operands in cuts(p, case):
            try:
                jax.eval_shape(f, *operands)
            except (TypeError, ValueError):
                continue  # its size is given, by an option or by another dim
            gradient = "no gradient"
            if differentiable(p, operands):
                gradient = counted(gradients(f, operands), operands)
            found[label] = Moves(counted(f, operands), gradient)
    return found


def lines_of(p: KernelPrimitive) -> list[str]:
    """One for each kind of move; the dims that move nothing first."""
    by: dict[Moves, list[str]] = {}
    for label, moves in moves_of(p).items():
        by.setdefault(moves, []).append(label)
    kinds = sorted(by.items(), key=lambda item: (item[0].forward != "-", item[0]))
    return [
        f"| {p.name} | {', '.join(labels)} | {m.forward} | {m.gradient} |"
        for m, labels in kinds
    ]


def operators() -> list[KernelPrimitive]:
    assert jaxkern.__all__  # imported for its primitives
    own = [p for p in REGISTRY.values() if p.reference.__module__.startswith("jaxkern")]
    return sorted(own, key=lambda p: p.name)


def lines_on_page() -> dict[str, list[str]]:
    """By operator."""
    found: dict[str, list[str]] = {}
    for line in PAGE.read_text().split(RULE)[1].splitlines():
        found.setdefault(line.split(" | ")[0].removeprefix("| "), []).append(line)
    return found


def page(names: Sequence[str] = ()) -> str:
    """With new lines of these operators and of those without; of all where none is
    named."""
    if unknown := set(names) - {p.name for p in operators()}:
        raise SystemExit(f"collectives_table: no operator is called {sorted(unknown)}.")
    known = lines_on_page() if names else {}
    lines: list[str] = []
    for p in operators():
        stays = p.name in known and p.name not in names
        lines += known[p.name] if stays else lines_of(p)
    return HEAD + RULE + "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    PAGE.write_text(page(sys.argv[1:]))
