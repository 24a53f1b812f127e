"""What an equation of an op records beside the op's own options, and what it does.

Operands that are absent are left out of its arrays; vmaps that are recorded are applied
when it is lowered.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

NO_MESH = AbstractMesh((), ())
Levels = tuple[tuple[int | None, ...], ...]


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a table of measurements says of one call.

    Attributes:
      date: of the measurement.
      microseconds: of each implementation that can be chosen, by name.
      left: the others, and why they cannot.
      choice: the one to run.
    """

    date: str
    microseconds: Mapping[str, float]
    left: Mapping[str, str]
    choice: str


@dataclasses.dataclass(frozen=True)
class Table:
    """Measured choices that "auto" follows; see `jaxkern.tuned`.

    Attributes:
      digest: of the file's text. Two tables are equal if their texts are: compiled
        calls are kept by it.
      platform: where the calls were measured.
      path: of the file.
      calls: by `call_key`.
    """

    digest: str
    platform: str
    path: str = dataclasses.field(compare=False)
    calls: Mapping[str, Measured] = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Backend:
    """Which implementation the user asked for; see `jaxkern.backend`.

    `table` is what "auto" follows before its own rules, see `jaxkern.tuned`.
    """

    name: str = "auto"
    strict: bool = False
    table: Table | None = None

    def __repr__(self) -> str:
        words = " strict" * self.strict + " tuned" * (self.table is not None)
        return self.name + words


backend_context = jax.make_user_context(Backend())


def matmul_precision() -> str | None:
    return jax.config.jax_default_matmul_precision


@dataclasses.dataclass(frozen=True)
class Call:
    """What an equation records beside the op's own options.

    Attributes:
      backend: the user's choice when the op was called. Carried, not read at lowering:
        a backward pass is traced after the `with` block has ended.
      absent: positions of the optional operands that were not given.
      vmaps: recorded vmaps, innermost first: for each array 0 or None. The axes of an
        array stand in front of its dims, outermost first.
      wanted: for each float operand that is present: does it take part in this tangent
        or want its gradient? Empty for the op itself.
      cuts: for each gradient how its operand is cut over an explicit mesh, recorded
        vmaps left out; empty on other meshes and but for gradients.
      precision: `jax_default_matmul_precision` at the call, carried as the backend is.
    """

    backend: Backend = Backend()
    absent: tuple[int, ...] = ()
    vmaps: Levels = ()
    wanted: tuple[bool, ...] = ()
    cuts: tuple[P, ...] = ()
    precision: str | None = dataclasses.field(default_factory=matmul_precision)

    def __repr__(self) -> str:
        fields = "absent", "vmaps", "wanted", "cuts", "precision"
        extra = {name: getattr(self, name) for name in fields}
        return " ".join(
            [repr(self.backend), *(f"{k}={v}" for k, v in extra.items() if v)]
        )


def same_manual_axes(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Inside shard_map: lets every operand vary over the axes that any varies over."""

    def varying(x):
        return jax.typeof(x).manual_axis_type.varying

    every = frozenset().union(*map(varying, arrays))
    return [
        jax.lax.pcast(x, tuple(sorted(every - varying(x))), to="varying")
        if every - varying(x)
        else x
        for x in arrays
    ]


def cut_as(x: jax.Array, aval: Any) -> jax.Array:
    """On an explicit mesh: `x` cut as `aval` is.

    A gradient has its operand's sharding, however the other operands are cut.
    """
    wanted = aval.sharding
    if wanted.mesh.empty or jax.typeof(x).sharding == wanted:
        return x
    return jax.sharding.reshard(x, wanted)


def with_absent(arrays: Sequence, absent: tuple[int, ...]) -> list:
    """The arrays with None put back where an optional operand was not given."""
    full = list(arrays)
    for i in absent:
        full.insert(i, None)
    return full


def without(items: Sequence, absent: tuple[int, ...]) -> list:
    return [x for i, x in enumerate(items) if i not in absent]


def with_fixed(f: Callable, arrays: Sequence, free: Sequence[int]) -> Callable:
    """`f` as a function of the arrays at the positions `free`, the others held."""

    def of_free(*values):
        full = list(arrays)
        for i, v in zip(free, values, strict=True):
            full[i] = v
        return f(*full)

    return of_free


CutsOf = Callable[[Sequence, Sequence], Sequence[P]]
"""(operands, results) -> how the results are cut, recorded vmaps left out."""


def apply_call(f: Callable, call: Call, cuts_of: CutsOf | None = None) -> Callable:
    """`f` under the recorded vmaps and precision.

    On an explicit mesh JAX refuses what leaves open how a result is cut, and operands
    that are cut differently. There `cuts_of` says it, with automatic axes inside.

    Ops within it follow the call's backend as well; strict it is for the op alone.
    What the user forbids in his own code, by `jax_numpy_rank_promotion` and
    `jax_numpy_dtype_promotion`, is not forbidden here: references rely on it.
    """
    for axes in call.vmaps:
        f = jax.vmap(f, in_axes=axes)

    def promoting(*arrays):
        with (
            jax.numpy_rank_promotion("allow"),
            jax.numpy_dtype_promotion("standard"),
            jax.default_matmul_precision(call.precision),
            backend_context(dataclasses.replace(call.backend, strict=False)),
        ):
            levels = cuts_of_mapped(arrays, call.vmaps)
            cuts: Any = call.cuts
            if cuts_of and not cuts and is_refused_by_type(f, arrays, levels):
                cuts = functools.partial(cuts_of, arrays)
            return with_automatic_axes(f, arrays, levels, cuts)

    return promoting


def cuts_of_mapped(arrays: Sequence[jax.Array], vmaps: Levels) -> list:
    """Which explicit mesh axes cut each recorded axis, outermost first."""
    front = [iter(jax.typeof(x).sharding.spec) for x in arrays]
    cuts = []
    for axes in reversed(vmaps):
        every = [next(c) for c, a in zip(front, axes, strict=True) if a is not None]
        cuts.append(next(filter(None, every), None))
    return cuts


def are_cut_by_type(arrays: Sequence[jax.Array]) -> bool:
    """Whether an explicit axis of a mesh cuts any of the arrays."""
    explicit = set(mesh_of(arrays).explicit_axes)
    cuts = (cut for x in arrays for cut in jax.typeof(x).sharding.spec)
    return not explicit.isdisjoint(name for cut in cuts for name in axis_names(cut))


def is_refused_by_type(f: Callable, arrays: Sequence[jax.Array], levels: list) -> bool:
    """Whether JAX refuses `f` of operands that are cut over an explicit mesh so."""
    if not are_cut_by_type(arrays):
        return False
    types = list(map(jax.typeof, arrays))
    try:
        jax.make_jaxpr(lambda *x: with_automatic_axes(f, x, levels, ()))(*types)
    except Exception:  # JAX has several kinds for it, ValueError and TypeError too
        return True
    return False


def with_automatic_axes(
    f: Callable,
    arrays: Sequence[jax.Array],
    levels: list,
    cuts: Sequence[P] | Callable[[Sequence], Sequence[P]],
) -> list:
    """`f(*arrays)`, where each result begins with dims that are cut as `levels` says.

    Inside, the mesh axes of `levels` are automatic. Several of JAX's batching rules
    (stack, select, gather, convolutions) refuse a mapped axis cut by an explicit one.

    `cuts` says how the results are cut behind that, those of a gradient as their
    operands, by whatever the others are cut; or makes it of the results. Then all axes
    are automatic inside: a sum over a dim that is cut needs no word on where it goes.
    """
    mesh = mesh_of(arrays)
    names = {name for cut in levels for name in axis_names(cut)}
    names |= set(mesh.explicit_axes) if cuts else set()
    if not names:
        return f(*arrays)
    specs = [jax.typeof(x).sharding.spec for x in arrays]
    inside = mesh.update_axis_types(dict.fromkeys(names, AxisType.Auto))

    def kept(cut):
        return tuple(n for n in axis_names(cut) if n not in names) or None

    with jax.sharding.use_abstract_mesh(inside):
        out = f(
            *(
                jax.sharding.reshard(x, NamedSharding(inside, P(*map(kept, spec))))
                for x, spec in zip(arrays, specs, strict=True)
            )
        )
    inner = cuts(out) if callable(cuts) else cuts
    inner = inner or [jax.typeof(y).sharding.spec[len(levels) :] for y in out]
    return [
        jax.sharding.reshard(y, NamedSharding(mesh, P(*levels, *spec)))
        for y, spec in zip(out, inner, strict=True)
    ]


def mesh_of(arrays: Sequence) -> AbstractMesh:
    """The mesh on which any of the arrays lies."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    return next((m for m in meshes if not m.empty), NO_MESH)


def axis_names(cut: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (cut,) if isinstance(cut, str) else cut or ()
