"""Compiled functions in files: what `Plan.save` writes, and its parts.

A file is one line, the length of a JSON header, the header, then two parts:

    jaxkern plan 1 | 8 bytes | header | StableHLO of jax.export | machine code
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from jaxkern.lowering.explain import default_platform
from jaxkern.lowering.exported_kernels import CHECKS
from jaxkern.lowering.machine import machine, versions
from jaxkern.runtime.plan.made import made_anew
from jaxkern.runtime.plan.record import PlanRecord

MAGIC = b"jaxkern plan 1\n"
LARGEST_HEADER = 1 << 20
PARTS = ("stablehlo", "machine_code")
FIELDS = {"made_by": dict, "machine": dict, "donate": list, "options": dict}


def save_plan(
    plan: PlanRecord, path: str | Path, platforms: Sequence[str] | None = None
) -> None:
    """What `Plan.save` documents."""
    if plan.stage is None:
        raise ValueError("save: this plan is machine code alone; copy its file.")
    if len(plan.devices) > 1:
        raise ValueError(
            f"save: the plan runs on {len(plan.devices)} devices; only plans for one "
            "device can be saved."
        )
    machine_code, why_none = machine_code_of(written(plan))
    parts = {"stablehlo": export(plan, platforms), "machine_code": machine_code}
    header = {
        "made_by": versions(),
        "platforms": list(platforms or [default_platform()]),
        "machine": machine(plan.device),
        "why_no_machine_code": why_none,
        "donate": list(plan.stage.donate),
        "options": plan.stage.options,
    }
    write_parts(Path(path), header, parts)


def write_parts(path: Path, header: dict[str, Any], parts: dict[str, bytes]) -> None:
    header["sizes"] = {name: len(part) for name, part in parts.items()}
    header["sha256"] = {name: sha256(part) for name, part in parts.items()}
    text = json.dumps(header, default=str).encode()
    replace_file(path, [MAGIC, len(text).to_bytes(8, "little"), text, *parts.values()])


def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """A reader sees the old file or the new one, never a half."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def export(plan: PlanRecord, platforms: Sequence[str] | None) -> bytes:
    assert plan.stage is not None
    traced = plan.stage.traced
    evaluate = jaxpr_as_fun(traced.jaxpr)

    def function(*args, **kwargs):
        """What was traced, under the contexts of that time: `backend`, precision."""
        return jax.tree.unflatten(
            traced.out_tree, evaluate(*jax.tree.leaves((args, kwargs)))
        )

    args, kwargs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), plan.compiled.in_avals
    )
    try:
        exported = jax.export.export(
            jax.jit(function), platforms=platforms, disabled_checks=CHECKS
        )(*args, **kwargs)
        return bytes(exported.serialize())
    except ModuleNotFoundError as error:
        raise ValueError(
            f"save: {error}. jax.export needs it: pip install flatbuffers."
        ) from error
    except (ValueError, NotImplementedError, TypeError) as error:
        raise ValueError(f"save: jax.export refuses the function: {error}") from error


def written(plan: PlanRecord) -> jax.stages.Compiled:
    """The executable of a plan that can be written; see `made.py`."""
    if plan.stage is None or not plan.was_read:
        return plan.compiled
    return made_anew(plan.stage.lowered, plan.stage.options)


def machine_code_of(compiled: jax.stages.Compiled) -> tuple[bytes, str | None]:
    from jax.experimental import serialize_executable

    try:
        return serialize_executable.serialize(compiled)[0], None
    except Exception as error:  # plugins raise what they like; the other part remains
        return b"", str(error)


def read_parts(
    path: Path, names: Sequence[str] = PARTS
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The header and the parts of a file whose checksums are right."""
    data = path.read_bytes()
    start = len(MAGIC) + 8
    if not data.startswith(MAGIC):
        found = data[: len(MAGIC)]
        later = found.startswith(MAGIC[:-2])
        what = "a plan of another format" if later else "no plan of jaxkern"
        raise ValueError(f"load: {path} is {what}: it begins with {found!r}.")
    length = int.from_bytes(data[len(MAGIC) : start], "little")
    if length > min(LARGEST_HEADER, len(data) - start):
        raise ValueError(f"load: {path} is truncated or damaged: its header.")
    try:
        header = json.loads(data[start : start + length])
        sizes = [int(header["sizes"][name]) for name in names]
        digests = [header["sha256"][name] for name in names]
        for name, kind in FIELDS.items() if names == PARTS else ():
            if not isinstance(header[name], kind):
                raise TypeError(f"{name} is no {kind.__name__}")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"load: {path} is damaged: its header: {error}.") from error
    at, parts = start + length, {}
    if min(sizes) < 0 or at + sum(sizes) != len(data):
        raise ValueError(
            f"load: {path} is truncated or damaged: {len(data)} bytes, its header says "
            f"{at + sum(sizes)}."
        )
    for name, size, digest in zip(names, sizes, digests, strict=True):
        parts[name] = data[at : at + size]
        at += size
        if sha256(parts[name]) != digest:
            raise ValueError(f"load: {path} is damaged: the checksum of its {name}.")
    return header, parts


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
