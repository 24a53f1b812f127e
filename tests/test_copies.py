"""Code stands once: few lines are in runs of six that stand elsewhere too.

Not counted are blank lines, imports, and lines that only name an operand, as in the
parameters of a function or a call with one a line: an op, its passes and its kernels
name the same ones, which is how they are declared.
"""

import collections
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN = 6
MOST = 0.006
NAMES = re.compile(
    r"(\*{0,2}[\w.]+(: [^=]+)?( ?= ?[\w.\"-]+)?|\*),"  # x, x: Float[...], eps=eps,
    r"|(\w+\[.*\])( \| None)?,"  # of a tuple of results
    r"|[()\[\]{}]+[,:]?|\) -> .*"
)


def code(text: str) -> list[str]:
    found, importing = [], False
    for line in map(str.strip, text.splitlines()):
        if importing or line.startswith(("import ", "#include", "from ")):
            importing = line.endswith("(") or (importing and ")" not in line)
        elif line and not NAMES.fullmatch(line):
            found.append(line)
    return found


def copied(files: dict[str, list[str]]) -> dict[str, set[int]]:
    """{file: lines of it that are in a run of RUN lines found elsewhere}."""
    places = collections.defaultdict(list)
    for name, lines in files.items():
        for k in range(len(lines) - RUN + 1):
            places[tuple(lines[k : k + RUN])].append((name, k))
    found = collections.defaultdict(set)
    for at in places.values():
        for name, k in at if len(at) > 1 else ():
            found[name].update(range(k, k + RUN))
    return found


def test_code_stands_once():
    files = {
        str(path.relative_to(ROOT)): code(path.read_text())
        for folder in ("jaxkern", "benchmarks", "tests")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".h", ".cc")
    }
    found = copied(files)
    share = sum(map(len, found.values())) / sum(map(len, files.values()))
    worst = sorted(found, key=lambda name: -len(found[name]))[:5]
    assert share < MOST, f"{share:.1%} of all lines are copies, most in {worst}"


def test_a_copy_is_found_and_a_list_of_operands_is_not_one():
    body = "\n".join(f"    x = f{k}(x) + {k}" for k in range(RUN))
    assert len(copied({"a": code(body), "b": code(f"y = 1\n{body}")})["b"]) == RUN
    assert not copied({"a": code(body), "b": code(body.replace("f3", "g"))})
    names = "def f(\n" + "".join(f"    x{k}: Array,\n" for k in range(RUN)) + ") -> X:"
    assert code(names) == ["def f("]
    assert code("from a import (\n    b,\n    c,\n)\nx = 1") == ["x = 1"]
