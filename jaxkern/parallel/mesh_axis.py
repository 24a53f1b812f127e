"""The mesh axis over whose devices an operator is cut, inside shard_map or around it.

Serves every function of this folder. Inside `shard_map` the operands are the device's
own parts; elsewhere `over_axis` cuts them, so that plain `jit` can call the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern.primitives.call import axis_names

AnyMesh = Mesh | AbstractMesh


def is_bound(axis_name: str) -> bool:
    """Whether this is traced inside `shard_map`, or a `vmap`, that has the axis."""
    try:
        lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def check_axis(op: str, axis_name: object) -> None:
    if not isinstance(axis_name, str):
        raise TypeError(
            f"{op}: `axis_name` must be the name of a mesh axis, got {axis_name!r}."
        )


def over_axis(
    op: str,
    f: Callable,
    operands: Sequence[Any],
    *,
    axis_name: str,
    mesh: AnyMesh | None,
    in_specs: Sequence[P],
    out_specs: Any,
) -> Any:
    """`f(*operands)` where the axis is bound, else its `shard_map` over that axis.

    Other axes of the mesh stay as they are: automatic, explicit or manual.
    """
    if is_bound(axis_name):
        return f(*operands)
    context = jax.sharding.get_abstract_mesh()
    if mesh is None or not context.empty:
        mesh = context
    if axis_name not in mesh.axis_names:
        known = ", ".join(map(repr, mesh.axis_names)) or "none"
        raise ValueError(
            f"{op}: no mesh axis {axis_name!r}, known are {known}. Call it inside "
            "jax.shard_map, under jax.set_mesh, or pass `mesh`."
        )
    check_divisible(op, operands, in_specs, axis_name, mesh.shape[axis_name])
    if is_explicit(mesh, axis_name):
        if context.empty and not any(map(is_placed, jax.tree.leaves(operands))):
            mesh = with_automatic_axes(mesh)
        else:
            operands = all_cut(mesh, operands, in_specs)
    mapped = jax.shard_map(
        f,
        mesh=mesh,
        axis_names={axis_name},
        in_specs=tuple(in_specs),
        out_specs=out_specs,
    )
    return mapped(*operands)


def all_cut(mesh: AnyMesh, operands: Sequence[Any], specs: Sequence[P]) -> list[Any]:
    return [
        jax.tree.map(lambda x, spec=spec: cut_whole(x, mesh, spec), operand)
        for operand, spec in zip(operands, specs, strict=True)
    ]


def is_explicit(mesh: AnyMesh, axis_name: str) -> bool:
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return kinds[axis_name] == AxisType.Explicit


def with_automatic_axes(mesh: AnyMesh) -> AnyMesh:
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    return mesh.update_axis_types(dict(zip(mesh.axis_names, kinds, strict=True)))


def is_placed(x: jax.Array) -> bool:
    return not jax.typeof(x).sharding.mesh.empty


def cut_whole(x: jax.Array, mesh: AnyMesh, spec: P) -> jax.Array:
    """`x` cut as `spec` says where its type leaves it whole, which moves nothing.

    One that is cut otherwise is left for `shard_map` to refuse.
    """
    given = jax.typeof(x).sharding.spec if is_placed(x) else (None,) * x.ndim
    cuts = dict(enumerate(spec))
    named = {name for cut in given for name in axis_names(cut)}
    if named & set(cuts.values()) or any(c and given[d] for d, c in cuts.items()):
        return x
    wanted = P(*(cuts.get(d) or cut for d, cut in enumerate(given)))
    return jax.sharding.reshard(x, NamedSharding(mesh, wanted))


def check_divisible(
    op: str,
    operands: Sequence[Any],
    specs: Sequence[P],
    axis_name: str,
    parts: int,
) -> None:
    for operand, spec in zip(operands, specs, strict=True):
        for dim, name in enumerate(spec):
            for x in jax.tree.leaves(operand) if name == axis_name else ():
                if x.shape[dim] % parts:
                    raise ValueError(
                        f"{op}: dim {dim} of an operand of shape {x.shape} is cut over "
                        f"the {parts} devices of {axis_name!r}, which do not divide it."
                    )


def from_before(tree: Any, axis_name: str, distance: int = 1) -> Any:
    """What the device `distance` before this one has; the last ones reach the first.

    One collective-permute for each array.
    """
    n = lax.axis_size(axis_name)
    if distance % n == 0:
        return tree
    pairs = [(i, (i + distance) % n) for i in range(n)]
    return jax.tree.map(lambda x: lax.ppermute(x, axis_name, pairs), tree)
