"""Writes the figures of docs/design/house.md: sizes of files and functions.

python docs/house_table.py
"""

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "design" / "house.md"
BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->\n"
BEFORE = {  # as counted on 21 November 2026, before files had their present places
    "lines a file": "145, 303, 397",
    "lines a function": "8, 35, 303",
    "parameters": "3, 8, 49",
    "parameters outside kernels": "",
    "documented / typed functions": "50 / 58 %",
    "comment lines": "1.9 %",
    "exact copies of six lines": "5.5 %",
    "import circles": "4",
    "Triton files of an op's family and name": "28 of 81",
    "Mosaic files of an op's family and name": "1 of 34",
}
type Function = ast.FunctionDef | ast.AsyncFunctionDef


def files() -> list[Path]:
    return sorted(
        p for d in ("jaxkern", "benchmarks") for p in (ROOT / d).rglob("*.py")
    )


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function.__value__):
            yield node


def three(numbers: list[int]) -> str:
    """Median, 90th percentile, maximum."""
    tenth = statistics.quantiles(numbers, n=10)[8]
    return f"{statistics.median(numbers):.0f}, {tenth:.0f}, {max(numbers)}"


def parameters(f: Function) -> int:
    a = f.args
    return len([*a.posonlyargs, *a.args, *a.kwonlyargs])


def is_typed(f: Function) -> bool:
    a = f.args
    given = [x for x in (*a.posonlyargs, *a.args, *a.kwonlyargs) if x.arg != "self"]
    return f.returns is not None and all(x.annotation for x in given)


def is_kernel(f: Function) -> bool:
    """Compiled by Triton, for whose compiler a constant is a parameter."""
    return any("jit" in ast.unparse(d) for d in f.decorator_list)


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


def copies() -> str:
    """As `tests/test_copies.py` counts them, of the library and benchmarks alone."""
    from tests.test_copies import code, copied

    found = {str(p): code(p.read_text()) for p in files()}
    lines = sum(map(len, copied(found).values()))
    return share(lines, sum(map(len, found.values())))


def named_after_an_op(backend: str) -> str:
    """Files in a folder of a family whose file or folder is called as an operator."""
    from jaxkern.primitives.kernel_primitive import REGISTRY

    ops = {p.reference.__module__.rpartition(".")[2] for p in REGISTRY.values()}
    ops |= set(REGISTRY)
    folder = ROOT / "jaxkern" / backend
    kernels = [p for p in folder.rglob("*.py") if p.stem != "__init__"]
    named = [p for p in kernels if {p.stem, p.parent.name} & ops]
    return f"{len(named)} of {len(kernels)}"


def figures() -> dict[str, str]:
    texts = [p.read_text().splitlines() for p in files()]
    every = [f for p in files() for f in functions(p)]
    lines = [line.strip() for text in texts for line in text]
    documented = sum(ast.get_docstring(f) is not None for f in every)
    typed = share(sum(map(is_typed, every)), len(every))
    plain = [parameters(f) for f in every if not is_kernel(f)]
    return {
        "lines a file": three([len(text) for text in texts]),
        "lines a function": three([f.end_lineno - f.lineno + 1 for f in every]),
        "parameters": three(list(map(parameters, every))),
        "parameters outside kernels": three(plain),
        "documented / typed functions": f"{share(documented, len(every))} / {typed}",
        "comment lines": share(sum(x.startswith("#") for x in lines), len(lines)),
        "exact copies of six lines": copies(),
        "import circles": "0, by `lint-imports`",
        "Triton files of an op's family and name": named_after_an_op("triton"),
        "Mosaic files of an op's family and name": named_after_an_op("pallas"),
    }


def main() -> None:
    rows = ["| | before | now |\n|---|---|---|\n"]
    rows += [f"| {k} | {BEFORE[k]} | {v} |\n" for k, v in figures().items()]
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + "".join(rows) + END + after)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
