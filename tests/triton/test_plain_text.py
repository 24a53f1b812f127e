"""Texts without the places of their source: the same machine code, less to carry."""

import re
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxkern import explain, rms_norm
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compute_capability
from jaxkern.gpu.launch import Launch, compilation, compiled, intermediate, triton
from jaxkern.gpu.plain_text import plain_assembly, plain_representation
from jaxkern.lowering.calls_ahead import TARGETS, calls_of
from jaxkern.runtime.plan.triton_launch import read_launch

SHAPES = {"triton": (4, 4096), "gluon": (4096, 128)}
with_triton = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)


def operands(kind):
    return jnp.ones(SHAPES[kind], jnp.bfloat16), jnp.ones(SHAPES[kind][1], jnp.bfloat16)


def kernel(kind):
    """A launch of `rms_norm`, and what Triton made of it."""
    rows = explain(rms_norm, *operands(kind), platform="cuda").rows
    [launch] = [launch for row in rows for launch in row.launches]
    assert isinstance(launch, Launch)
    assert launch.kernel.is_gluon() == (kind == "gluon")
    return launch, compiled(launch, compute_capability())


def machine_code(ptx, folder):
    """As the assembler makes it of a text, disassembled."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    source, code = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(ptx)
    [target] = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    subprocess.run([tools / "ptxas", f"-arch={target}", source, "-o", code], check=True)
    shown = [tools / "cuobjdump", "-sass", code]
    return subprocess.run(shown, check=True, capture_output=True, text=True).stdout


@with_triton
@pytest.mark.parametrize("kind", SHAPES)
def test_the_machine_code_is_the_same(kind, tmp_path):
    _, binary = kernel(kind)
    whole = binary.asm["ptx"]
    plain = plain_assembly(whole)
    assert len(plain) < len(whole) / 2
    assert not re.search(r"\.loc|\.file|\.debug_|//", plain)
    code = machine_code(plain, tmp_path)
    assert "EXIT" in code and code == machine_code(whole, tmp_path)


@with_triton
@pytest.mark.parametrize("kind", SHAPES)
def test_triton_reads_its_representation(kind, tmp_path):
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    launch, binary = kernel(kind)
    whole = intermediate(binary)
    plain = plain_representation(whole)
    assert not re.search(r"\bloc\(|#loc", plain) and len(plain) < len(whole)
    context = ir.context()
    ir.load_dialects(context)
    _, target, _ = compilation(launch, compute_capability())
    make_backend(target).load_dialects(context)
    texts = []
    for i, text in enumerate((whole, plain)):
        file = tmp_path / f"{i}.mlir"
        file.write_text(text)
        module = ir.parse_mlir_module(str(file), context)
        texts.append(plain_representation(str(module)))
    # names of values are in what is taken away
    assert texts[0].count("\n") == texts[1].count("\n")


@with_triton
def test_each_launch_carries_them():
    lowered = jax.jit(rms_norm).trace(*operands("triton"))
    module = lowered.lower(lowering_platforms=("cuda",)).compiler_ir()
    [(_, attributes)] = calls_of(module, TARGETS)
    escaped = "".join(f"\\{byte:02X}" for byte in attributes["opaque"])
    launch, (_, binary) = read_launch(escaped), kernel("triton")
    assert launch is not None and "tt.func" in launch.ttir
    assert launch.ptx == plain_assembly(binary.asm["ptx"])
    assert launch.ttir == plain_representation(intermediate(binary))


def test_strings_stay():
    line = '.global .b8 name[] = "a // b";  // c\n'
    assert plain_assembly(f"mov.u32 %r1, %r2;\t// d\n{line}") == (
        f"mov.u32 %r1, %r2;\n{line}"
    )
    asm = '%0 = tt.asm "mov loc(1); // x" {a = "\\"loc(2)"} : i32'
    assert plain_representation(f"{asm} loc(#loc1)\n") == f"{asm}\n"
    place = 'loc(callsite("f(x)"("a.py":1:2) at #loc3))'
    named = f'f(%x: i32 {place}, %y: i32 loc("y"(#loc)))'
    assert plain_representation(f'#loc = loc("a.py":1:2)\n{named}\n') == (
        "f(%x: i32, %y: i32)\n"
    )


@pytest.mark.parametrize("sign", [".target sm_90a, debug\n", "mov; /* // */ add;\n"])
def test_what_is_not_understood_stays(sign):
    text = f".version 8.7\n{sign}.loc 1 2 3  // why\n"
    assert plain_assembly(text) == text
