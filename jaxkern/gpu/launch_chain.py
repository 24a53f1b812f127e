"""Triton kernels launched one after the other in one call of XLA.

    [y] = one(x, w)        launch_chain_p.bind(x, w, v, steps=(one, two), ...)
    [z] = two(y, v)

Between two calls of XLA a kernel ends before the next begins, and memory is idle for
as long as a small product takes. Within one call the next is resident and has read its
first weights by then (`dependent_launch.py`). The call is a handler of the library
`libjaxkern_gpu.so`, which is built without CUDA; XLA captures it into its graph.
Who makes chains of a function's kernels: `lowering/chained.py`.
"""

import ctypes
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla
from jax.sharding import Mesh

from jaxkern.gpu import triton_call
from jaxkern.gpu.chain_library import TARGET, library, missing_library
from jaxkern.gpu.dependent_launch import EARLIER, EARLY, READ, READ_EARLIER, WAIT
from jaxkern.gpu.device import WARP, compute_capability, driver_version
from jaxkern.gpu.launch import Launch, compiled
from jaxkern.gpu.peer_sum import MAX_RANKS, Peers

HOPPER = 90  # the first that lets a kernel begin early
OLDEST_DRIVER = 12_030  # likewise, within a graph


class Step(NamedTuple):
    """One launch: where its pointers come from.

    Attributes:
      launch: as `triton_call` makes it; its AHEAD is chosen when it is lowered.
      sources: of each pointer the buffer, operands of the chain before its results, and
        bytes into it; -1 - i for mailbox i of `peer_sum.py`.
    """

    launch: Launch
    sources: tuple[tuple[int, int], ...]


def missing() -> str | None:
    """Why no chain can be launched here, or None."""
    if reason := triton_call.missing():
        return reason
    if compute_capability() < HOPPER:
        return f"the compute capability is {compute_capability()}, below {HOPPER}"
    if 0 < driver_version() < OLDEST_DRIVER:
        return f"the driver is of CUDA {driver_version()}, below {OLDEST_DRIVER}"
    return missing_library()


def peers_of(mesh: Mesh, axis_name: str) -> Peers | None:
    """The GPUs along an axis, or None where they do not all reach each other."""
    axis = mesh.axis_names.index(axis_name)
    devices = np.moveaxis(mesh.devices, axis, -1)
    groups = devices.reshape(-1, devices.shape[-1])
    ours = all(
        d.platform == "gpu" and d.process_index == jax.process_index()
        for d in groups.flat
    )
    if not ours or not 1 < groups.shape[1] <= MAX_RANKS:
        return None
    numbers = tuple(tuple(d.local_hardware_id for d in group) for group in groups)
    return Peers(axis_name, numbers) if reach_each_other(numbers) else None


def reach_each_other(groups: Sequence[Sequence[int]]) -> bool:
    """Whether the devices of each group, by CUDA's numbers, see each other's memory."""
    if missing():
        return False
    reach = ctypes.CDLL(str(library())).jaxkern_reach_each_other
    return all(reach((ctypes.c_int * len(g))(*g), len(g)) for g in groups)


def fits(launch: Launch) -> bool:
    """Whether the kernel knows how to begin before the one ahead has ended."""
    return "AHEAD" in dict(launch.constants)


def ahead(launch: Launch, sources: Sequence[tuple[int, int]], num_operands: int) -> int:
    """READ where no kernel of the chain writes what it would read early, else WAIT."""
    early = buffers_of(launch, sources, EARLY)
    return READ if all(buffer < num_operands for buffer in early) else WAIT


def buffers_of(
    launch: Launch, sources: Sequence[tuple[int, int]], names: Sequence[str]
) -> list[int]:
    """Those of the operands that have one of the names."""
    constants = dict(launch.constants)
    pointers = [n for n in launch.kernel.arg_names if n not in constants]
    every = [
        name
        for name, type_ in zip(pointers, launch.operands, strict=True)
        for _ in ([type_] if isinstance(type_, str) else type_)
    ]
    return [
        buffer
        for name, (buffer, _) in zip(every, sources, strict=True)
        if name in names
    ]


def levels(steps: Sequence[Step], num_operands: int) -> list[int]:
    """How each kernel of a chain begins, see `dependent_launch.py`."""
    found, done, made = [], set(range(num_operands)), set[int]()
    patient = False
    for launch, sources in steps:
        level = ahead(launch, sources, num_operands)
        earlier = buffers_of(launch, sources, EARLIER)
        if patient and earlier and done.issuperset(earlier):
            level = READ_EARLIER
        found.append(level)
        done |= made  # by those ahead of this kernel, which has waited for them
        made = {buffer for buffer, _ in sources}
        patient = dict(launch.constants).get("LATE", False)
    return found


def kernels_of(steps: Sequence[Step], num_operands: int) -> list[Launch]:
    """What each step is compiled as."""
    found = []
    for (launch, _), level in zip(steps, levels(steps, num_operands), strict=True):
        constants = tuple({**dict(launch.constants), "AHEAD": level}.items())
        found.append(launch._replace(constants=constants, grid=()))
    return found


launch_chain_p = Primitive("launch_chain")
launch_chain_p.multiple_results = True


def abstract_eval(*avals, steps: tuple, out: tuple, **rest: Any) -> list:
    del avals, steps, rest
    return [ShapedArray(shape, dtype) for shape, dtype in out]


def lower(
    ctx,
    *args,
    steps: tuple[Step, ...],
    out: tuple,
    aliases: tuple,
    peers: Peers | None,
):
    del out
    if reason := missing():
        raise RuntimeError(f"launch_chain: {reason}.")
    rule = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=dict(aliases))
    return rule(ctx, *args, **attributes(steps, len(args), peers))


def attributes(
    steps: Sequence[Step], num_operands: int, peers: Peers | None = None
) -> dict[str, Any]:
    """What the handler reads; see launch_chain.cc."""
    kernels: dict[Launch, int] = {}
    program: list[int] = []
    every = kernels_of(steps, num_operands)
    for i, ((launch, sources), kernel) in enumerate(zip(steps, every, strict=True)):
        number = kernels.setdefault(kernel, len(kernels))
        # what stands before the chain is no kernel that says when to begin
        program += [number, *(*launch.grid, 1, 1)[:3], int(i > 0), launch.cluster]
        program += [len(sources)]
        program += [n for source in sources for n in source]
    table, names, binaries = [], "", b""
    for kernel in kernels:
        binary = compiled(kernel, compute_capability())
        metadata = binary.metadata
        if getattr(metadata, "num_ctas", 1) > 1 or scratch_bytes(metadata):
            raise RuntimeError(
                f"launch_chain: {kernel.name} has `num_ctas` or scratch memory, which "
                "a chain does not launch; leave AHEAD out of its constants."
            )
        cubin = binary.asm["cubin"]
        threads = metadata.num_warps * WARP
        table += [len(binaries), len(cubin), threads, kernel.dynamic_bytes]
        names += metadata.name + "\n"
        binaries += cubin + b"\0" * (-len(cubin) % 8)
    digest = hashlib.sha256(binaries + names.encode() + repr(table).encode()).digest()
    return {
        "key": np.int64(int.from_bytes(digest[:8], "little", signed=True)),
        "kernels": np.array(table, np.int64),
        "names": names,
        "binaries": binaries,
        "program": np.array(program, np.int64),
        "ranks": np.int64(peers.ranks if peers else 0),
        "groups": np.array(peers.groups if peers else ((0,),), np.int64).reshape(-1),
        "mailbox_bytes": np.int64(peers.mailbox_bytes if peers else 0),
    }


def scratch_bytes(metadata: Any) -> int:
    sizes = (getattr(metadata, f"{n}_scratch_size", 0) for n in ("global", "profile"))
    return sum(size or 0 for size in sizes)


launch_chain_p.def_impl(functools.partial(xla.apply_primitive, launch_chain_p))
launch_chain_p.def_abstract_eval(abstract_eval)
mlir.register_lowering(launch_chain_p, lower, platform="cuda")
