"""The cases of every declared op, which stand in the op's own test file."""

import importlib
import sys
from pathlib import Path

from jaxkern.primitives.family import KernelPrimitive
from jaxkern.testing.checks import Case

ROOT = Path(__file__).parents[1]


def cases_of(p: KernelPrimitive) -> list[Case]:
    """CASES of the op's own test file: a list, or a dict by op name.

    Raises:
      LookupError: that file is missing, or has none.
    """
    package, _, name = p.reference.__module__.rpartition(".")
    path = f"{package.replace('jaxkern', 'tests', 1)}.test_{name}"
    file = f"{path.replace('.', '/')}.py"
    if path not in sys.modules and not (ROOT / file).is_file():
        raise LookupError(f"{p.name} has no {file}: add it, with CASES of the op.")
    cases = getattr(importlib.import_module(path), "CASES", None)
    if cases is None or (isinstance(cases, dict) and p.name not in cases):
        raise LookupError(f"{path} has no CASES of {p.name}: add some.")
    return cases[p.name] if isinstance(cases, dict) else cases
