"""Finds a benchmark by the name of its operator: `rms_norm` is norm/rms_norm.py."""

import importlib
import pkgutil
import re
from types import ModuleType

import benchmarks


def names() -> dict[str, str]:
    """{name: module}: of the benchmarks in this folder and in the families'."""
    found = {}
    for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks."):
        name = module.name.rpartition(".")[2]
        private = "._" in module.name or name.startswith("peer_")
        if not module.ispkg and not private:
            found[name] = module.name
    return found


def benchmark(name: str) -> ModuleType:
    return importlib.import_module(names()[name])


def owner(name: str) -> tuple[str, str]:
    """(family, op) of a benchmark by its name: sample_top_p is of sampling/sample."""
    found = [op for op in names() if name == op or re.match(rf"{op}[ _,]", name)]
    if not found:
        raise ValueError(f"{name}: no benchmark's name begins so: begin with its op's.")
    op = max(found, key=len)
    return names()[op].split(".")[1], op
