"""Executables by what they compute: compiled once, shared, open to inspection.

    cache = KernelCache("cache_of_my_model")     # or KernelCache(), in memory alone
    kernel = cache.get_or_compile(f, x, y)
    kernel(x, y)
    kernel.source("ptx")

Functions that lower to the same program share an executable. jax's own persistent cache
(`jax_compilation_cache_dir`) is the same idea below `jax.jit`; this one shows what it
holds. The functions of this module work on one cache for the whole process.
"""

import dataclasses
import functools
import hashlib
import json
import os
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.interpreters import partial_eval

from jaxkern.lowering.machine import machine, versions
from jaxkern.runtime.plan.load import load_machine_code
from jaxkern.runtime.plan.plan import Plan
from jaxkern.runtime.plan.record import Lowered, lower
from jaxkern.runtime.plan.saved_plan import (
    machine_code_of,
    read_parts,
    write_parts,
    written,
)
from jaxkern.runtime.plan.symbolic_plan import SymbolicPlan
from jaxkern.runtime.plan.triton_launch import TritonLaunch, triton_launch

HIT = "/jaxkern/kernel_cache/hits"
MISS = "/jaxkern/kernel_cache/misses"
COMPILE = "/jaxkern/kernel_cache/compile_seconds"


@dataclasses.dataclass(frozen=True)
class CachedKernel:
    """A compiled function with all that is known of it; call it as the function.

    Slots count the flat arguments, then the flat results.

    Attributes:
      key: SHA-256 that it is cached under.
      program: the `Plan`.
      variables: open sizes with their bounds, if it was compiled for one of them.
      from_disk: read from the cache's folder, not compiled.
    """

    key: str
    program: Plan
    variables: dict[str, tuple[int, int]]
    from_disk: bool

    def __call__(self, *args, **kwargs):
        return self.program(*args, **kwargs)

    @property
    def device(self) -> str:
        """Such as "cpu:0"."""
        return f"{self.program.platform}:{self.program.device.id}"

    @property
    def entry_point(self) -> str:
        """Name of the computation that a call runs."""
        return self.program.module.entry.name

    @property
    def globals(self) -> tuple[int, ...]:
        """All slots, in the order of the call."""
        return tuple(range(self._arguments + len(self._jaxpr.outvars)))

    @functools.cached_property
    def ins(self) -> tuple[int, ...]:
        """Slots that are read: the arguments that the results depend on."""
        _, used = partial_eval.dce_jaxpr(self._jaxpr, [True] * len(self._jaxpr.outvars))
        return tuple(slot for slot, is_used in enumerate(used) if is_used)

    @property
    def outs(self) -> tuple[int, ...]:
        """Slots that are written: results, and arguments whose buffers they take."""
        results = range(self._arguments, len(self.globals))
        return (*sorted(self.aliases.values()), *results)

    @functools.cached_property
    def aliases(self) -> dict[int, int]:
        """{slot of a result: slot of the donated argument whose buffer it takes}."""
        module = self.program.module
        parameters = sum(i.opcode == "parameter" for i in module.entry.instructions)
        # jax drops the arguments that nothing depends on
        slots = self.ins if parameters == len(self.ins) else range(self._arguments)
        return {
            self._arguments + sum(entry.integers(1)): slots[entry.integer(2)]
            for entry in module.aliases
        }

    @property
    def host_parallel_safe(self) -> bool:
        """No effects: calls may run at once, in any order."""
        return not self._jaxpr.effects

    @functools.cached_property
    def launches(self) -> tuple[TritonLaunch, ...]:
        """Triton launches, in order."""
        found = (triton_launch(i) for i in self.program.module.schedule())
        return tuple(launch for launch in found if launch is not None)

    @property
    def global_size(self) -> tuple[int, int, int] | None:
        """Programs along three axes; None unless it is exactly one Triton launch."""
        return self.launches[0].grid if len(self.launches) == 1 else None

    @property
    def local_size(self) -> tuple[int, int, int] | None:
        """Threads of one program, likewise."""
        if len(self.launches) != 1:
            return None
        return 32 * self.launches[0].num_warps, 1, 1

    @property
    def cost(self) -> dict[str, float]:
        """XLA's estimate: "flops", "bytes accessed", ..."""
        return dict(self.program.compiled.cost_analysis() or {})

    def source(self, level: str) -> str:
        """The program at a level, from what was traced to what runs.

        Args:
          level: "jaxpr", "stablehlo", "hlo" (optimised), "ttir" or "ptx". The last two
            are those of its Triton kernels, each under its name.

        Raises:
          ValueError: an unknown level, or no Triton kernel.
        """
        if level not in ("ttir", "ptx"):
            return self.program.source(level)
        if not self.launches:
            raise ValueError(
                f"kernel_cache: {self.entry_point} has no {level}: no Triton kernel."
            )
        return "\n".join(
            f"// {launch.name}\n{getattr(launch, level)}" for launch in self.launches
        )

    @property
    def _jaxpr(self) -> Any:
        assert self.program.stage is not None
        return self.program.stage.traced.jaxpr.jaxpr

    @property
    def _arguments(self) -> int:
        return len(self._jaxpr.invars)


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """What a cache did.

    Attributes:
      hits: executables that were there, in memory or in the folder.
      from_disk: of these, those read from the folder.
      misses: executables compiled.
      dropped: of these, those that another thread had inserted first.
      unreadable: files of the folder that were damaged, another user's or writable by
        others, and were written anew.
      unwritten: executables that the folder did not take: they are in memory alone.
      compile_seconds: of all misses.
    """

    hits: int = 0
    from_disk: int = 0
    misses: int = 0
    dropped: int = 0
    unreadable: int = 0
    unwritten: int = 0
    compile_seconds: float = 0.0


class KernelCache:
    """Executables by content, safe under threads: the first that is inserted stays.

    Args:
      folder: keeps the machine code between processes; None for memory alone. Machine
        code is a program: the folder must belong to this user and be writable by no
        other.

    Raises:
      ValueError: the folder is someone else's, or others can write there.
    """

    def __init__(self, folder: str | Path | None = None):
        self.folder = None if folder is None else private_folder(Path(folder))
        self.kernels: dict[str, CachedKernel] = {}
        self.counts = CacheStats()
        self.lock = threading.Lock()

    def get_or_compile(
        self,
        f: Callable,
        *specs: Any,
        donate: int | Sequence[int] = (),
        compiler_options: dict[str, Any] | None = None,
        command_buffers: str = "auto",
        bounds: dict[str, tuple[int, int]] | None = None,
        sizes: dict[str, int] | None = None,
    ) -> CachedKernel:
        """The executable of a function, compiled unless one like it is there.

        Tracing is not saved, since it finds the key. Threads that miss at once each
        compile; the first insert wins, and all get that kernel.

        Args:
          f, specs, donate, compiler_options, command_buffers: of `compile`.
          bounds, sizes: open sizes as for `compile`, and those of this kernel.
        """
        if bounds is not None:
            symbolic = SymbolicPlan(f, specs, bounds, {})
            specs = symbolic.specs_at(symbolic.checked(sizes or {}))
        stage = lower(f, specs, donate, compiler_options, command_buffers)
        key = key_of(stage, specs)
        with self.lock:
            found = self.kernels.get(key)
            if found is not None:
                self.count(hits=1)
                return found
        plan, from_disk = self.read(key, stage), True
        if plan is None:
            plan, from_disk = Plan.of(stage), False
        kernel = CachedKernel(key, plan, dict(bounds or {}), from_disk)
        with self.lock:
            kept = self.kernels.setdefault(key, kernel)
            if from_disk:
                self.count(hits=1, from_disk=1)
            else:
                seconds = plan.compile_seconds
                self.count(
                    misses=1, dropped=kept is not kernel, compile_seconds=seconds
                )
        if kept is kernel and not from_disk:
            self.write(key, plan)
        return kept

    def stats(self) -> CacheStats:
        """Counts since the cache was made."""
        return self.counts

    def entries(self) -> tuple[CachedKernel, ...]:
        """All kernels, the oldest first."""
        with self.lock:
            return tuple(self.kernels.values())

    def clear(self) -> None:
        """Forgets the kernels in memory; the folder stays."""
        with self.lock:
            self.kernels.clear()

    def count(self, **more: float) -> None:
        """Adds to the counts, and tells the listeners of `jax.monitoring`."""
        fields = {name: getattr(self.counts, name) + n for name, n in more.items()}
        self.counts = dataclasses.replace(self.counts, **fields)
        if more.get("hits"):
            jax.monitoring.record_event(HIT)
        if more.get("misses"):
            jax.monitoring.record_event(MISS)
            jax.monitoring.record_event_duration_secs(COMPILE, more["compile_seconds"])

    def file(self, key: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{key}.kernel"

    def read(self, key: str, stage: Lowered) -> Plan | None:
        file = self.file(key)
        if file is None or not file.exists():
            return None
        try:
            if why := why_not_private(file):
                raise ValueError(f"kernel_cache: {why}: it is not run.")
            _, parts = read_parts(file, ("machine_code",))
            trees = stage.lowered.in_tree, stage.lowered.out_tree
            return Plan(*load_machine_code(file, parts["machine_code"], *trees), stage)
        except (ValueError, OSError):
            with self.lock:
                self.count(unreadable=1)
            return None

    def write(self, key: str, plan: Plan) -> None:
        file = self.file(key)
        if file is None or plan.devices != {jax.devices()[0]}:
            return  # a file is read back for the first device
        code, _ = machine_code_of(written(plan))
        if not code:  # some executables cannot be serialized: they stay in memory
            return
        try:
            write_parts(file, {"made_by": versions()}, {"machine_code": code})
        except OSError:  # a full disk, say: the executable runs all the same
            with self.lock:
                self.count(unwritten=1)


def private_folder(path: Path, op: str = "kernel_cache") -> Path:
    """The folder, made if it is missing, if only this user can put files there.

    Raises:
      ValueError: it belongs to another user, or others can write there, or can put
        another folder in its place.
    """
    path = path.expanduser()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not hasattr(os, "getuid"):
        return path
    if path.stat().st_uid != os.getuid():
        raise ValueError(f"{op}: {path} belongs to another user.")
    if why := why_not_private(path.resolve()):
        raise ValueError(f"{op}: {why}, and what lies there is run. chmod go-w {path}")
    for parent in path.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ValueError(
                f"{op}: others can put another folder in the place of {path}, and what "
                f"lies there is run. chmod o-w {parent}"
            )
    return path


def why_not_private(path: Path) -> str | None:
    """Why another user could have written a file or a folder's files, or None."""
    if not hasattr(os, "getuid"):
        return None
    status = path.lstat()
    if status.st_uid != os.getuid():
        return f"{path} belongs to another user"
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a link"
    # a file in a folder that others cannot enter they cannot write
    is_file = stat.S_ISREG(status.st_mode)
    entered = path.parent.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH)
    if (entered or not is_file) and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to {path}"
    return None


def key_of(stage: Lowered, specs: tuple) -> str:
    """SHA-256 of StableHLO, device, versions, options, and how arguments are nested.

    In the text a callback is a number: what has one shares with its own trace alone.
    """
    program = stage.lowered.as_text()
    trace = id(stage.traced.jaxpr) if "callback" in program else None
    device = jax.config.jax_default_device or jax.devices()[0]
    # an array that is not committed runs where the others do
    leaves = [x for x in jax.tree.leaves(specs) if getattr(x, "committed", True)]
    placed = [getattr(x, "sharding", None) for x in leaves]
    parts = (
        program,
        trace,
        str(device),
        machine(device) if isinstance(device, jax.Device) else None,
        sorted({str(s) for s in placed if s is not None}),
        versions(),
        stage.options,
        os.environ.get("XLA_FLAGS"),
        str(stage.lowered.in_tree),
        str(stage.lowered.out_tree),
    )
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


_process = KernelCache()
get_or_compile = _process.get_or_compile
stats = _process.stats
entries = _process.entries
clear = _process.clear
