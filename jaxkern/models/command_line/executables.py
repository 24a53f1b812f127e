"""Executables kept on disk between two runs of the command line."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxkern.runtime.plan.compilation_cache import enable_compilation_cache

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
LEAST_SECONDS = 0.2  # of compiling: small programs compile faster than they are read


def folder() -> Path:
    """`jaxkern/executables` where this user's caches are."""
    if home := os.environ.get("XDG_CACHE_HOME"):
        root = Path(home)
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = Path.home() / ".cache"
    return root / "jaxkern" / "executables"


@contextlib.contextmanager
def kept_executables(wanted: bool) -> Iterator[None]:
    """Keeps what is compiled meanwhile in `folder()`, which is the user's own: 0700.

    Where JAX has a folder already (JAX_COMPILATION_CACHE_DIR) it stays the one.

    Raises:
      ValueError: others can write to the folder, and what lies there is run.
      OSError: it cannot be made.
    """
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    if not wanted or before["jax_compilation_cache_dir"]:
        yield
        return
    try:
        path = folder()
        path.parent.mkdir(parents=True, exist_ok=True)
        enable_compilation_cache(path, min_compile_seconds=LEAST_SECONDS)
    except ValueError as error:
        raise ValueError(f"{error} Or use --no-cache.") from None
    except OSError as error:
        raise OSError(f"no folder for executables: {error}. Use --no-cache.") from None
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
