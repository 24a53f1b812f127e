"""One launch of a Mosaic GPU kernel, as `explain` shows it."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from jaxkern.pallas.mosaic_assembly import (
    Assembly,
    assemblies,
    mosaic_calls,
    operations,
)


def kernel_name(kernel: str, **sizes: int) -> str:
    """The name of a kernel with its block sizes, for profiles, dumps and `explain`."""
    return "_".join([kernel, *(f"{n}{name}" for name, n in sizes.items())])


class MosaicKernels:
    """The Mosaic kernels of a traced function by their names, made when asked for."""

    def __init__(self, traced: Any):
        self.traced = traced

    @functools.cached_property
    def modules(self) -> dict[str, ir.Module]:
        """As Mosaic hands them to XLA."""
        module = self.traced.lower(lowering_platforms=("cuda",)).compiler_ir()
        with module.context:
            module.context.allow_unregistered_dialects = True
            found = [
                ir.Module.parse(ir.StringAttr(config["module"]).value_bytes)
                for call in mosaic_calls(module)
                for config in [ir.DictAttr(call.attributes["mhlo.backend_config"])]
            ]
        names = [ir.StringAttr(m.operation.attributes["sym_name"]).value for m in found]
        return dict(zip(names, found, strict=True))

    @functools.cached_property
    def assemblies(self) -> dict[str, Assembly]:
        return assemblies(self.traced)


@dataclasses.dataclass(frozen=True)
class MosaicLaunch:
    """One launch of one kernel, all of it static.

    Attributes:
      name: of the kernel, with its block sizes.
      grid: number of programs along each axis, or of clusters.
      cluster: number of programs of a cluster along each axis; empty for none.
      num_warpgroups: of one program, 128 threads each.
      registers: of one thread, by what a warpgroup does: loaders have few.
    """

    name: str
    grid: tuple[int, ...]
    cluster: tuple[int, ...]
    num_warpgroups: int
    registers: tuple[int, ...]
    kernels: MosaicKernels = dataclasses.field(compare=False, repr=False)

    @property
    def mlir(self) -> str:
        """The kernel as Mosaic hands it to XLA."""
        return str(self.kernels.modules[self.name])

    @property
    def ptx(self) -> str:
        """Compiled once more, for this machine's GPU, which takes some seconds."""
        return self.assembly.ptx

    @property
    def sass(self) -> str:
        """The machine code of this machine's GPU, disassembled, with control codes."""
        if self.assembly.sass is None:
            raise RuntimeError(
                f"explain: {self.name}: SASS needs nvdisasm, of the CUDA toolkit or of "
                "the package triton; `ptx` does not."
            )
        return self.assembly.sass

    @property
    def assembly(self) -> Assembly:
        found = self.kernels.assemblies
        if self.name not in found:
            raise RuntimeError(
                f"explain: {self.name}: jax's CUDA plugin wrote no PTX of it, only of "
                f"{', '.join(found) or 'nothing'}."
            )
        return found[self.name]

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one program."""
        [launch] = operations(self.kernels.modules[self.name].operation, "gpu.launch")
        return ir.IntegerAttr(launch.operands[-1].owner.attributes["value"]).value

    def describe(self) -> str:
        """One line: grid, warpgroups, registers, shared memory."""
        grid = "x".join(map(str, self.grid))
        if self.cluster:
            grid += f" clusters of {'x'.join(map(str, self.cluster))}"
        line = f"{self.name}: {grid} programs of {self.num_warpgroups} warpgroups"
        if self.registers:
            line += f", {' or '.join(map(str, self.registers))} registers"
        return line + f", {self.shared_bytes} B shared"


def mosaic_launch(
    eqn: Any, inside: Callable[[Any], Iterator], kernels: MosaicKernels
) -> MosaicLaunch | None:
    """What an equation launches, or None if it launches no Mosaic kernel.

    Args:
      inside: every equation of a jaxpr.
      kernels: those of what the equation is part of.
    """
    meshes = [m for m in eqn.params.get("meshes", ()) if isinstance(m, plgpu.Mesh)]
    if not meshes:
        return None
    [mesh] = meshes
    registers = {
        e.params["n"]
        for jaxpr in eqn.params["jaxprs"]
        for e in inside(jaxpr)
        if e.primitive.name.startswith("set_max_registers")
    }
    return MosaicLaunch(
        eqn.params["name"],
        tuple(mesh.grid),
        tuple(mesh.cluster or ()),
        mesh.num_threads or 1,
        tuple(sorted(registers, reverse=True)),
        kernels,
    )
