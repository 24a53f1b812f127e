"""The C++ kernels for 64-bit ARM, from any machine: compiled, and run where QEMU is.

pip install ziglang          # or g++-aarch64-linux-gnu
apt-get install qemu-user    # without it the kernels are compiled, not executed
"""

import importlib.util
import shutil
import subprocess
import sys

import jax.ffi
import pytest

from tests.cpu.test_sanitizers import BINDINGS, CPU, HERE, assert_errors

ZIG = ("-target", "aarch64-linux-musl", "-mcpu=generic+v8_2a+dotprod")
GCC = ("-march=armv8.2-a+dotprod",)
FLAGS = (
    "-std=c++17",
    "-O1",
    "-ffp-contract=fast",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-DJAXKERN_ISA=neon",
    '-DJAXKERN_ISA_NAME="neon"',
    "-static",
)


def compiler() -> list[str]:
    """A command that compiles C++ for 64-bit ARM under Linux."""
    if gcc := shutil.which("aarch64-linux-gnu-g++"):
        return [gcc, *GCC, *FLAGS]
    if zig := shutil.which("zig"):
        return [zig, "c++", *ZIG, *FLAGS]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++", *ZIG, *FLAGS]
    pytest.skip("no compiler for aarch64")


def compiled(*arguments: str) -> None:
    built = subprocess.run([*compiler(), *arguments], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr


@pytest.mark.full
@pytest.mark.parametrize("source", BINDINGS, ids=lambda path: path.stem)
def test_a_binding_compiles(source, tmp_path):
    """Found by their place: a list of four files by name lacked a fifth."""
    headers = ("-isystem", jax.ffi.include_dir())
    compiled(*headers, "-c", str(source), "-o", str(tmp_path / "binding.o"))


@pytest.mark.full
def test_kernels_compile_and_run_in_an_emulator(tmp_path):
    program = tmp_path / "harness"
    sources = (str(HERE / "harness.cc"), str(CPU / "kernels.cc"))
    compiled(*sources, "-lpthread", "-o", str(program))
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("compiled, not executed: there is no qemu-aarch64")
    run = subprocess.run([emulator, str(program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert_errors(run.stdout)
