"""One launch of a Mosaic GPU kernel, as `explain` shows it."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir


def kernel_name(kernel: str, **sizes: int) -> str:
    """The name of a kernel with its block sizes, for profiles, dumps and `explain`."""
    return "_".join([kernel, *(f"{n}{name}" for name, n in sizes.items())])


@dataclasses.dataclass(frozen=True)
class MosaicLaunch:
    """One launch of one kernel, all of it static.

    The assembly is made where the executable is: MOSAIC_GPU_DUMP_PTX=1, _PTXAS=1 and
    _SASS=1 in the environment print it then, MOSAIC_GPU_DUMP_TO=DIRECTORY writes it.

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
    modules: Callable[[], dict[str, Any]] = dataclasses.field(compare=False, repr=False)

    @property
    def mlir(self) -> str:
        """The kernel as Mosaic hands it to XLA."""
        return str(self.modules()[self.name])

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one program."""
        [launch] = operations(self.modules()[self.name].operation, "gpu.launch")
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


def mosaic_launch(eqn: Any, inside: Callable[[Any], Iterator], modules: Callable):
    """What an equation launches, or None if it launches no Mosaic kernel.

    Args:
      inside: every equation of a jaxpr.
      modules: the result of `mosaic_modules` for what the equation is part of.
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
        modules,
    )


def mosaic_modules(lowered: Any) -> dict[str, ir.Module]:
    """The Mosaic kernels of a lowered function by their names."""
    module = lowered.compiler_ir()
    with module.context:
        module.context.allow_unregistered_dialects = True
        found = [
            ir.Module.parse(ir.StringAttr(config["module"]).value_bytes)
            for call in operations(module.operation, "stablehlo.custom_call")
            if "mosaic_gpu" in str(call.attributes["call_target_name"])
            for config in [ir.DictAttr(call.attributes["mhlo.backend_config"])]
        ]
    return {ir.StringAttr(m.operation.attributes["sym_name"]).value: m for m in found}


def operations(root: Any, name: str) -> list[Any]:
    """Those below `root` whose name ends so: dialects are versioned in its front."""
    found = []

    def visit(operation):
        if operation.name.endswith(name):
            found.append(operation)
        return ir.WalkResult.ADVANCE

    root.walk(visit)
    return found
