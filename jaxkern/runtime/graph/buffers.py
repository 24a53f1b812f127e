"""Where the values of a jaxpr live, and so which bytes each equation reads and writes.

Without donation and references every value has a buffer of its own, written once. What
makes more than RAW possible:

    views       reshape, squeeze and slice share the buffer of their operand
    donation    the equation that makes an output writes the donated argument's buffer;
                so does each update (`x.at[...].set`) on the way to it
    references  `ref[...]` reads, `ref[...] = x` and `+=` write the buffer of the ref

A range is exact where it follows from static indices of whole rows; else it covers all
bytes that may be touched.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from jaxkern.runtime.graph.conflicts import Region
from jaxkern.runtime.graph.op_kind import Jaxpr, JaxprEqn, is_ref, is_ref_access

FULL_VIEWS = ("reshape", "squeeze", "bitcast_convert_type")
UPDATES = (
    "dynamic_update_slice scatter scatter_add scatter_mul scatter_min scatter_max "
    "scatter_sub scatter-add scatter-mul scatter-min scatter-max scatter-sub "
    "update_kv_cache update_paged_kv_cache"
).split()


class Place(NamedTuple):
    """The region of a value; `contiguous` where its elements fill it in order."""

    region: Region
    contiguous: bool


class Access(NamedTuple):
    """The bytes that one equation reads and writes."""

    reads: tuple[Region, ...]
    writes: tuple[Region, ...]


class Buffers(NamedTuple):
    """`accesses` by equation; `copies` says which donated arguments need a copy."""

    accesses: tuple[Access, ...]
    copies: tuple[str, ...]


def value_ids(jaxpr: Jaxpr) -> dict[Any, int]:
    """A number for each value: arguments, constants, then results in their order."""
    found = [*jaxpr.invars, *jaxpr.constvars]
    found += [v for eqn in jaxpr.eqns for v in eqn.outvars]
    return {v: i for i, v in enumerate(found)}


def variables(atoms: Sequence[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, Literal)]


def buffers(jaxpr: Jaxpr, donated: Sequence[bool]) -> Buffers:
    """The accesses of every equation.

    Args:
      jaxpr: any.
      donated: for each of its arguments, may it be overwritten?
    """
    ids = value_ids(jaxpr)
    in_place, copies = written_in_place(jaxpr, donated)
    places: dict[Any, Place] = {}
    for k, v in enumerate(jaxpr.invars):
        name = f"arg{k}" if donated[k] and not is_ref(v.aval) else f"v{ids[v]}"
        places[v] = Place(whole(name, v.aval), True)
    for v in jaxpr.constvars:
        places[v] = Place(whole(f"v{ids[v]}", v.aval), True)
    used = {v for eqn in jaxpr.eqns for v in variables(eqn.invars)}
    used.update(variables(jaxpr.outvars))
    accesses = []
    for eqn in jaxpr.eqns:
        for v in eqn.outvars:
            name = in_place.get(v, f"v{ids[v]}")
            places[v] = Place(whole(name, v.aval), True)
        if is_view(eqn):
            places[eqn.outvars[0]] = view(eqn, places[eqn.invars[0]])
            accesses.append(Access((), ()))
        else:
            accesses.append(access(eqn, ids, places, in_place, used))
    return Buffers(tuple(accesses), copies)


def access(eqn: JaxprEqn, ids: dict, places: dict, in_place: dict, used: set) -> Access:
    operands = variables(eqn.invars)
    reads = [places[v].region for v in operands]
    writes = [places[v].region for v in eqn.outvars]
    if is_update(eqn) and in_place.get(eqn.outvars[0]) == reads[0].buffer:
        # In place: the bytes beside the update are neither read nor written.
        del reads[0]
        writes[0] = updated(eqn, writes[0])
    for v, donated in zip(
        eqn.invars, eqn.params.get("donated_invars", ()), strict=False
    ):
        if donated and not isinstance(v, Literal):
            writes.append(places[v].region)
    for v, reads_it, writes_it in ref_accesses(eqn, used):
        region = Region(f"ref{ids[v]}", 0, num_bytes(v.aval))
        if eqn.primitive.name in ("get", "swap", "addupdate"):
            region = indexed(eqn, region)
        reads += [region] * reads_it
        writes += [region] * writes_it
    return Access(tuple(dict.fromkeys(reads)), tuple(dict.fromkeys(writes)))


def whole(buffer: str, aval: Any) -> Region:
    return Region(buffer, 0, num_bytes(aval))


def num_bytes(aval: Any) -> int:
    """Size of a value; at least 1, since an empty value is still made and read."""
    aval = getattr(aval, "inner_aval", aval)
    shape = getattr(aval, "shape", ())
    if not all(isinstance(n, int) for n in shape):
        return 1  # symbolic: every range is the whole
    itemsize = aval.dtype.itemsize if hasattr(aval, "dtype") else 1
    return max(1, math.prod(shape) * itemsize)


# References.


def ref_accesses(eqn: JaxprEqn, used: set) -> list[tuple[Any, bool, bool]]:
    """(ref, is read, is written) for each reference that an equation touches."""
    name = eqn.primitive.name
    if is_ref_access(eqn) and name == "new_ref":
        return [(eqn.outvars[0], False, True)]
    if is_ref_access(eqn) and name == "freeze":  # ends it: nothing may come later
        return [(eqn.invars[0], True, True)]
    if is_ref_access(eqn) and name == "swap":
        return [(eqn.invars[0], eqn.outvars[0] in used, True)]
    kinds: dict[Any, set[str]] = {}
    for effect in eqn.effects:
        v = getattr(effect, "input", None)
        if v in eqn.invars:
            kinds.setdefault(v, set()).add(type(effect).__name__)
    return [
        (v, names != {"WriteEffect"}, names != {"ReadEffect"})
        for v, names in kinds.items()
    ]


def indexed(eqn: JaxprEqn, region: Region) -> Region:
    """The bytes that static indices of a reference touch; all bytes for others."""
    ref, leaves = eqn.invars[0], eqn.invars[1:]
    if eqn.primitive.name != "get":
        leaves = leaves[1:]
    transforms = jax.tree.unflatten(eqn.params["tree"], leaves)
    if len(transforms) != 1 or not hasattr(transforms[0], "indices"):
        return region
    starts, sizes = [], []
    for index in transforms[0].indices:
        start, size = getattr(index, "start", index), getattr(index, "size", 1)
        start = static_int(start)
        if start is None or not isinstance(size, int):
            return region
        starts.append(start)
        sizes.append((size - 1) * getattr(index, "stride", 1) + 1)
    return sub_region(region, ref.aval, starts, sizes)[0]


def static_int(index: Any) -> int | None:
    index = getattr(index, "val", index)
    try:
        return int(index)
    except TypeError:
        return None


# Views and updates.


def is_view(eqn: JaxprEqn) -> bool:
    """Does an equation only give other dims to, or cut, what its operand holds?"""
    name = eqn.primitive.name
    if len(eqn.invars) != 1 or len(eqn.outvars) != 1:
        return False
    if isinstance(eqn.invars[0], Literal):
        return False
    old, new = eqn.invars[0].aval, eqn.outvars[0].aval
    if name == "slice":
        return all(n == 1 for n in eqn.params["strides"] or ())
    same_size = math.prod(old.shape) == math.prod(new.shape)
    if name == "broadcast_in_dim":  # a new dim of size 1
        return same_size
    if name == "reshape":
        return not eqn.params["dimensions"]
    return name in FULL_VIEWS


def view(eqn: JaxprEqn, place: Place) -> Place:
    if eqn.primitive.name != "slice" or not place.contiguous:
        return place
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    sizes = [b - a for a, b in zip(starts, stops, strict=True)]
    return Place(*sub_region(place.region, eqn.invars[0].aval, starts, sizes))


def is_update(eqn: JaxprEqn) -> bool:
    """Is the first result the first operand with some of its elements replaced?"""
    return (
        eqn.primitive.name in UPDATES
        and not isinstance(eqn.invars[0], Literal)
        and eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
        and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
    )


def updated(eqn: JaxprEqn, region: Region) -> Region:
    """The bytes that an update in place writes."""
    if eqn.primitive.name != "dynamic_update_slice":
        return region
    starts = [static_int(v) if isinstance(v, Literal) else None for v in eqn.invars[2:]]
    if any(k is None for k in starts):
        return region
    shape, sizes = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    if not all(isinstance(n, int) for n in (*shape, *sizes)):
        return region
    clamped = [
        min(max(k or 0, 0), n - size)
        for k, n, size in zip(starts, shape, sizes, strict=True)
    ]
    return sub_region(region, eqn.invars[0].aval, clamped, sizes)[0]


def sub_region(
    region: Region, aval: Any, starts: Sequence[int], sizes: Sequence[int]
) -> tuple[Region, bool]:
    """The bytes from the first to the last element of a block, and if it fills them."""
    aval = getattr(aval, "inner_aval", aval)
    shape = aval.shape
    if not all(isinstance(n, int) for n in (*shape, *starts, *sizes)):
        return region, False
    if 0 in sizes or 0 in shape:
        return Region(region.buffer, region.start, region.start), True
    strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    first = sum(a * stride for a, stride in zip(starts, strides, strict=True))
    length = 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    begin = region.start + first * aval.dtype.itemsize
    block = Region(region.buffer, begin, begin + length * aval.dtype.itemsize)
    return block, length == math.prod(sizes)


# Donation.


def written_in_place(
    jaxpr: Jaxpr, donated: Sequence[bool]
) -> tuple[dict[Any, str], tuple[str, ...]]:
    """({value: donated buffer it is written to}, copies that cannot be avoided).

    Outputs take the donated arguments of their shape and dtype in order, as in XLA. An
    old value that somebody reads after it was overwritten needs a copy; then the
    argument counts as not overwritten.
    """
    producer = {v: k for k, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    free: dict[tuple, list[int]] = {}
    for k, v in enumerate(jaxpr.invars):
        if donated[k] and not is_ref(v.aval):
            free.setdefault((v.aval.shape, v.aval.dtype), []).append(k)
    found: dict[Any, str] = {}
    copies = []
    for number, v in enumerate(jaxpr.outvars):
        queue = free.get((v.aval.shape, v.aval.dtype), ())
        if isinstance(v, Literal) or not queue or v not in producer or v in found:
            continue
        k = queue.pop(0)
        chain = updates_from(jaxpr, jaxpr.invars[k], v, producer)
        if late := read_too_late(jaxpr, jaxpr.invars[k], chain, producer):
            copies.append(
                f"output {number} is written to a copy of donated argument {k}: {late} "
                "reads the old value after it was replaced"
            )
        else:
            found.update({w: f"arg{k}" for w in chain})
    return found, tuple(copies)


def updates_from(jaxpr: Jaxpr, argument: Any, output: Any, producer: dict) -> list[Any]:
    """The values from `argument` to `output`, oldest first, that share its buffer.

    A chain of updates and reshapes if there is one, else only what makes the output.
    """
    chain, v = [], output
    while v in producer:
        eqn = jaxpr.eqns[producer[v]]
        if is_update(eqn):
            chain.append(v)
        elif not is_view(eqn) or eqn.primitive.name == "slice":
            break
        v = eqn.invars[0]
    if v is argument:
        return chain[::-1]
    v = output
    while v in producer and is_view(jaxpr.eqns[producer[v]]):
        v = jaxpr.eqns[producer[v]].invars[0]
    return [v] if v in producer else []


def read_too_late(
    jaxpr: Jaxpr, argument: Any, chain: list[Any], producer: dict
) -> str | None:
    """Who reads a value of the chain, or a view of it, after it was overwritten."""
    for old, new in zip([argument, *chain[:-1]], chain, strict=True):
        at = producer[new]
        position, reader = last_read(jaxpr, old)
        if position > at:
            return reader
    return None


def last_read(jaxpr: Jaxpr, v: Any) -> tuple[int, str]:
    """(position, name) of the last equation that reads a value or a view of it."""
    end = (-1, "")
    if v in variables(jaxpr.outvars):
        return len(jaxpr.eqns), "the caller"
    for k, eqn in enumerate(jaxpr.eqns):
        if v in variables(eqn.invars):
            read = (k, f"equation {k} ({eqn.primitive.name})")
            if is_view(eqn):
                read = last_read(jaxpr, eqn.outvars[0])
            end = max(end, read)
    return end
