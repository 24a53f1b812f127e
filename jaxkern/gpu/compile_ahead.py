"""Kernels compiled by processes beside this one, before lowering asks for them.

Between `Compilers.ask` for a launch and the end of the block, `launch.compiled` waits
for the process that has the kernel, and then finds it in Triton's cache on disk. What
is there already is not asked for, and starts no process. A third of what Triton does is
Python, of which threads would do one thing at a time: the two executables of a model of
8B have 21 kernels, 15 seconds of a processor.
"""

import contextlib
import hashlib
import importlib
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from jaxkern.gpu.launch import Launch, compilation, elsewhere

LEAST, MOST = 3, 12  # processes, of 300 MB each; fewer begin too late to help
NO_BYTES = ValueError, TypeError, AttributeError, pickle.PicklingError


def num_processes() -> int:
    """As many as there are processors for beside this process, 0 on a small machine."""
    count = min(len(os.sched_getaffinity(0)) - 1, MOST)
    return count if count >= LEAST else 0


class Compilers:
    """Up to `count` processes that compile kernels while the block runs."""

    def __init__(self, count: int) -> None:
        from triton.runtime.cache import triton_key

        self.threads = ThreadPoolExecutor(count)  # each has one process
        # Triton reads itself first, 500 MB, to know what its cache is of
        self.key = self.threads.submit(triton_key)
        self.own = threading.local()
        self.processes: list[subprocess.Popen] = []
        self.asked: list[tuple[Launch, int]] = []

    def __enter__(self) -> "Compilers":
        return self

    def __exit__(self, *_: object) -> None:
        for key in self.asked:
            elsewhere.pop(key, None)
        for process in self.processes:  # Triton moves whole files into its cache
            process.kill()
        self.threads.shutdown(cancel_futures=True)
        for process in self.processes:
            process.communicate()

    def ask(self, launch: Launch, capability: int) -> None:
        """Compiles it elsewhere, unless it is on disk or has been asked for."""
        self.key.result()
        key = launch._replace(grid=()), capability
        if key in elsewhere or is_on_disk(*key):
            return
        with contextlib.suppress(*NO_BYTES):
            elsewhere[key] = self.threads.submit(self.compile, as_bytes(*key))
            self.asked.append(key)

    def compile(self, question: bytes) -> None:
        process = self.process()
        assert process.stdin and process.stdout
        process.stdin.write(question)
        process.stdin.flush()
        process.stdout.readline()

    def process(self) -> subprocess.Popen:
        """That of this thread."""
        if not hasattr(self.own, "process"):
            path = os.pathsep.join(filter(None, sys.path))
            self.own.process = subprocess.Popen(
                [sys.executable, "-c", f"import {__name__} as own; own.answer()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
            )
            self.processes.append(self.own.process)
        return self.own.process


def is_on_disk(launch: Launch, capability: int) -> bool:
    """Whether Triton's cache has it."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import get_cache_key, make_backend
    from triton.runtime.cache import get_cache_manager

    source, target, options = compilation(launch, capability)
    backend = make_backend(target)
    options = backend.parse_options({**options, **source.parse_options()})
    variables = get_cache_invalidating_env_vars()
    key = get_cache_key(source, backend, options, env_vars=variables)
    folder = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return folder.get_group(f"{source.name[:150]}.json") is not None


def as_bytes(launch: Launch, capability: int) -> bytes:
    """The kernel by name; raises a ValueError where that does not lead to it."""
    module, name = launch.kernel.__module__, launch.name
    if module == "__main__" or vars(sys.modules[module]).get(name) is not launch.kernel:
        raise ValueError(f"compile_ahead: {name} is not found in {module}.")
    return pickle.dumps((module, name, launch._replace(kernel=None), capability))


def answer() -> None:
    """Compiles what comes at the input, a line of output for each."""
    import triton

    with contextlib.suppress(EOFError):
        while True:
            module, name, launch, capability = pickle.load(sys.stdin.buffer)
            kernel = getattr(importlib.import_module(module), name)
            with contextlib.suppress(Exception):  # who asked meets it again
                launch = launch._replace(kernel=kernel)
                triton.compile(*compilation(launch, capability))
            print(flush=True)
