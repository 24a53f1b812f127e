"""Tests, benchmarks and docs name what exists.

A test of the full run or of a GPU may name a module in a string, as a page does in a
command: after a move nothing else would say that the name is of the past.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

import jaxkern
from benchmarks._find import names

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
SOURCES = [
    path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
]
DOTTED = re.compile(r"(?<![\w./@-])jaxkern(?:\.[A-Za-z_]\w*)+")
MISSPELT = {"jaxkern.trains"}  # by a test of the error that says so
COMMAND = re.compile(r"\bpython -m ((?:jaxkern|tests|benchmarks)[\w.]*)(?: (\w+))?")


@functools.cache
def text(path: Path) -> str:
    return path.read_text()


@functools.cache
def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


@functools.cache
def top_level(module: str) -> set[str]:
    """The names that a module binds, read without importing it."""
    if module == "jaxkern":
        return {*dir(jaxkern), *jaxkern.__all__}
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        return set()
    found = {"__path__"} if path.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return found


def exists(dotted: str) -> bool:
    """Whether it is a module, or one followed by a name that this module binds."""
    parts = dotted.split(".")
    count = 1
    while count < len(parts) and is_module(".".join(parts[: count + 1])):
        count += 1
    return count == len(parts) or parts[count] in top_level(".".join(parts[:count]))


def unknown_names(said: str) -> set[str]:
    return {name for name in DOTTED.findall(said) if not exists(name)} - MISSPELT


def unknown_commands(said: str) -> set[str]:
    """An argument in capitals, as in `python -m benchmarks NAME`, stands for any."""
    found, known = set(), {"", *names()}
    for module, argument in COMMAND.findall(said):
        if not is_module(module.rstrip(".")):
            found.add(module)
        elif module == "benchmarks" and not (argument.isupper() or argument in known):
            found.add(f"{module} {argument}")
    return found


@pytest.mark.parametrize("unknown", [unknown_names, unknown_commands])
def test_what_is_named_exists(unknown):
    for path in [*SOURCES, *PAGES]:
        found = unknown(text(path)) if path != Path(__file__) else set()
        assert not found, f"{path.relative_to(ROOT)} names {found}: which do not exist."


def test_a_name_of_the_past_is_found():
    for name in ("jaxkern.rms_norm", "jaxkern.lowering.cuda.KERNELS", "jaxkern.triton"):
        assert not unknown_names(f'"{name}"')
    for name in ("jaxkern.rms_nrom", "jaxkern.lowering.later", "jaxkern.gpu.device.no"):
        assert unknown_names(f"`{name}`") == {name}
    start = "python -m benchmarks"
    said = f"{start} rms_norm, {start} NAME, {start} rms_nrom, python -m tests.nothing"
    assert unknown_commands(said) == {"benchmarks rms_nrom", "tests.nothing"}
