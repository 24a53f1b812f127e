"""Tables of measured times, which `jaxkern.testing.autotune` writes and "auto" reads.

A table is JSON: where it was measured, then each call by its key (`measured.py`).

    {"format": 1, "platform": "cuda", "device": "NVIDIA H200",
     "versions": {"jax": "0.12.0", "jaxlib": "0.12.0", "jaxkern": "0.1.0"},
     "calls": {"rms_norm(x=float32[4,256]; eps=1e-06, offset=0.0)": {
        "date": "2026-11-27",
        "microseconds": {"triton: triton.norm.rms_norm.rms_norm": 2.1,
                         "xla: rms_norm_reference": 3.4},
        "left": {},
        "choice": "triton: triton.norm.rms_norm.rms_norm"}}}
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxkern.lowering.explain import default_platform
from jaxkern.lowering.lower import implementation, rows_on
from jaxkern.lowering.machine import device_name, versions
from jaxkern.primitives.call import Measured, Table, backend_context
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.family import KernelPrimitive
from jaxkern.primitives.kernel_primitive import REGISTRY
from jaxkern.primitives.leafwise_primitive import LEAFWISE

FORMAT = 1
FIELDS = {"format": int, "platform": str, "device": str, "versions": dict}


@check_arguments
def tuned(path: str | Path | None = None) -> contextlib.AbstractContextManager[None]:
    """Lets "auto" follow what was measured here, for every op called in a `with` block.

    `jaxkern.testing.autotune` writes the table. A call that it has, with these shapes,
    dtypes and options, runs what was fastest; any other follows the usual rules, and
    `explain` says which of the two it is. As with `backend` the choice is made when the
    op is called (under `jit`: traced) and stays with the equation: a function that was
    compiled before, or with another table, is compiled again. A `backend` other than
    "auto" counts more than the table.

    The table is of calls on one device. Where a mesh cuts the operands, the usual rules
    say whether kernels run, and the table what each device runs on its part, if it has
    a call of that size.

    Args:
      path: of the table; None for the one of this device below the user's cache folder
        (`XDG_CACHE_HOME`, else `~/.cache`), `jaxkern/tuned/<device>.json`.

    Returns:
      A context manager; nothing else holds the choice.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file is no table, it names an op or an implementation that is not
        here, or it was measured on another device or with other versions of jax, jaxlib
        or jaxkern.

    Example:
      >>> from jaxkern.testing import autotune
      >>> from tempfile import mkdtemp
      >>> x, path = jnp.ones((8, 64)), mkdtemp() + "/tuned.json"
      >>> found = autotune(jaxkern.softmax, x, path=path)
      >>> with jaxkern.tuned(path):
      ...     [row] = jaxkern.explain(jaxkern.softmax, x).rows
      >>> row.runs == found.calls[0].choice, row.measured.startswith("measured 2")
      (True, True)
    """
    file = default_path() if path is None else Path(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"tuned: there is no table {file}. jaxkern.testing.autotune(f, *args) "
            "measures one."
        )
    table = table_of("tuned", str(file), file.read_bytes())
    return backend_context(dataclasses.replace(backend_context.value, table=table))


def default_path() -> Path:
    """Where the table of the default device is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = re.sub(r"\W+", "_", device_here()).strip("_")
    return Path(cache) / "jaxkern" / "tuned" / f"{name}.json"


def device_here() -> str:
    return device_name(jax.devices()[0])


def header() -> dict[str, Any]:
    """What a table that is measured now says of itself."""
    where = {"platform": default_platform(), "device": device_here()}
    return {"format": FORMAT, **where, "versions": versions()}


@functools.lru_cache(maxsize=16)
def table_of(op: str, path: str, text: bytes) -> Table:
    """The table in a file's bytes; a ValueError of `op` if it does not count here."""
    found = read(op, path, text)
    calls = {key: Measured(**call) for key, call in checked_calls(op, path, found)}
    digest = hashlib.sha256(text).hexdigest()
    return Table(digest, found["platform"], path, calls)


def read(op: str, path: str, text: bytes) -> dict[str, Any]:
    """The JSON of a table of this device and these versions."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{op}: {path} is no table of times: {error}.") from error
    fields = FIELDS | {"calls": dict}
    known = isinstance(found, dict) and found.keys() == fields.keys()
    if not known or any(not isinstance(found[k], kind) for k, kind in fields.items()):
        names = ", ".join(fields)
        raise ValueError(f"{op}: {path} is no table of times: it needs {names}.")
    here = header()
    for name in FIELDS:
        if found[name] != here[name]:
            raise ValueError(
                f"{op}: {path} is of {name} {found[name]}, here it is {here[name]}. "
                "Times of another device or version say nothing here: measure into "
                "another file, or remove this one."
            )
    return found


def checked_calls(
    op: str, path: str, found: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Key and fields of each call, whose names exist here."""
    ops = every_op()
    for key, call in found["calls"].items():
        where = f"{op}: {path}, call {key!r}:"
        if (p := ops.get(key.partition("(")[0])) is None:
            raise ValueError(f"{where} there is no such op.")
        if reason := malformed(call):
            raise ValueError(f"{where} {reason}.")
        rows = rows_on(p, found["platform"])
        names = [implementation(p, row) for row in (None, *rows)]
        for name in call["microseconds"]:
            if name not in names:
                known = ", ".join(map(repr, names))
                raise ValueError(f"{where} {name!r} is none of {known}.")
        yield key, call


def malformed(call: Any) -> str | None:
    """Why this is no record of a call, or None."""
    kinds = {"date": str, "microseconds": dict, "left": dict, "choice": str}
    if not isinstance(call, dict) or call.keys() != kinds.keys():
        return f"it needs {', '.join(kinds)}"
    for name, kind in kinds.items():
        if not isinstance(call[name], kind):
            return f"`{name}` is {call[name]!r}"
    for name, us in call["microseconds"].items():
        is_number = isinstance(us, int | float) and not isinstance(us, bool)
        if not is_number or not 0 < us < math.inf:
            return f"{name!r} takes {us!r} microseconds"
    if any(not isinstance(reason, str) for reason in call["left"].values()):
        return f"`left` is {call['left']!r}"
    if call["choice"] not in call["microseconds"]:
        return f"its choice {call['choice']!r} has no time"
    return None


def every_op() -> dict[str, KernelPrimitive]:
    """Every op, fwd and bwd by its name."""
    declared = [*REGISTRY.values(), *LEAFWISE.values()]
    family = [q for p in declared for q in (p, p.fwd, p.bwd) if q is not None]
    return {q.name: q for q in family}
