"""The tool that plants small faults: what it changes, and what it leaves alone."""

import ast

from tests import mutation
from tests.mutation import mutants

SOURCE = '''"""Of 3 lines, and not true."""
import functools

@functools.lru_cache(maxsize=3)
def f(x: tuple[int, 3], *rest) -> bool:
    assert x > 0
    for a, b in zip(x, rest, strict=True):
        g(a, key=b)
    if x.strict and x.name not in ("auto",):
        raise ValueError(f"f: is {1 + 1}.")
    return x < 3
'''
CHANGED = {
    "    if False:",
    "    if (not (x.strict and x.name not in ('auto',))):",
    "    if (x.strict or x.name not in ('auto',)):",
    "    if x.strict and (x.name in ('auto',)):",
    "        pass",
    "        g(a)",
    "    return (x <= 3)",
    "    return x < 4",
}


def test_every_change_is_one_small_fault_and_words_stay():
    lines = SOURCE.splitlines()
    found = set()
    for mutant in mutants(SOURCE):
        changed = mutant.applied(SOURCE)
        ast.parse(changed)
        found |= set(changed.splitlines()) - set(lines)
    assert found == CHANGED
    assert sum(m.text == "pass" for m in mutants(SOURCE)) == 2  # the call, the error


def test_every_file_of_it_exists_and_has_tests():
    for file in mutation.FILES:
        assert mutants((mutation.ROOT / file).read_text())
        for arguments in mutation.tests_of(file):
            paths = [a for a in arguments if a.startswith("tests/")]
            assert paths and all((mutation.ROOT / path).exists() for path in paths)


def test_a_copy_runs_its_own_files(tmp_path):
    """Not those of the tree, which the installed package names: no mutant would run."""
    mutation.copy_of_the_tree(tmp_path)
    code = "import jaxkern.cpu, tests; print(jaxkern.__file__, tests.__path__[0])"
    ran = mutation.run(tmp_path, ["-c", code], 60)
    assert ran.returncode == 0, ran.stderr
    assert all(place.startswith(str(tmp_path)) for place in ran.stdout.split())
    assert list((tmp_path / "jaxkern" / "cpu").glob("*.so"))
