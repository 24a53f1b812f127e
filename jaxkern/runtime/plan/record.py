"""What a plan is made of: the executable, what it was compiled from, what it shows.

`lower` prepares what XLA compiles, `PlanRecord.of` compiles it. Nothing of what a
record shows is computed before it is asked for.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax

from jaxkern.primitives.linear.policy import Policy, current_policy
from jaxkern.runtime.plan.compiler_dump import (
    CommandBufferReport,
    CompilerDump,
    dump_compilation,
    module_of,
    read_thunks,
)
from jaxkern.runtime.plan.hlo_module import HloModule
from jaxkern.runtime.plan.instructions import (
    Instruction,
    count_views,
    list_instructions,
)
from jaxkern.runtime.plan.made import made
from jaxkern.runtime.plan.memory_map import MemoryMap, memory_map
from jaxkern.runtime.trace import fault_points

EVERY_KIND = (
    "FUSION,CUBLAS,CUBLASLT,CUDNN,COLLECTIVES,CONDITIONAL,WHILE,CUSTOM_CALL,"
    "DYNAMIC_SLICE_FUSION"
)
COMMAND_BUFFERS: dict[str, dict[str, Any]] = {
    "auto": {},
    "off": {"xla_gpu_enable_command_buffer": ""},
    "all": {
        "xla_gpu_enable_command_buffer": EVERY_KIND,
        "xla_gpu_graph_min_graph_size": 1,
    },
}


class Lowered(NamedTuple):
    """A function as the compiler gets it."""

    function: Any
    traced: Any
    lowered: jax.stages.Lowered
    options: dict[str, Any]
    donate: tuple[int, ...]
    policy: Policy | None


def lower(
    f: Callable,
    specs: tuple,
    donate: int | Sequence[int] = (),
    compiler_options: dict[str, Any] | None = None,
    command_buffers: str = "auto",
) -> Lowered:
    """All of `compile` but the compiler."""
    if command_buffers not in COMMAND_BUFFERS:
        raise ValueError(
            f"compile: `command_buffers` must be one of {', '.join(COMMAND_BUFFERS)}, "
            f"got {command_buffers!r}."
        )
    donate = (donate,) if isinstance(donate, int) else tuple(donate)
    # a jitted function keeps what it was jitted with
    keeps = hasattr(f, "trace") and not donate
    jitted: Any = f if keeps else jax.jit(f, donate_argnums=donate)
    traced = jitted.trace(*specs)
    options = {**COMMAND_BUFFERS[command_buffers], **(compiler_options or {})}
    return Lowered(jitted, traced, traced.lower(), options, donate, current_policy())


class PlanRecord:
    """A compiled function and what can be read of it; `Plan` is what users get.

    Attributes:
      compiled: the executable.
      compile_seconds: that XLA took, or reading the machine code from a file.
      stage: what it was compiled from; None for machine code from a file.
      was_read: it comes from a file, or jax had it and perhaps from one.
    """

    def __init__(
        self,
        compiled: jax.stages.Compiled,
        compile_seconds: float,
        stage: Lowered | None = None,
        was_read: bool = True,
    ):
        self.compiled, self.compile_seconds = compiled, compile_seconds
        self.stage, self.was_read = stage, was_read

    @classmethod
    def of(cls, stage: Lowered) -> Self:
        """What XLA makes of a function, timed."""
        fault_points.hit("compile")
        compiled, seconds, was_read = made(stage.lowered, stage.options)
        return cls(compiled, seconds, stage, was_read)

    @functools.cached_property
    def devices(self) -> set[jax.Device]:
        """All that it runs on."""
        compiled = self.compiled
        leaves = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
        return {d for s in leaves for d in s.device_set} or {jax.devices()[0]}

    @property
    def device(self) -> jax.Device:
        """The first device that it runs on."""
        return min(self.devices, key=lambda d: d.id)

    @property
    def platform(self) -> str:
        """ "cpu" or "gpu"."""
        return self.device.platform

    @property
    def policy(self) -> Policy | None:
        """The dtype policy in force when it was compiled; None from a file."""
        return self.stage and self.stage.policy

    @functools.cached_property
    def module(self) -> HloModule:
        """XLA's optimised module."""
        return module_of(self.compiled)

    @functools.cached_property
    def _instructions(self) -> tuple[Instruction, ...]:
        return list_instructions(self.module)

    def instructions(self) -> tuple[Instruction, ...]:
        """All that one call executes, in order; bodies of loops before the loop."""
        return self._instructions

    def __len__(self) -> int:
        """Number of `instructions()`."""
        return len(self._instructions)

    def __bool__(self) -> bool:
        return True  # also of a function that returns its argument

    @functools.cached_property
    def nops(self) -> int:
        """Instructions of the module that cost nothing: they only name buffers."""
        return count_views(self.module)

    @functools.cached_property
    def uncaptured(self) -> Self:
        """The same plan without CUDA graphs; itself where nothing is captured."""
        if self.platform == "cpu" or self.stage is None:
            return self
        options = self.stage.options | COMMAND_BUFFERS["off"]
        return self.of(self.stage._replace(options=options))

    @functools.cached_property
    def _dump(self) -> CompilerDump | None:
        if self.stage is None:
            return None
        return dump_compilation(self.stage.lowered, self.stage.options)

    @functools.cached_property
    def _memory(self) -> MemoryMap:
        stats = self.compiled.memory_analysis()
        if stats is None:
            raise NotImplementedError("plan: this platform does not report its memory.")
        module, assignment = self.module, stats.serialized_buffer_assignment_proto
        if not assignment and self._dump is not None and self._dump.module is not None:
            module, assignment = self._dump.module, self._dump.buffer_assignment
        return memory_map(stats, module, assignment, "XLA shows no places here.")

    def memory(self) -> MemoryMap:
        """Bytes of arguments, results and temporaries, and each buffer's place.

        On a GPU the first call compiles once more, since only a dump shows the places.
        """
        return self._memory

    @functools.cached_property
    def _command_buffers(self) -> CommandBufferReport:
        if self.platform == "cpu":
            return CommandBufferReport((), {}, "a CPU has none")
        if self._dump is None:
            return CommandBufferReport(
                (), {}, "machine code does not show its launches"
            )
        return read_thunks(self._dump.thunks, self._dump.module or self.module)

    def command_buffer_report(self) -> CommandBufferReport:
        """Launches inside and outside CUDA graphs.

        On a GPU the first call compiles once more, since only a dump shows them.
        """
        return self._command_buffers

    def source(self, level: str) -> str:
        """The program at a level: "jaxpr", "stablehlo" or "hlo" (optimised).

        Raises:
          ValueError: an unknown level, or one that machine code does not keep.
        """
        if level == "hlo":
            return self.compiled.as_text() or ""
        if level not in ("jaxpr", "stablehlo"):
            raise ValueError(
                f"plan: `level` must be jaxpr, stablehlo or hlo, got {level!r}."
            )
        if self.stage is None:
            raise ValueError(f"plan: machine code does not keep its {level}.")
        if level == "jaxpr":
            return str(self.stage.traced.jaxpr)
        return self.stage.lowered.as_text()

    def __str__(self) -> str:
        return "\n".join(map(str, self._instructions))

    def __repr__(self) -> str:
        return f"Plan({self.module.name}, {len(self)} instructions, {self.platform})"
