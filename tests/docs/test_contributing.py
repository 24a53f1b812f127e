"""CONTRIBUTING.md, followed: its blocks stand in the library, and make an operator."""

import ast
import re
import sys
import types
from pathlib import Path

import pytest

import jaxkern
from jaxkern.lowering import cuda
from jaxkern.lowering.apple.declared_sample import declared_sample
from jaxkern.lowering.apple.samples import Draw
from jaxkern.lowering.kernel_table import Kernel, row_of
from jaxkern.primitives.kernel_primitive import REGISTRY
from jaxkern.runtime.graph.op_kind import OpKind, kind_of_primitive
from jaxkern.testing.check_op import (
    EACH_CASE,
    EACH_FAMILY,
    EACH_SMALL_CASE,
    ON_MESHES,
    smallest_case,
)
from tests.cases import cases_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
BLOCK = re.compile(r"^`([\w./]+)`\n\n```(\w+)\n(.*?)```", re.MULTILINE | re.DOTALL)
BLOCKS = {path: (kind, code) for path, kind, code in BLOCK.findall(PAGE)}
OP = "jaxkern/primitives/norm/dynamic_tanh.py"
TEST = "tests/primitives/norm/test_dynamic_tanh.py"
TABLE = "jaxkern/lowering/cuda.py"
OWN = "contributed_tanh"  # the name that the page's operator has here


def statements(code):
    """The top level of a module, without docstrings."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.Module) and ast.get_docstring(node):
            node.body = node.body[1:]
    return [ast.unparse(node) for node in tree.body]


def test_the_page_has_every_step():
    assert set(BLOCKS) == {
        OP,
        "jaxkern/primitives/norm/__init__.py",
        TEST,
        "jaxkern/triton/norm/dynamic_tanh.py",
        TABLE,
        "tests/gpu/norm/test_dynamic_tanh.py",
        "benchmarks/norm/dynamic_tanh.py",
    }
    named = re.findall(r"`([\w./]+/[\w.]+\.(?:py|md|toml))`", PAGE)
    for path in named:
        assert (ROOT / path).is_file() or (ROOT / "jaxkern" / path).is_file(), path


@pytest.mark.parametrize("path", BLOCKS)
def test_a_block_stands_in_its_file(path):
    kind, code = BLOCKS[path]
    text = (ROOT / path).read_text()
    if kind == "text":
        assert set(code.splitlines()) <= set(text.splitlines())
    else:
        assert set(statements(code)) <= set(statements(text))


def as_module(name, path):
    """The page's block as a module, with the operator under a name of its own."""
    module = types.ModuleType(name)
    code = BLOCKS[path][1].replace("dynamic_tanh", OWN)
    sys.modules[name] = module
    exec(compile(code, f"CONTRIBUTING.md: {path}", "exec"), module.__dict__)
    return module


@pytest.fixture(scope="module")
def contributed():
    """What the steps of "Add an operator" leave: the operator and its test's module."""
    names = f"jaxkern.primitives.norm.{OWN}", f"tests.primitives.norm.test_{OWN}"
    try:
        module = as_module(names[0], OP)
        setattr(jaxkern, OWN, getattr(module, OWN))
        yield REGISTRY[OWN], as_module(names[1], TEST)
    finally:
        REGISTRY.pop(OWN, None)
        for name in names:
            sys.modules.pop(name, None)
        if hasattr(jaxkern, OWN):
            delattr(jaxkern, OWN)


def test_its_own_tests_pass(contributed):
    _, tests = contributed
    own = [f for name, f in vars(tests).items() if name.startswith("test_")]
    assert own
    for f in own:
        f()


@pytest.mark.parametrize(
    "check",
    [
        *EACH_CASE,
        *EACH_SMALL_CASE,
        *ON_MESHES,
        *EACH_FAMILY,
    ],
    ids=lambda check: check.__name__,
)
def test_it_passes_the_generic_checks(contributed, check):
    p, _ = contributed
    assert len(cases_of(p)) > 1
    check(p, smallest_case(p, cases_of(p)))


def test_it_has_a_kind_and_a_call_of_its_own(contributed):
    """Without a line in the tables of other folders."""
    p, _ = contributed
    assert kind_of_primitive(p) is OpKind.NORM
    f, operands = declared_sample(OWN, Draw())
    assert f(*operands).shape == operands[0].shape


def test_the_line_of_the_table_is_a_kernel_with_its_passes():
    [line] = eval(f"[{BLOCKS[TABLE][1]}]", {"Kernel": Kernel})
    assert line in cuda.KERNELS and line.op == "dynamic_tanh"
    for name in line.passes.split():
        row = row_of(REGISTRY[line.op], line, name)
        assert row.backend == "triton" and isinstance(row.slower, str)
        assert row.title.startswith("triton.norm.dynamic_tanh.")
