"""`enable_compilation_cache`: executables on disk, found again by the next process."""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def enable_compilation_cache(
    directory: str | os.PathLike, *, min_compile_seconds: float = 0.0
) -> Path:
    """Keeps every compiled executable in a directory, whichever its size.

    For the whole process. A program is found again by its StableHLO, the kernels in it
    included, the compiler's options and version, and the device. `events` tells each
    "cache_hit".

    Args:
      directory: is made if it is missing.
      min_compile_seconds: programs that compile faster are not kept.

    Returns:
      The directory, absolute.

    Raises:
      OSError: it cannot be made or written to.
    """
    path = Path(directory).expanduser().resolve()
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise PermissionError(f"enable_compilation_cache: cannot write to {path}.")
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", min_compile_seconds)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # a cache in use would keep its old directory
    return path
