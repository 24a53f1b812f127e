"""Writes docs/reference/: a page for each family, of every public name's docstring.

Docstrings here are plain text: names in single quotes of code, formulas indented. What
means something else to Sphinx is translated when it reads them, not in the sources.
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxkern
import jaxkern.interop.flax
import jaxkern.interop.jax_nn
import jaxkern.interop.tokamax
import jaxkern.parallel
import jaxkern.runtime
import jaxkern.testing
import jaxkern.train

FAMILIES = {
    "norm": "Norms",
    "activation": "Activations",
    "rope": "Rotations",
    "attention": "Attention",
    "kv_cache": "Caches of keys and values",
    "linear": "Products",
    "quant": "Quantised weights",
    "moe": "Mixtures of experts",
    "delta_rule": "Delta rules, scans and convolutions of a sequence",
    "loss": "Losses",
    "optim": "Optimisers",
    "sampling": "Sampling",
    "index": "Indices and sorting",
    "turboquant": "TurboQuant",
    "vision": "Vision",
    "signal": "Signals",
}
TUNING = ("TunedCall", "Tuning", "autotune")
MODULES = ("events", "kernel_cache", "testing")  # of jaxkern.runtime
OTHERS = {
    "choice": (
        "Which kernel runs",
        [f"jaxkern.{n}" for n in ("backend", "explain", "tuned")]
        + [f"jaxkern.testing.{n}" for n in TUNING],
    ),
    "parallel": (
        "Over several devices",
        [f"jaxkern.{n}" for n in jaxkern.parallel.__all__],
    ),
    "train": ("Training", [f"jaxkern.train.{n}" for n in jaxkern.train.__all__]),
    "own": (
        "An operator of your own",
        [
            "jaxkern.lowering.lower.lower",
            "jaxkern.primitives.kernel_primitive.at_least_f32",
            "jaxkern.primitives.kernel_primitive.kernel_primitive",
        ],
    ),
    "testing": (
        "Checks and times of an operator",
        [f"jaxkern.testing.{n}" for n in jaxkern.testing.__all__ if n not in TUNING],
    ),
    "runtime": (
        "Compiled functions in view and in bounds",
        [f"jaxkern.runtime.{n}" for n in jaxkern.runtime.__all__ if n not in MODULES]
        + [f"jaxkern.runtime.testing.{n}" for n in jaxkern.runtime.testing.__all__],
    ),
    "interop": (
        "Under the names of other libraries",
        [
            f"{module.__name__}.{n}"
            for module in (
                jaxkern.interop.jax_nn,
                jaxkern.interop.flax,
                jaxkern.interop.tokamax,
            )
            for n in module.__all__
        ],
    ),
}
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Example):$")
ENTRY = re.compile(r"  (\w[\w., ]*): (.*)")
CODE = re.compile(r"(`[^`]+`)")


def pages() -> Iterator[tuple[str, str, list[str]]]:
    """File, title and public names of every page."""
    for family, title in FAMILIES.items():
        module = importlib.import_module(f"jaxkern.primitives.{family}")
        yield family, title, [f"jaxkern.{name}" for name in sorted(module.__all__)]
    for file, (title, names) in OTHERS.items():
        yield file, title, sorted(names)


def write(folder: Path) -> None:
    """The pages, in files that change only when what they say does; no others stay."""
    folder.mkdir(exist_ok=True)
    files = [f"{k:02d}_{file}.rst" for k, (file, _, _) in enumerate(pages())]
    for old in {*folder.glob("*.rst")} - {folder / name for name in files}:
        old.unlink()
    for page, (_, title, names) in zip(files, pages(), strict=True):
        lines = [title, "=" * len(title), ""]
        for name in names:
            lines += [directive(name), ""]
        path, text = folder / page, "\n".join(lines)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def directive(name: str) -> str:
    module, _, last = name.rpartition(".")
    found: Any = getattr(importlib.import_module(module), last)
    if inspect.isclass(found):
        return f".. autoclass:: {name}\n   :members:"
    if callable(found):
        return f".. autofunction:: {name}"
    return f".. autodata:: {name}\n   :no-value:"


def written_signature(
    app: Any, what: str, name: str, found: Any, options: Any, *signature: str | None
) -> tuple[str, str | None] | None:
    """The signature as the source has it: `Float[Array, "... d"]`, names unresolved."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(found)))
        [node] = ast.parse(source).body
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(node, ast.FunctionDef):
        return None
    if what == "method" and node.args.args[:1]:
        del node.args.args[0]
    result = as_read(node.returns) if node.returns else None
    return f"({as_read(node.args)})", result


def as_read(node: ast.AST) -> str:
    """The code of a node; the blank of one dim, " d", is there for linters alone."""
    return re.sub(r"Array, ' (?=\w+'])", "Array, '", ast.unparse(node))


def as_rst(
    app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]
) -> None:
    """Code in quotes, formulas as blocks, and no other mark-up, in place."""
    lines[:] = translated(lines)


def translated(lines: list[str]) -> list[str]:
    written: list[str] = []
    section, block, listed = "", False, False
    for k, line in enumerate(lines):
        follows = lines[k + 1] if k + 1 < len(lines) else ""
        indented = line.startswith("  ")
        if heading := SECTION.match(line):
            section, block, listed = heading[1], False, False
            written.append(":returns:" if section == "Returns" else line)
        elif section == "Example" or not line.strip():
            written.append(line)
        elif section == "Returns" and indented:
            listed = listed or ENTRY.match(line) is not None
            written.append(result(line, listed))
        elif section and indented:
            written.append(marked(line))
        else:
            section = ""
            if indented and not block:
                written += [".. code-block:: text", ""]
            block = indented
            written.append(line if block else marked(line))
            if follows.strip() and follows.startswith("  ") != block:
                written.append("")
    return written


def result(line: str, listed: bool) -> str:
    """A line of "Returns:": a result of a list, its continuation, or plain text."""
    if entry := ENTRY.match(line):
        return f"    - *{marked(entry[1])}*: {marked(entry[2])}"
    return "      "[: 6 if listed else 4] + marked(line.strip())


def marked(text: str) -> str:
    """A line in which only code in quotes is mark-up."""
    parts = CODE.split(text)
    return "".join(
        f"`{part}`" if k % 2 else re.sub(r"([\\*_|])", r"\\\1", part)
        for k, part in enumerate(parts)
    )
