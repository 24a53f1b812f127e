"""`python -m tests.mutation FILE...`: which small faults of a file no test notices.

A mutant is the file with one thing changed: a condition negated or never true, a
comparison or an operator swapped, a number or a truth changed, a keyword argument or a
statement left out. Some of them are drawn (--limit, --seed), each is tried in a copy of
the tree with the tests that concern its file, and what survives is printed: a test is
missing there, or the change means nothing. docs/design/mutation.md has the last score.

Not changed are docstrings, annotations, decorators, the words of an error, and what
only asserts: `assert` and zip's `strict=`.
"""

import argparse
import ast
import dataclasses
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOADERS = "tests/models/test_llama.py", "tests/models/test_hugging_face.py"
MANY_OPS = ["tests/test_every_op.py", "-k", "dynamic_tanh or l2_norm or swiglu-plain"]
# files, and the pytest arguments that concern them: the quickest to fail come first
TESTS = {
    "jaxkern/primitives": [
        ["tests/primitives/test_kernel_primitive.py"],
        ["tests/primitives/norm/test_rms_norm.py", "tests/test_planted_faults.py"],
        ["tests/primitives/test_leafwise_primitive.py", "tests/lowering/test_lower.py"],
        MANY_OPS,
    ],
    "jaxkern/lowering/apple": [["tests/lowering/apple"]],
    "jaxkern/lowering": [["tests/lowering", "--ignore=tests/lowering/apple"], MANY_OPS],
    "jaxkern/formats": [
        ["tests/formats", "tests/models/test_architecture_keys.py"],
        [*LOADERS, "-k", "refus or hostile"],
        ["tests/models/test_command_line.py"],
    ],
}
FILES = [
    *(
        f"jaxkern/primitives/{name}.py"
        for name in ("call", "rules", "kernel_primitive", "declared_dims")
    ),
    *(
        f"jaxkern/lowering/{name}.py"
        for name in ("explain", "kernel_table", "lower", "sharded_call")
    ),
    *(
        f"jaxkern/lowering/apple/{name}.py"
        for name in ("findings", "fused", "portable", "samples", "selftest", "wire")
    ),
    *(
        f"jaxkern/formats/{name}.py"
        for name in (
            "architecture_keys",
            "gguf",
            "gguf_header",
            "gguf_report",
            "printable",
            "safetensors",
            "weight_memory",
        )
    ),
]
SWAPPED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`source[start:stop]` replaced by `text`; `line` counts from 1."""

    start: int
    stop: int
    text: str
    line: int

    def applied(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.stop :]

    def described(self, source: str) -> str:
        before = " ".join(source[self.start : self.stop].split())
        return f"{self.line}: {before[:90]} -> {' '.join(self.text.split())[:90]}"


def mutants(source: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    encoded = source.encode()

    def position(line: int, column: int) -> int:  # ast counts columns in bytes
        return len(encoded[: starts[line - 1] + column].decode())

    found = {
        Mutant(
            position(old.lineno, old.col_offset),
            position(old.end_lineno, old.end_col_offset),
            text,
            old.lineno,
        )
        for old, text in changes(ast.parse(source))
    }
    return sorted(found, key=lambda m: (m.start, m.stop, m.text))


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """(what is replaced, by what) at `node` and below it."""
    if isinstance(node, ast.Assert):
        return
    yield from changes_of(node)
    kept = "annotation", "returns", "decorator_list", "exc"
    if is_zip(node):
        kept = ("keywords",)
    for name, value in ast.iter_fields(node):
        if name in kept:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from changes(child)


def changes_of(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield test, "False"
            if not is_negated_by_a_swap(test):
                yield test, f"(not ({ast.unparse(test)}))"
        case ast.comprehension(ifs=tests):
            for test in tests:
                yield test, "True"
        case ast.Compare(left=left, ops=[op], comparators=right):
            swapped = ast.Compare(left, [SWAPPED[type(op)]()], right)
            yield node, f"({ast.unparse(swapped)})"
        case ast.BoolOp(op=op, values=values):
            swapped = ast.BoolOp(SWAPPED[type(op)](), values)
            yield node, f"({ast.unparse(swapped)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPPED:
            swapped = ast.BinOp(left, SWAPPED[type(op)](), right)
            yield node, f"({ast.unparse(swapped)})"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)):
            yield node, str(value + 1)
        case ast.Call(func=f, args=args, keywords=keywords) if not is_zip(node):
            for keyword in keywords:
                if keyword.arg is not None:
                    rest = [k for k in keywords if k is not keyword]
                    yield node, ast.unparse(ast.Call(f, args, rest))
        case ast.Expr(value=ast.Constant()):
            pass  # a docstring
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Continue():
            yield node, "pass"
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield node, "pass"


def is_zip(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "zip"


def is_negated_by_a_swap(test: ast.expr) -> bool:
    inverse = ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], inverse)


# An installed package is found ahead of any path.
FORGET_THE_INSTALLED = """import sys
sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
"""


def copy_of_the_tree(folder: Path) -> None:
    """With the C++ kernels as they are installed; `run` imports what is there."""
    (folder / "sitecustomize.py").write_text(FORGET_THE_INSTALLED)
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    installed = Path(sysconfig.get_path("purelib"))
    built = [str(p.relative_to(installed)) for p in installed.glob("jaxkern/*/*.so")]
    every = [(ROOT, n) for n in names.stdout.splitlines()]
    for root, name in [*every, *((installed, name) for name in built)]:
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)


def run(folder: Path, arguments: Sequence[str], seconds: float) -> Any:
    """Python in the copy, on the copy."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def tests_of(file: str) -> list[list[str]]:
    return next(t for place, t in TESTS.items() if file.startswith(place))


def outcome(folder: Path, file: str, seconds: float) -> str:
    """ "survived", or what noticed the mutant that is in `folder`."""
    end = time.monotonic() + seconds
    for arguments in tests_of(file):
        command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-m", "not full and not gpu", *arguments]
        try:
            ran = run(folder, command, max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "too slow"
        if ran.returncode:
            lines = ran.stdout.splitlines()
            failed = [x for x in lines if x.startswith(("FAILED", "ERROR"))]
            return "killed by " + " ".join(failed[:1] or lines[-1:])[:110]
    return "survived"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("files", nargs="*", default=FILES, help="default: all of FILES")
    parser.add_argument("--limit", type=int, default=12, help="mutants of a file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=900, help="for one mutant")
    parser.add_argument("--match", default="", help="only mutants with this text")
    parser.add_argument("--list", action="store_true", help="names them, runs nothing")
    options = parser.parse_args(arguments)
    survived = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not options.list:
            copy_of_the_tree(folder)
            for file in {tests_of(file)[0][0]: file for file in options.files}.values():
                if (said := outcome(folder, file, options.seconds)) != "survived":
                    raise SystemExit(f"without a mutant {file} is {said}")
        for file in options.files:
            source = (ROOT / file).read_text()
            every = [m for m in mutants(source) if options.match in m.described(source)]
            draw = random.Random(f"{options.seed} {file}")
            drawn = draw.sample(every, min(options.limit, len(every)))
            print(f"{file}: {len(drawn)} of {len(every)} mutants", flush=True)
            for mutant in drawn:
                said = ""
                if not options.list:
                    (folder / file).write_text(mutant.applied(source))
                    said = outcome(folder, file, options.seconds)
                    (folder / file).write_text(source)
                survived += said == "survived"
                print(f"  {mutant.described(source)}  {said}", flush=True)
    return min(survived, 1)


if __name__ == "__main__":
    sys.exit(main())
