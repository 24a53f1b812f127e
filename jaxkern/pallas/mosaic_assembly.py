"""PTX and SASS of Mosaic GPU kernels.

The CUDA plugin makes them where it compiles an executable, and keeps neither. It writes
them to the folder that MOSAIC_GPU_DUMP_TO names in the environment, unless it knows the
kernel's hash: so a compilation of its own, under a new hash, has them written to a
folder that lasts as long.
"""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.extend.mlir import ir

from jaxkern.gpu.device import cuda_device
from jaxkern.gpu.launch import triton

HASH_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Assembly:
    """What the CUDA plugin makes of one kernel.

    Attributes:
      ptx: for the newest PTX version that the plugin's assembler takes.
      sass: the machine code, disassembled; None without a disassembler.
    """

    ptx: str
    sass: str | None


def assemblies(traced: Any) -> dict[str, Assembly]:
    """The Mosaic kernels of a traced function by their names, compiled for the GPU."""
    device = cuda_device()
    if device is None:
        raise RuntimeError(
            "explain: PTX and SASS of a Mosaic kernel are made by jax's CUDA plugin "
            "for a GPU of this machine, and there is none. `mlir` needs no GPU."
        )
    with jax.default_device(device):
        lowered = traced.lower()
    for call in mosaic_calls(lowered.compiler_ir()):
        forget_hash(call)
    with tempfile.TemporaryDirectory() as folder:
        with environment(MOSAIC_GPU_DUMP_TO=folder, MOSAIC_GPU_CUDA_ROOT=cuda_root()):
            lowered.compile()
        return read_assemblies(Path(folder))


def mosaic_calls(module: Any) -> list[Any]:
    """The calls of Mosaic kernels in a lowered function."""
    return [
        call
        for call in operations(module.operation, "stablehlo.custom_call")
        if "mosaic_gpu" in str(call.attributes["call_target_name"])
    ]


def operations(root: Any, name: str) -> list[Any]:
    """Those below `root` whose name ends so: dialects are versioned in its front."""
    found = []

    def visit(operation):
        if operation.name.endswith(name):
            found.append(operation)
        return ir.WalkResult.ADVANCE

    root.walk(visit)
    return found


def forget_hash(call: Any) -> None:
    """Gives a kernel a hash that the plugin has not met."""
    with call.context:
        config = ir.DictAttr(call.attributes["mhlo.backend_config"])
        entries = {named.name: named.attr for named in config}
        entries["kernel_hash"] = ir.StringAttr.get(os.urandom(HASH_BYTES))
        call.attributes["mhlo.backend_config"] = ir.DictAttr.get(entries)


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def cuda_root() -> str:
    """A folder whose bin has nvdisasm: the toolkit that jax found, or Triton's."""
    roots = [os.environ.get("MOSAIC_GPU_CUDA_ROOT", "")]
    if triton is not None:
        roots.append(str(Path(triton.__file__).parent / "backends/nvidia"))
    found = (root for root in roots if (Path(root) / "bin/nvdisasm").exists())
    return next(found, roots[0])


def read_assemblies(folder: Path) -> dict[str, Assembly]:
    """From NAME_NUMBER.ptx, and .sass or with control codes .sass_ctrl."""
    found = {}
    for ptx in folder.glob("*.ptx"):
        name = ptx.stem.rpartition("_")[0]
        sass = [p for p in folder.glob(f"{ptx.stem}.sass*")]
        text = sass[0].read_text() if sass else None
        found[name] = Assembly(ptx.read_text(), text)
    return found
