"""Compiled calls on disk, found before they are traced.

jax's persistent cache finds an executable by its program, which tracing and lowering
make first. Here it is found by what tracing depends on: `fingerprint.py` writes the
function and its operands, `surroundings.py` all else. The files lie in a folder of that
cache, and only where a user has chosen one.
"""

import functools
import hashlib
import logging
import os
import pickle
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxkern.cpu import cpu_call
from jaxkern.gpu import chain_library
from jaxkern.lowering.machine import versions
from jaxkern.runtime.plan.fingerprint import (
    NotUnderstoodError,
    described,
    described_operands,
)
from jaxkern.runtime.plan.kernel_cache import private_folder, why_not_private
from jaxkern.runtime.plan.load import load_machine_code
from jaxkern.runtime.plan.saved_plan import machine_code_of, read_parts, write_parts
from jaxkern.runtime.plan.surroundings import surroundings

FOLDER = "traced_calls"
FOUND = "/jaxkern/traced_calls/found"  # events of jax.monitoring
PARTS = "shapes", "machine_code"
MOSAIC = "MOSAIC_GPU_"
log = logging.getLogger("jaxkern")


class Found(NamedTuple):
    """A file that has been read and checked, whose program is not loaded yet."""

    file: Path
    shapes: Any
    machine_code: bytes
    variables: dict[str, str]


class KeptCalls:
    """Looks calls up while a model starts, and keeps those that were not there.

    Where jax has no persistent cache, or its folder is not this user's alone, nothing
    is found and nothing kept. A file that is damaged, or that others could have
    written, is told to the log and written anew.
    """

    def __init__(self) -> None:
        self.folder = folder()
        self.files: dict[Any, Path | None] = {}
        self.found: dict[Any, Found | None] = {}

    def shapes(self, function: Any, arguments: tuple) -> Any:
        """Of the results of a jitted function, which is traced if it must be."""
        if found := self.find(function, arguments):
            return found.shapes
        return jax.eval_shape(function, *arguments)

    def find(self, function: Any, arguments: tuple) -> Found | None:
        """The file of a call, read once."""
        if function not in self.files:
            file = self.files[function] = self.file(function, arguments)
            self.found[function] = file and read(file)
        return self.found[function]

    def load_all(
        self, calls: Mapping[str, tuple[Any, tuple]]
    ) -> dict[str, jax.stages.Compiled]:
        """The executables that are kept, loaded beside each other."""
        every = [(name, self.find(*call), call[1]) for name, call in calls.items()]
        files = [(name, found, args) for name, found, args in every if found]
        if not files:
            return {}
        register_handlers()
        with ThreadPoolExecutor(len(files)) as threads:
            loads = [(n, threads.submit(loaded, *rest)) for n, *rest in files]
        every = [(name, load.result()) for name, load in loads]
        return {name: executable for name, executable in every if executable}

    def keep(self, function: Any, compiled: Any, shapes: Any, seconds: float) -> None:
        """Writes what took as long to compile as jax's cache asks for."""
        file = self.files[function]
        if file and seconds >= jax.config.jax_persistent_cache_min_compile_time_secs:
            writer.submit(write, file, shapes, compiled)

    @functools.cached_property
    def around(self) -> str:
        return surroundings()

    def file(self, function: Any, arguments: tuple) -> Path | None:
        """Where a call is or will be, None for one that is not understood."""
        if self.folder is None:
            return None
        try:
            called = described(function.__wrapped__), described_operands(arguments)
            text = "\n".join((self.around, *called))
        except NotUnderstoodError as error:
            log.debug("jaxkern keeps no traced call: %s is not understood.", error)
            return None
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()}.call"


def folder() -> Path | None:
    """Where calls are kept, which only this user can write to; None for nowhere."""
    path = jax.config.jax_compilation_cache_dir
    if not path or "://" in path or not jax.config.jax_enable_compilation_cache:
        return None
    try:
        return private_folder(Path(path).expanduser().resolve() / FOLDER)
    except (ValueError, OSError) as error:
        log.warning("jaxkern keeps no traced calls: %s", error)
        return None


def read(file: Path) -> Found | None:
    """What a file has, if it is whole and this user's own."""
    if not file.exists():
        return None
    try:
        if why := why_not_private(file):
            raise ValueError(f"{why}: it is not run.")
        header, parts = read_parts(file, PARTS)
        shapes = pickle.loads(parts["shapes"])
    except Exception as error:  # what a pickle raises
        anew(error)
        return None
    return Found(file, shapes, parts["machine_code"], header["variables"])


def anew(error: Exception) -> None:
    log.warning("jaxkern traces and compiles a call anew: %s", error)


def loaded(found: Found, arguments: tuple) -> jax.stages.Compiled | None:
    """The executable, or None where it does not load."""
    for name, value in found.variables.items():
        os.environ.setdefault(name, value)
    operands = jax.tree.structure((arguments, {}))
    results = jax.tree.structure(found.shapes)
    try:
        code = found.machine_code
        compiled, _ = load_machine_code(found.file, code, operands, results)
    except ValueError as error:
        anew(error)
        return None
    jax.monitoring.record_event(FOUND)
    return compiled


def register_handlers() -> None:
    """Makes the calls of this package's libraries known to XLA, as lowering does."""
    cpu_call.library()
    if jax.default_backend() == "gpu" and chain_library.library():
        chain_library.missing_library()


def write(file: Path, shapes: Any, compiled: jax.stages.Compiled) -> None:
    """Writes a call whole or not at all; one that cannot be written is left out."""
    code, why_not = machine_code_of(compiled)
    if not code:
        log.debug("jaxkern keeps no traced call: %s", why_not)
        return
    # Mosaic, where it is imported, tells its library by them where its files are
    variables = {k: v for k, v in os.environ.items() if k.startswith(MOSAIC)}
    header = {"made_by": versions(), "variables": variables}
    try:
        parts = {"shapes": pickle.dumps(shapes), "machine_code": code}
        write_parts(file, header, parts)
    except (OSError, pickle.PicklingError) as error:
        log.warning("jaxkern keeps no traced call: %s", error)


# a file is written while the program goes on, which waits for it when it ends
writer = ThreadPoolExecutor(1)
