"""A launch of a Triton kernel, and what Triton compiles it to, for which GPU."""

import dataclasses
import functools
import re
import subprocess
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from jaxkern.gpu.device import compute_capability

try:
    import triton as triton_package
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource
except ImportError:
    triton_package = None
    GPUTarget: Any = None
    ASTSource: Any = None
    GluonASTSource: Any = None

triton: Any = triton_package

PLAIN_SHARED = 48 << 10  # bytes that need not be asked for
RING_ALIGNED = 128  # bytes


class Launch(NamedTuple):
    """One launch of one kernel, all of it static; hashable.

    Attributes:
      kernel: the `jit` function. Its parameters are pointers to the operands, pointers
        to the results, then constants.
      operands: names of the Triton types of all pointers, such as "*bf16"; a tuple of
        names for a parameter that is a tuple of pointers.
      constants: (name, value) of every `tl.constexpr` parameter.
      grid: number of programs along each of up to three axes.
      num_warps, num_stages: of one program.
      max_registers: of one thread; None leaves it to the assembler.
      cluster: programs beside each other that run together (`cluster.py`); divides the
        first number of the grid.
    """

    kernel: Any
    operands: tuple[str | tuple[str, ...], ...]
    constants: tuple[tuple[str, Any], ...]
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    cluster: int = 1

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def ttir(self) -> str:
        """Triton's intermediate representation."""
        return intermediate(compiled(self, compute_capability()))

    @property
    def ptx(self) -> str:
        return compiled(self, compute_capability()).asm["ptx"]

    @property
    def sass(self) -> str:
        """The machine code, disassembled."""
        return compiled(self, compute_capability()).asm["sass"]

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one program."""
        return compiled(self, compute_capability()).metadata.shared

    @property
    def dynamic_bytes(self) -> int:
        """What a launcher asks for beside the EXCHANGE that the kernel declares.

        A kernel of `bulk_ring.py` has its RING behind what Triton needs. The driver
        must allow a kernel more than 48 KB together, which launchers see to where what
        they ask for is more.
        """
        constants, needed = dict(self.constants), self.shared_bytes
        if ring := constants.get("RING", 0):
            needed = -(-needed // RING_ALIGNED) * RING_ALIGNED + ring
        declared = constants.get("EXCHANGE", 0)
        plain = needed + declared <= PLAIN_SHARED or not declared
        return needed if plain else max(needed, PLAIN_SHARED + 16)

    @property
    def registers(self) -> int:
        """Registers of one thread."""
        return resources(self, compute_capability())["REG"]

    @property
    def stack_bytes(self) -> int:
        """Local memory of one thread; more than 0 means that registers spilled."""
        return resources(self, compute_capability())["STACK"]

    def describe(self) -> str:
        """One line: grid, constants, registers, shared memory."""
        grid = "x".join(map(str, self.grid))
        known = []
        for n, v in self.constants:
            known += vars(v).items() if dataclasses.is_dataclass(v) else [(n, v)]
        sizes = " ".join(
            f"{n}=<{len(v)}>" if isinstance(v, tuple) else f"{n}={v}"
            for n, v in known
            if v is not None
        )
        line = f"{self.name}: {grid} programs of {self.num_warps} warps, {sizes}"
        if triton is None:
            return line
        if self.cluster > 1:
            line += f", clusters of {self.cluster}"
        line += f", {self.registers} registers, {self.shared_bytes} B shared"
        return line + (f", {self.stack_bytes} B stack" if self.stack_bytes else "")


# by kernel and compute capability: what other processes compile (compile_ahead.py)
elsewhere: dict[tuple[Launch, int], Future] = {}


@functools.lru_cache(maxsize=4096)
def compiled(launch: Launch, capability: int) -> Any:
    """The kernel as Triton compiled it: `.asm` has every stage, `.metadata` its needs.

    Args:
      launch: the kernel with its types and constants; the grid does not matter.
      capability: 80 for an A100, 90 for an H100 or H200.
    """
    if at_work := elsewhere.pop((launch._replace(grid=()), capability), None):
        at_work.exception()  # waits; what failed there fails below, in words
    return triton.compile(*compilation(launch, capability))


def compilation(launch: Launch, capability: int) -> tuple[Any, Any, dict[str, Any]]:
    """What `triton.compile` is given: source, target, options."""
    names = list(launch.kernel.arg_names)
    constants = dict(launch.constants)
    pointers = [n for n in names if n not in constants]
    if len(pointers) != len(launch.operands) or set(constants) - set(names):
        raise TypeError(
            f"triton_call: {launch.name} takes pointers {pointers} and constants "
            f"{[n for n in names if n in constants]}, got {len(launch.operands)} "
            f"arrays and {sorted(constants)}."
        )
    types = dict(zip(pointers, launch.operands, strict=True))
    language = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    source = language(
        launch.kernel,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs=constants,
        # XLA aligns every buffer to 16 bytes: loads can be 16 bytes wide.
        attrs={
            path: [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if n in types
            for path in paths_of(i, types[n])
        },
    )
    options = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": True,
        "maxnreg": launch.max_registers,
        # a check beside every sum of integers, which nothing reads without `debug`
        "sanitize_overflow": False,
    }
    return source, GPUTarget("cuda", capability, 32), options


def paths_of(i: int, type_: str | tuple[str, ...]) -> list[tuple[int, ...]]:
    """Where the pointers of parameter `i` are."""
    return [(i,)] if isinstance(type_, str) else [(i, j) for j in range(len(type_))]


def intermediate(binary: Any) -> str:
    """The first stage that has one: a Gluon kernel begins with its layouts."""
    return binary.asm.get("ttir") or binary.asm["ttgir"]


@functools.lru_cache(maxsize=4096)
def resources(launch: Launch, capability: int) -> dict[str, int]:
    """What the assembler says of a kernel: REG, STACK, SHARED, LOCAL, ..."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(launch, capability).asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(n) for name, n in re.findall(r"([A-Z]+):(\d+)", out)}
