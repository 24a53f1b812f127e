"""Compiled calls on disk, found before they are traced.

jax's persistent cache finds an executable by its program, which tracing and lowering
make first. Here it is found by what tracing depends on: `fingerprint.py` writes the
function and its operands, `surroundings.py` all else. The files lie in a folder of that
cache, and only where a user has chosen one.
"""

import contextlib
import functools
import hashlib
import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxkern.runtime.plan.fingerprint import (
    NotUnderstoodError,
    described,
    described_function,
    described_operands,
)
from jaxkern.runtime.plan.kept_files import Found, loaded, read, write
from jaxkern.runtime.plan.kernel_cache import private_folder
from jaxkern.runtime.plan.made import Made
from jaxkern.runtime.plan.surroundings import check_unchanged, surroundings

FOLDER = "traced_calls"
UNCLEAR = NotUnderstoodError, OSError  # of a file of the package that cannot be read
log = logging.getLogger("jaxkern")


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
        self.unwritten: list[tuple[Path, Any, jax.stages.Compiled]] = []

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
        found = {name: self.find(*call) for name, call in calls.items()}
        with ThreadPoolExecutor() as threads:
            loads = {
                name: threads.submit(loaded, file, *calls[name])
                for name, file in found.items()
                if file
            }
        every = {name: load.result() for name, load in loads.items()}
        return {name: executable for name, executable in every.items() if executable}

    def has_file(self, function: Any) -> bool:
        """Whether a file lies where a call is kept: one that is not loaded is broken.

        What jax's cache has could not be written in its place.
        """
        file = self.files.get(function)
        return file is not None and os.path.lexists(file)

    def instead_of_jax(
        self, functions: Iterable[Any]
    ) -> contextlib.AbstractContextManager[None]:
        """jax's cache writes nothing meanwhile, if all of these will be kept here.

        It packs an executable before it gives it to anyone: a second for 20 MB.
        """
        if all(self.files.get(function) for function in functions):
            return jax_writes.stopped()
        return contextlib.nullcontext()

    def keep(self, function: Any, made: Made, shapes: Any) -> None:
        """Has `write` write a call that took as long as jax's cache asks for.

        One that jax's cache had is left to it (`made.py` says why).
        """
        file = self.files[function]
        if file and not made.was_read and made.seconds >= jax_writes.least_seconds():
            self.unwritten.append((file, shapes, made.executable))

    def write(self) -> None:
        """Writes what is kept while the program goes on, which waits where it ends.

        jax lets no other thread run Python while it serializes an executable.
        """
        while self.unwritten:
            call = self.unwritten.pop()
            try:
                writer.submit(write_unchanged, *call)
            except RuntimeError:  # the program ends
                write_unchanged(*call)

    @functools.cached_property
    def around(self) -> list[str]:
        return surroundings()

    def file(self, function: Any, arguments: tuple) -> Path | None:
        """Where a call is or will be, None for one that is not understood."""
        if self.folder is None:
            return None
        try:
            called = described_function(function), described_operands(arguments)
            text = described([*called, *self.around])
        except UNCLEAR as error:
            said(error)
            return None
        except Exception:  # nothing that is only kept for speed stops a start
            log.warning("jaxkern keeps no traced call.", exc_info=True)
            return None
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()}.call"


class JaxWrites:
    """What jax's cache writes: nothing while any start keeps its calls itself."""

    def __init__(self) -> None:
        self.lock, self.starts, self.least = threading.Lock(), 0, 0.0

    def least_seconds(self) -> float:
        """That a compilation takes which is worth a file."""
        with self.lock:
            if self.starts:
                return self.least
            return jax.config.jax_persistent_cache_min_compile_time_secs

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        name = "jax_persistent_cache_min_compile_time_secs"
        with self.lock:
            if not self.starts:
                self.least = getattr(jax.config, name)
                jax.config.update(name, math.inf)
            self.starts += 1
        try:
            yield
        finally:
            with self.lock:
                self.starts -= 1
                if not self.starts:
                    jax.config.update(name, self.least)


jax_writes = JaxWrites()


def said(error: Exception) -> None:
    log.debug("jaxkern keeps no traced call: %s is not understood.", error)


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


def write_unchanged(file: Path, shapes: Any, executable: jax.stages.Compiled) -> None:
    """Writes a call that what is installed would make again."""
    try:
        check_unchanged()
    except UNCLEAR as error:
        said(error)
    else:
        write(file, shapes, executable)


# a file is written while the program goes on, which waits for it when it ends
writer = ThreadPoolExecutor(1)
