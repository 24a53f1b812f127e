"""An operator is one row of files of the same name; this says which one is missing.

primitives/norm/rms_norm.py             what it means
triton/norm/rms_norm.py  (or rms_norm/) how it runs fast, likewise in pallas/ and cpu/
tests/primitives/norm/test_rms_norm.py  how we know, and tests/gpu/norm/ of its kernels
benchmarks/norm/rms_norm.py             how fast it is, where a GPU has a kernel
"""

import ast
import re
from pathlib import Path

import pytest

from jaxkern.lowering import cpu, cuda
from jaxkern.primitives.kernel_primitive import REGISTRY
from jaxkern.primitives.leafwise_primitive import LEAFWISE

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxkern"
LINES = [*cpu.KERNELS, *cuda.KERNELS]
BACKENDS = "triton", "pallas", "cpu"


def place(name: str) -> tuple[str, str]:
    """(family, file) of an op."""
    p = REGISTRY[name] if name in REGISTRY else LEAFWISE[name].op
    _, _, family, file = p.reference.__module__.split(".")
    return family, file


PLACES = sorted(
    {
        place(p.name)
        for p in REGISTRY.values()
        if p.reference.__module__.startswith("jaxkern.")
    }
)
ON_A_GPU = sorted({place(line.op) for line in cuda.KERNELS})


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.module}-{line.op}")
def test_a_kernel_is_under_its_ops_family_and_name(line):
    family, file = place(line.op)
    backend, *rest = line.module.split(".")
    assert backend in BACKENDS
    assert rest[0] == family and {file, line.op} & {*rest[1:]}, (
        f"{line.op} is declared in primitives/{family}/{file}.py: move its kernel to "
        f"{backend}/{family}/{file}.py, or into the folder {backend}/{family}/{file}/."
    )
    path = PACKAGE.joinpath(*line.module.split(".")).with_suffix(".py")
    assert path.is_file(), f"{line.op}: no {path.relative_to(ROOT)}: write it there."


@pytest.mark.parametrize("family, file", PLACES)
def test_an_op_has_its_test(family, file):
    path = ROOT / "tests" / "primitives" / family / f"test_{file}.py"
    assert path.is_file(), (
        f"{family}/{file}.py has no {path.relative_to(ROOT)}: add it."
    )


@pytest.mark.parametrize("family, file", ON_A_GPU)
def test_an_op_with_a_gpu_kernel_has_its_benchmark(family, file):
    path = ROOT / "benchmarks" / family / f"{file}.py"
    assert path.is_file(), (
        f"{family}/{file}.py has a kernel but no {path.relative_to(ROOT)}: add it."
    )


@pytest.mark.parametrize("family, file", ON_A_GPU)
def test_an_op_with_a_gpu_kernel_is_tested_on_a_gpu(family, file):
    """In a file of its own, or by its name in that of a neighbour."""
    path = ROOT / "tests" / "gpu" / family / f"test_{file}.py"
    named = (
        re.search(rf"\b{file}\b", other.read_text())
        for other in path.parent.glob("test_*.py")
    )
    assert path.is_file() or any(named), (
        f"{family}/{file}.py has a kernel but no {path.relative_to(ROOT)}: add it."
    )


@pytest.mark.parametrize("family", sorted({family for family, _ in ON_A_GPU}))
def test_a_gpu_test_bears_the_name_of_its_op(family):
    """test_rms_norm.py, or test_rms_norm_mosaic.py for one of its kernels."""
    ops = {file for f, file in PLACES if f == family} | ROOMS.get(family, set())
    ops |= {line.op for line in cuda.KERNELS if place(line.op)[0] == family}
    for path in (ROOT / "tests" / "gpu" / family).glob("test_*.py"):
        name = path.stem.removeprefix("test_")
        assert any(name == op or name.startswith(f"{op}_") for op in ops), (
            f"{path.relative_to(ROOT)} bears the name of no op of {family}: name it "
            "after the op that it tests, one file for each."
        )


@pytest.mark.parametrize("folder", [*BACKENDS, "gpu", "lowering", "primitives"])
def test_every_file_says_first_what_it_is(folder):
    for path in (PACKAGE / folder).rglob("*.py"):
        text = path.read_text()
        if path.name != "__init__.py" or text:
            said = ast.get_docstring(ast.parse(text))
            assert said, f"{path.relative_to(ROOT)} has no docstring: say what it is."


def test_a_family_has_one_name_everywhere():
    families = {p.name for p in (PACKAGE / "primitives").iterdir() if p.is_dir()}
    families.discard("__pycache__")
    for backend in BACKENDS:
        folders = {p.name for p in (PACKAGE / backend).iterdir() if p.is_dir()}
        extra = folders - families - {"__pycache__"} - SHARED_PARTS[backend]
        assert not extra, f"{backend}/ has {extra}, which no family of primitives/ is."


def test_a_binding_of_cpp_is_beside_its_kernel():
    """jaxkern/cpu/*.cc are of the library as a whole, */*.cc bind one kernel."""
    shared = {path.name for path in (PACKAGE / "cpu").glob("*.cc")}
    assert shared == {"best_kernels.cc", "kernels.cc"}
    for path in (PACKAGE / "cpu").glob("*/*.cc"):
        assert path.with_suffix(".py").is_file(), f"{path.name} has no {path.stem}.py."


ROOMS = {"attention": {"decode_attention"}}  # of few queries, for several ops
SHARED_PARTS = {"triton": set(), "pallas": {"rows"}, "cpu": set()}  # of two families


def functions(path):
    """(name, lines without the docstring, parameters, whether Triton compiles it)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node):
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            a = node.args
            parameters = len([*a.posonlyargs, *a.args, *a.kwonlyargs])
            compiled = {ast.unparse(d) for d in node.decorator_list} & COMPILERS
            yield node.name, lines, parameters, bool(compiled)


def test_functions_are_short_and_take_few_parameters():
    """But a kernel, which takes what its launch has."""
    for path in PACKAGE.rglob("*.py"):
        for name, lines, parameters, compiled in functions(path):
            at = f"{path.relative_to(ROOT)}: {name}"
            assert lines <= MOST_LINES, (
                f"{at} has {lines} lines, more than {MOST_LINES}: cut it into stages."
            )
            assert compiled or parameters <= MOST_PARAMETERS, (
                f"{at} takes {parameters} parameters, more than {MOST_PARAMETERS}: "
                "those that belong together are one record."
            )


MOST_LINES, MOST_PARAMETERS = 120, 15
COMPILERS = {"jit", "gluon_jit"}
