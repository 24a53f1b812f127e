"""The cases of every declared op, which stand in the op's own test file."""

import importlib

from jaxkern.primitives.family import KernelPrimitive
from jaxkern.testing.checks import Case


def cases_of(p: KernelPrimitive) -> list[Case]:
    """CASES of the op's own test file: a list, or a dict by op name."""
    package, _, name = p.reference.__module__.rpartition(".")
    module = importlib.import_module(
        f"{package.replace('jaxkern', 'tests', 1)}.test_{name}"
    )
    cases = module.CASES
    return cases[p.name] if isinstance(cases, dict) else cases
