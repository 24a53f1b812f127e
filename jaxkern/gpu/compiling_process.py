"""The process in which `compile_ahead.py` has kernels compiled.

It takes a second to import this package and Triton, so it begins before anything else
of a start does: nothing here imports Triton. It has no GPU. It ends when a start does,
so it collects no garbage: collections would walk all of jax.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

MOST = 12  # kernels at a time
BEGIN = """
import gc
import threading
gc.disable()
from triton.runtime.cache import triton_key
key = threading.Thread(target=triton_key)
key.start()
from jaxkern.gpu.compile_ahead import answer
key.join()
answer({count})
"""


def most_processes() -> int:
    """As many as there are processors, 0 where there is but one."""
    if not sys.executable or getattr(sys, "frozen", False):  # not an interpreter
        return 0
    count = min(len(os.sched_getaffinity(0)), MOST)
    return count if count > 1 else 0


@contextlib.contextmanager
def compiling_process(count: int) -> Iterator[subprocess.Popen]:
    """One that compiles up to `count` kernels at a time while the block runs."""
    alone = {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
    alone["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN.format(count=count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | alone,
        process_group=0,
    )
    try:
        yield process
    finally:
        end(process)
        process.communicate()


def end(process: subprocess.Popen) -> None:
    """With all that it has forked."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
