"""Finds a benchmark by the name of its operator: `rms_norm` is norm/rms_norm.py."""

import importlib
import pkgutil
from types import ModuleType

import benchmarks


def names() -> dict[str, str]:
    """{name: module}: of the benchmarks in this folder and in the families'."""
    found = {}
    for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks."):
        name = module.name.rpartition(".")[2]
        if not module.ispkg and not name.startswith(("_", "peer_")):
            found[name] = module.name
    return found


def benchmark(name: str) -> ModuleType:
    return importlib.import_module(names()[name])
