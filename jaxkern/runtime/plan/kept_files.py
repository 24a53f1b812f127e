"""The files of compiled calls: what is in them, what is read, when they are removed.

A file is one of `saved_plan.py` with two parts: the results' shapes, a pickle, and the
machine code, which jax reads from a pickle too. Either can do anything. So a file is
opened only if it is this user's own and no other could have written it, and unpickled
only if its checksums are right and it was written for this call.
"""

import contextlib
import logging
import os
import pickle
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxkern.lowering.machine import versions
from jaxkern.runtime.plan.kernel_cache import why_not_private
from jaxkern.runtime.plan.load import load_machine_code
from jaxkern.runtime.plan.saved_plan import machine_code_of, read_parts, write_parts
from jaxkern.runtime.trace.events import FOUND_UNTRACED

PARTS = "shapes", "machine_code"
MOST_BYTES = 1 << 30  # of all files, where jax's cache is given no size
# by which Mosaic, where it is imported, tells its library where its files are
OF_MOSAIC = re.compile("MOSAIC_GPU_(CUDA_ROOT|RUNTIME_LIB_PATH|NVSHMEM_[BCSO]+_PATH)")
log = logging.getLogger("jaxkern")


class Found(NamedTuple):
    """A file that has been read and checked, whose program is not loaded yet."""

    file: Path
    shapes: Any
    machine_code: bytes
    variables: dict[str, str]


def read(file: Path) -> Found | None:
    """What a file has, or None where there is none or none that may be run."""
    if not os.path.lexists(file):
        return None
    try:
        if why := why_not_private(file):
            raise ValueError(f"{why}: it is not run.")
        header, parts = read_parts(file, PARTS)
        if header.get("call") != file.stem:
            raise ValueError(f"{file} was written for another call.")
        variables = checked_variables(file, header.get("variables"))
        shapes = unpickled(file, parts["shapes"])
    except (ValueError, OSError) as error:
        anew(error)
        return None
    return Found(file, shapes, parts["machine_code"], variables)


def checked_variables(file: Path, found: Any) -> dict[str, str]:
    """Those of the environment that a file sets: Mosaic's, and texts."""
    pairs = found.items() if isinstance(found, dict) else [("", None)]
    for name, value in pairs:
        if not OF_MOSAIC.fullmatch(name) or not isinstance(value, str):
            raise ValueError(f"{file} is damaged: its variables.")
    return found


def unpickled(file: Path, data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:  # what a pickle raises
        raise ValueError(f"{file} is damaged: its shapes: {error}") from error


def anew(error: Exception) -> None:
    log.warning("jaxkern traces and compiles a call anew: %s", error)


def loaded(found: Found, function: Any, arguments: tuple) -> jax.stages.Compiled | None:
    """The executable of a jitted function, or None where it does not load."""
    for name, value in found.variables.items():
        os.environ.setdefault(name, value)
    try:
        operands = jax.tree.structure((arguments, {}))
        results = jax.tree.structure(found.shapes)
        code = found.machine_code
        compiled, seconds = load_machine_code(found.file, code, operands, results)
        os.utime(found.file)  # it is used: others are removed first
    except (ValueError, OSError) as error:
        anew(error)
        return None
    name = f"jit({function.__name__})"
    jax.monitoring.record_event_duration_secs(FOUND_UNTRACED, seconds, fun_name=name)
    return compiled


def write(file: Path, shapes: Any, compiled: jax.stages.Compiled) -> None:
    """Writes a call whole or not at all, then removes what there is no room for."""
    code, why_not = machine_code_of(compiled)
    if not code:
        log.debug("jaxkern keeps no traced call: %s", why_not)
        return
    try:
        variables = {k: v for k, v in os.environ.items() if OF_MOSAIC.fullmatch(k)}
        header = {"made_by": versions(), "call": file.stem, "variables": variables}
        parts = {"shapes": pickle.dumps(shapes), "machine_code": code}
        write_parts(file, header, parts)
        forget_oldest(file.parent, most_bytes())
    except Exception as error:  # a full disk, what cannot be pickled
        log.warning("jaxkern keeps no traced call: %s", error)


def most_bytes() -> int:
    """Of all files: as many as jax's cache may have, which -1 does not say."""
    of_jax = jax.config.jax_compilation_cache_max_size
    return MOST_BYTES if of_jax < 0 else of_jax


def forget_oldest(folder: Path, most: int) -> None:
    """Removes the files that were used longest ago, until `most` bytes are left."""
    files = []
    for file in folder.glob("*.call*"):  # with those that a killed process left behind
        with contextlib.suppress(FileNotFoundError):  # another process removes too
            files.append((file.stat().st_mtime, file.stat().st_size, file))
    left = sum(size for _, size, _ in files)
    for _, size, file in sorted(files):
        if left <= most:
            return
        file.unlink(missing_ok=True)
        left -= size
