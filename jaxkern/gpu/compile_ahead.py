"""Kernels compiled by processes beside this one, before lowering asks for them.

Between `Compilers.ask` for a launch and the end of the block, `launch.compiled` waits
for the process that has the kernel, and then finds it in Triton's cache on disk; what
is there already is not asked for. A third of what Triton does is Python, of which
threads would do one thing at a time: the two executables of a model of 8B have 21
kernels, 15 seconds of a processor.

One process (`compiling_process.py`) imports this package while functions are traced,
and forks for each kernel. It has no thread that a fork could leave behind.
"""

import contextlib
import hashlib
import importlib
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from jaxkern.gpu.compiling_process import end
from jaxkern.gpu.launch import Launch, compilation, elsewhere

# of a kernel that another process does not find by name, or of its constants
NO_BYTES = ValueError, TypeError, AttributeError, pickle.PicklingError


class Compilers:
    """Has kernels compiled while the block runs, by a `compiling_process`."""

    def __init__(self, process: subprocess.Popen) -> None:
        from triton.runtime.cache import triton_key

        self.process = process
        self.asked: list[tuple[tuple[Launch, int], Future]] = []
        self.has_ended = False
        self.lock = threading.Lock()  # of the two above
        self.threads = ThreadPoolExecutor(2)
        # Triton reads itself, 500 MB, to know what its cache is of
        self.key = self.threads.submit(triton_key)
        self.threads.submit(self.listen)

    def __enter__(self) -> "Compilers":
        return self

    def __exit__(self, *_: object) -> None:
        end(self.process)  # `listen` reads to the end of its answers
        self.threads.shutdown()
        for key, _future in self.asked:
            elsewhere.pop(key, None)

    def ask(self, launch: Launch, capability: int) -> None:
        """Compiles it elsewhere, unless it is on disk or has been asked for."""
        self.key.result()
        key = launch._replace(grid=()), capability
        if key in elsewhere or is_on_disk(*key):
            return
        with contextlib.suppress(*NO_BYTES), self.lock:
            question = as_bytes(len(self.asked), *key)
            if not self.has_ended:
                elsewhere[key] = Future()
                self.asked.append((key, elsewhere[key]))
                self.send(question)

    def send(self, question: bytes) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # `listen` sees that it has ended
            self.process.stdin.write(question)
            self.process.stdin.flush()

    def listen(self) -> None:
        """Says of each kernel when it is done, and of all when no more will be."""
        assert self.process.stdout
        try:
            for line in self.process.stdout:
                self.asked[int(line)][1].set_result(None)
        finally:
            with self.lock:
                self.has_ended = True
            for _, future in self.asked:
                if not future.done():
                    future.set_result(None)


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


def as_bytes(number: int, launch: Launch, capability: int) -> bytes:
    """The kernel by name; raises a ValueError where that does not lead to it."""
    module, name = launch.kernel.__module__, launch.name
    if module == "__main__" or vars(sys.modules[module]).get(name) is not launch.kernel:
        raise ValueError(f"compile_ahead: {name} is not found in {module}.")
    launch = launch._replace(kernel=None)
    return pickle.dumps((number, module, name, launch, capability))


def answer(count: int) -> None:
    """Compiles what comes at the input, up to `count` kernels at a time."""
    running = 0
    with contextlib.suppress(EOFError):
        while True:
            number, module, *kernel = pickle.load(sys.stdin.buffer)
            with contextlib.suppress(Exception):  # here for all, or met again there
                importlib.import_module(module)
            if running == count:
                os.wait()
                running -= 1
            if os.fork() == 0:
                with contextlib.suppress(Exception):  # who asked meets it again
                    compile_here(module, *kernel)
                with contextlib.suppress(OSError):  # who asked has ended
                    os.write(sys.stdout.fileno(), f"{number}\n".encode())
                os._exit(0)
            running += 1


def compile_here(module: str, name: str, launch: Launch, capability: int) -> None:
    import triton

    kernel = getattr(importlib.import_module(module), name)
    triton.compile(*compilation(launch._replace(kernel=kernel), capability))
