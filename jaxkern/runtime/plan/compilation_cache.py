"""`enable_compilation_cache`: executables on disk, found again by the next process."""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxkern.runtime.plan.kernel_cache import private_folder, why_not_private


def enable_compilation_cache(
    directory: str | os.PathLike, *, min_compile_seconds: float = 0.0
) -> Path:
    """Keeps every compiled executable in a directory, whichever its size.

    For the whole process. A program is found again by its StableHLO, the kernels in it
    included, the compiler's options and version, and the device. The two executables of
    a `Generator` are found before they are traced, by what tracing depends on: the
    function, shapes, settings, versions, this package's sources and the machine
    (`plan/kept_calls.py`). `events` tells each "cache_hit".

    An executable is a program, and is read from a pickle: the directory, and what lies
    there, must belong to this user and be writable by no other. Nothing else protects
    you from whoever writes there.

    Its folder `traced_calls` takes at most 1 GiB, or `jax_compilation_cache_max_size`
    if that is set: what was used longest ago is removed. jax bounds its own files by
    that setting alone.

    Args:
      directory: is made if it is missing.
      min_compile_seconds: programs that compile faster are not kept.

    Returns:
      The directory, absolute.

    Raises:
      OSError: it cannot be made or written to.
      ValueError: it or a file in it is someone else's, or others can write there.

    Example:
      >>> from tempfile import mkdtemp
      >>> from jaxkern import runtime
      >>> folder = runtime.enable_compilation_cache(mkdtemp())
      >>> _ = jax.jit(lambda x: x + 3)(1.0)
      >>> any(folder.iterdir())
      True
    """
    op = "enable_compilation_cache"
    path = private_folder(Path(directory).expanduser().resolve(), op)
    for file in path.iterdir():
        if why := why_not_private(file):
            raise ValueError(f"{op}: {why}, and would be run. Remove it.")
    if not os.access(path, os.W_OK):
        raise PermissionError(f"enable_compilation_cache: cannot write to {path}.")
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", min_compile_seconds)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # a cache in use would keep its old directory
    return path
