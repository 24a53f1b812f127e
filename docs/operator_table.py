"""Writes docs/operators.md from docs/operators/*.toml and the declared primitives.

python docs/operator_table.py
"""

import importlib
import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxkern
from jaxkern.lowering.lower import rows_on
from jaxkern.primitives.family import KernelPrimitive
from jaxkern.primitives.kernel_primitive import REGISTRY

FOLDER = Path(__file__).parent / "operators"
PLATFORMS = "cpu", "cuda", "mps"
TABLE = Path(__file__).parent / "operators.md"
ORIGINS = {
    "mlx-native": "mlx-native, the Metal operators",
    "rlx": "rlx, the thunks",
    "ztensor": "ztensor, the compute engine",
    "mlx-native-graph": "mlx-native, the recorded graph",
    "svod": "svod, the cached kernel and its execution plan",
}
HEAD = """# Operators

What each operator of the origin systems is called here, how it is differentiated, and
what it runs on. Every operator under `jaxkern` that computes is a primitive: it
differentiates in both modes to any order, batches, checkpoints, shards under plain
`jit`, and lowers on every platform. `jaxkern.explain(f, *args)` says which
implementation runs in your function.

Gradient: "own" is a backward formula of the operator, which a kernel can take over;
"linear" means that the transpose is the operator's own; "reference" that JAX
differentiates the reference; "composed" that the function is made of operators with
gradients; "JAX" that the function is JAX's. A kernel stands with the platform that has
one; elsewhere, and where XLA is as fast, the reference runs: `explain` says why. "mps":
the fused kernels of jax-mps, where it is installed; see docs/apple.md.

Conventions that differ between systems are arguments, or are fixed as in this table:

| question | here |
|---|---|
| a window of W | the last W keys, the query's own position included |
| causal with t < s | bottom right: the last query sees the last key; `q_offset` says otherwise |
| a row without a visible key | zeros, lse = -inf, zero gradients |
| order of the scores | scale, softcap, bias and mask, softmax in float32; `SoftcapAfterBias` caps after the bias |
| query head to key head | block: i // g |
| partial rotary | the first `rotary_dim` dims, pairs `rotary_dim / 2` apart; `pair_offset`, `freq_dim`, `at_end` for others |
| decay of the delta rule | logarithms, g <= 0 |
| ties in argmax, top_k, argsort | the smaller index |
| an id out of range in an embedding or a gather | zeros, or the nearest with "clip" |
| a number for temperature 0 | argmax |

This file is written by `python docs/operator_table.py` from `docs/operators/*.toml`.
"""


def rows() -> Iterator[dict[str, Any]]:
    """Every row of every family, with `call` as a list."""
    for file in sorted(FOLDER.glob("*.toml")):
        for row in tomllib.loads(file.read_text())["row"]:
            call = row["call"]
            calls = [call] if isinstance(call, str) else call
            yield {**row, "call": calls, "family": file.stem}


def resolve(path: str) -> Any:
    """The object at a dotted path such as "jax.numpy.add"."""
    parts = path.split(".")
    for k in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:k]))
        except ModuleNotFoundError:
            continue
        for name in parts[k:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


def primitives_of(path: str) -> list[KernelPrimitive]:
    """The primitive of a function's name, else those that its file declares."""
    function = resolve(path)
    module = getattr(inspect.unwrap(function), "__module__", "")
    declared = [p for p in REGISTRY.values() if p.reference.__module__ == module]
    return [p for p in declared if p.name == function.__name__] or declared


def gradient(path: str) -> str:
    if not path.startswith("jaxkern."):
        return "JAX"
    if path.startswith("jaxkern.runtime."):
        return "-"
    found = primitives_of(path)
    if not found:
        return "composed"
    kinds = {gradient_of(p) for p in found}
    return " / ".join(sorted(kinds))


def gradient_of(p: KernelPrimitive) -> str:
    floats = [a.name for a in p.operands if a.is_float]
    if not floats or not any(r.is_float for r in p.results):
        return "none"
    if p.bwd is None:
        return "reference"
    return f"linear in {', '.join(p.linear)}" if p.linear else "own"


def kernels(path: str) -> str:
    found = {
        f"{platform} ({row.backend}{', backward' if not any(rows_on(p, x) for x in PLATFORMS) else ''})"
        for p in primitives_of(path)
        for member in (p, p.bwd)
        if member is not None
        for platform in PLATFORMS
        for row in rows_on(member, platform)
    }
    return ", ".join(sorted(found)) or "-"


def table() -> str:
    lines = [HEAD]
    every = list(rows())
    for origin, title in ORIGINS.items():
        lines += [f"## {title}\n"]
        lines += ["| family | origin name | call | gradient | kernels | tested in | |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for row in every:
            if row["origin"] == origin:
                lines.append(line(row))
        lines.append("")
    return "\n".join(lines)


def line(row: dict[str, Any]) -> str:
    names = ", ".join(f"`{n}`" for n in row["names"])
    calls = ", ".join(f"`{c.removeprefix('jaxkern.')}`" for c in row["call"])
    own = [c for c in row["call"] if c.startswith("jaxkern.")]
    slopes = " / ".join(dict.fromkeys(gradient(c) for c in row["call"]))
    run = ", ".join(dict.fromkeys(k for c in own if (k := kernels(c)) != "-"))
    test = f"`{row['test'].removeprefix('tests/')}`" if row["test"] else "-"
    cells = [row["family"], names, calls or "not built", slopes or "-", run or "-"]
    return "| " + " | ".join([*cells, test, row["note"].replace("|", "\\|")]) + " |"


if __name__ == "__main__":
    assert jaxkern.__all__  # imported for its primitives
    TABLE.write_text(table())
