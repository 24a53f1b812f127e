"""Where Triton interprets kernels: python -m tests.triton.interpreter_process

It reads names of files of tests, each with a name of what they print into and marks of
those that run. A fork of it runs them, which has imported already what takes longer
than most tests; then it prints their exit code.
"""

import importlib
import os
import sys

import pytest

SLOW_TO_IMPORT = "jaxkern.gpu.triton_call", "triton.runtime.interpreter"


def run_tests(file: str, printed: str, marks: str) -> None:
    """Ends the process."""
    code = 1
    try:
        out = os.open(printed, os.O_WRONLY)
        os.dup2(out, sys.stdout.fileno())
        os.dup2(out, sys.stderr.fileno())
        code = pytest.main(["-q", "-p", "no:cacheprovider", "-m", marks, file])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def main() -> None:
    for name in SLOW_TO_IMPORT:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            run_tests(*line.rstrip("\n").split("\t"))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
