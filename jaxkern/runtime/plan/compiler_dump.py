"""What only a compiler dump says: a GPU's buffer assignment and its list of launches.

XLA's CUDA plugin keeps both to itself. So the function is compiled once more with
`xla_dump_to`, into a folder that is deleted. Autotuning can choose another kernel in
the second compilation; nothing else differs.
"""

import contextlib
import dataclasses
import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxkern.runtime.plan.hlo_module import HloModule, Message

THUNK_LINE = re.compile(r"^(\s*)(?:\d+:\s*)?k([A-Z]\w*)")
GROUPS = ("CommandBuffer", "Sequential", "Conditional", "While")
switching = threading.Lock()


@dataclasses.dataclass(frozen=True)
class CompilerDump:
    """Attributes:
    module: the optimised module, or None where XLA wrote none.
    buffer_assignment: of the same compilation, `BufferAssignmentProto`.
    thunks: XLA's list of launches as text, or "" where it wrote none.
    """

    module: HloModule | None
    buffer_assignment: bytes
    thunks: str


def dump_compilation(
    lowered: jax.stages.Lowered, options: dict[str, Any]
) -> CompilerDump:
    """Compiles again and reads what XLA writes down on the way."""
    with tempfile.TemporaryDirectory(prefix="jaxkern-") as folder:
        dump = {
            "xla_dump_to": folder,
            "xla_dump_hlo_as_proto": True,
            "xla_dump_hlo_as_text": True,
        }
        with no_persistent_cache():
            compiled = lowered.compile(compiler_options={**options, **dump})
        name = module_of(compiled).name
        files = [p for p in Path(folder).rglob("*") if f".{name}." in p.name]
        return read_dump(files)


@contextlib.contextmanager
def no_persistent_cache() -> Iterator[None]:
    """Compiles anew: an executable from the cache leaves no dump."""
    if jax.config.jax_compilation_cache_dir is None:
        yield
        return
    enabled = jax.config.jax_enable_compilation_cache
    with switching:  # jax's cache is one for all threads
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # else jax keeps what it read before
        try:
            yield
        finally:
            jax.config.update("jax_enable_compilation_cache", enabled)
            compilation_cache.reset_cache()


def read_dump(files: list[Path]) -> CompilerDump:
    def largest(*endings: str) -> bytes:
        """Of the first ending that there is; autotuning leaves smaller files."""
        for ending in endings:
            found = [p for p in files if p.name.endswith(ending)]
            if found:
                return max((p.read_bytes() for p in found), key=len)
        return b""

    proto = Message(largest("after_optimizations.hlo.pb"))
    thunks = largest("thunk_sequence_after_thunk_passes.txt", "thunk_sequence.txt")
    return CompilerDump(
        module=HloModule(proto.message(1).data) if proto.data else None,
        buffer_assignment=bytes(proto.message(3).data),
        thunks=thunks.decode(errors="replace"),
    )


def module_of(compiled: jax.stages.Compiled) -> HloModule:
    """The optimised module of an executable.

    Raises:
      NotImplementedError: this platform does not show it.
    """
    executable = compiled.runtime_executable()
    modules = getattr(executable, "hlo_modules", lambda: [])()
    if not modules:
        raise NotImplementedError(
            "plan: this platform's executables do not show their instructions."
        )
    return HloModule(modules[0].as_serialized_hlo_module_proto())


@dataclasses.dataclass(frozen=True)
class CommandBufferReport:
    """How much of a call runs in graphs that the host launches at once.

    Attributes:
      sizes: number of launches in each command buffer (a CUDA graph).
      outside: launches that the host makes one by one, by kind.
      note: why there is none, or how it was counted.
    """

    sizes: tuple[int, ...]
    outside: dict[str, int]
    note: str

    @property
    def inside(self) -> int:
        """Launches in command buffers."""
        return sum(self.sizes)

    @property
    def share(self) -> float:
        """Of all launches, those in command buffers."""
        total = self.inside + sum(self.outside.values())
        return self.inside / total if total else 0.0

    def __str__(self) -> str:
        if not self.sizes:
            return f"no command buffer: {self.note}"
        alone = ", ".join(f"{n} {kind}" for kind, n in self.outside.items()) or "none"
        return (
            f"{len(self.sizes)} command buffers of {', '.join(map(str, self.sizes))} "
            f"launches ({self.share:.1%} of all); alone: {alone}"
        )


def read_thunks(text: str, module: HloModule) -> CommandBufferReport:
    """Counts XLA's launches; a line is indented under the group that it belongs to."""
    sizes: list[int] = []
    outside: dict[str, int] = {}
    captured = None  # depth of the command buffer that the line belongs to
    for line in text.splitlines():
        match = THUNK_LINE.match(line)
        if match is None:
            continue
        depth, kind = len(match[1]), match[2]
        if captured is not None and depth <= captured:
            captured = None
        if kind == "CommandBuffer" and captured is None:
            captured = depth
            sizes.append(0)
        elif kind in GROUPS:
            continue
        elif captured is None:
            outside[kind] = outside.get(kind, 0) + 1
        else:
            sizes[-1] += 1
    if sizes or outside:
        note = "the launches are fewer than XLA's smallest graph, or cannot be captured"
        return CommandBufferReport(tuple(sizes), outside, "" if sizes else note)
    # XLA before the list of launches captured in the module itself
    called = [c for c in module.computations.values() if "command_buffer" in c.name]
    note = (
        "XLA wrote no list of its launches" if not called else "counted in the module"
    )
    sizes = [len(c.instructions) for c in called]
    return CommandBufferReport(tuple(sizes), {}, note)
