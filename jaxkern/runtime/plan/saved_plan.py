"""Compiled functions in files: what `Plan.save` writes and `load` reads.

A file is one line, the length of a JSON header, the header, then two parts:

    jaxkern plan 1 | 8 bytes | header | StableHLO of jax.export | machine code

StableHLO is data: XLA compiles it. Of a file that is not trusted it may hold only
operations whose shapes XLA itself checks, and no call that leaves XLA.
Machine code is a program, as a shared library is, and comes in a pickle: `load` does
not touch it unless told that the file is trusted.
"""

import hashlib
import importlib.metadata
import json
import os
import platform as host
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jaxkern.cpu.cpu_call import HANDLERS, library
from jaxkern.lowering.explain import default_platform
from jaxkern.runtime.plan.plan import Plan, compile

MAGIC = b"jaxkern plan 1\n"
LARGEST_HEADER = 1 << 20
PARTS = ("stablehlo", "machine_code")
FIELDS = {"made_by": dict, "machine": dict, "donate": list, "options": dict}
# not on jax's list of stable calls: kernels, which only a trusted file may call
OWN_TARGETS = (
    "triton_kernel_call_ffi",
    "mosaic_gpu_v2",
    *(f"jaxkern_{name}" for name in HANDLERS),
)
# What StableHLO an untrusted file may hold. XLA derives or verifies the shapes of these
# and decides itself what each writes. All else is refused: a call of a library, which
# writes as much as its operands say, wherever its results end; shapes that are known
# only at run time; what talks to the host or to other devices.
OPERATIONS = (
    "builtin.module",
    "func.func",
    "func.call",
    "func.return",
    "sdy.mesh",
    "sdy.sharding_constraint",
)
OF_STABLEHLO = """
    abs add and atan2 bitcast_convert broadcast_in_dim case cbrt ceil cholesky clamp
    compare complex composite concatenate constant convert convolution cosine
    count_leading_zeros custom_call divide dot_general dynamic_slice
    dynamic_update_slice exponential exponential_minus_one fft floor gather if imag
    iota is_finite log log_plus_one logistic map maximum minimum multiply negate not
    optimization_barrier or pad partition_id popcnt power real reduce
    reduce_precision reduce_window remainder replica_id reshape return reverse rng
    rng_bit_generator round_nearest_afz round_nearest_even rsqrt scatter select
    select_and_scatter shift_left shift_right_arithmetic shift_right_logical sign
    sine slice sort sqrt subtract tan tanh transpose triangular_solve while xor
""".split()
PLAIN = re.compile(r"tensor<(\d+x)*(complex<f(32|64)>|u?i\d+|b?f\d+\w*)>")
# calls that XLA takes out again, where operand and result are of one type: of another
# float type it would not notice
MARKERS = (
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "annotate_device_placement",
)


def save_plan(
    plan: Plan, path: str | Path, platforms: Sequence[str] | None = None
) -> None:
    """What `Plan.save` documents."""
    if plan.stage is None:
        raise ValueError("save: this plan is machine code alone; copy its file.")
    if len(plan.devices) > 1:
        raise ValueError(
            f"save: the plan runs on {len(plan.devices)} devices; only plans for one "
            "device can be saved."
        )
    machine_code, why_none = machine_code_of(plan.compiled)
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
    """A reader sees the old file or the new one, never a half."""
    header["sizes"] = {name: len(part) for name, part in parts.items()}
    header["sha256"] = {name: sha256(part) for name, part in parts.items()}
    text = json.dumps(header, default=str).encode()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines([MAGIC, len(text).to_bytes(8, "little"), text])
            file.writelines(parts.values())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def export(plan: Plan, platforms: Sequence[str] | None) -> bytes:
    assert plan.stage is not None
    traced = plan.stage.traced
    evaluate = jaxpr_as_fun(traced.jaxpr)

    def function(*args, **kwargs):
        """What was traced, under the contexts of that time: `backend`, precision."""
        return jax.tree.unflatten(
            traced.out_tree, evaluate(*jax.tree.leaves((args, kwargs)))
        )

    checks = [jax.export.DisabledSafetyCheck.custom_call(t) for t in OWN_TARGETS]
    args, kwargs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), plan.compiled.in_avals
    )
    try:
        exported = jax.export.export(
            jax.jit(function), platforms=platforms, disabled_checks=checks
        )(*args, **kwargs)
        return bytes(exported.serialize())
    except ModuleNotFoundError as error:
        raise ValueError(
            f"save: {error}. jax.export needs it: pip install flatbuffers."
        ) from error
    except (ValueError, NotImplementedError, TypeError) as error:
        raise ValueError(f"save: jax.export refuses the function: {error}") from error


def machine_code_of(compiled: jax.stages.Compiled) -> tuple[bytes, str | None]:
    from jax.experimental import serialize_executable

    try:
        return serialize_executable.serialize(compiled)[0], None
    except Exception as error:  # plugins raise what they like; the other part remains
        return b"", str(error)


def load(
    path: str | Path,
    *,
    trusted: bool = False,
    machine_code: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> Plan:
    """Reads what `Plan.save` wrote.

    Args:
      path: of the file.
      trusted: you know who wrote the file. Without it the StableHLO must keep to XLA's
        own operations: no Triton or C++ kernel, no LAPACK, no call of other code.
      machine_code: run the machine code in the file, which takes no compilation. Like a
        shared library it can do anything, so the file must be trusted.
      compiler_options: for that compilation; those in the file count only if trusted.

    Returns:
      The plan. One of machine code keeps neither jaxpr nor StableHLO.

    Raises:
      ValueError: the file is none of ours, is damaged, calls into foreign code without
        being trusted, or its machine code is for another device or version of jax.
    """
    if machine_code and not trusted:
        raise ValueError(
            "load: machine code can do anything. If you know who wrote the file, say "
            "trusted=True as well."
        )
    header, parts = read_parts(Path(path))
    if trusted:
        library()  # makes the C++ kernels known that the file may call
    exported = deserialize(path, header, parts["stablehlo"])
    if machine_code:
        if reason := misfit(header):
            raise ValueError(
                f"load: the machine code of {path} does not fit: {reason}. Without "
                "machine_code=True its StableHLO is compiled."
            )
        trees = exported.in_tree, exported.out_tree
        return Plan(*load_machine_code(path, parts["machine_code"], *trees))
    if not trusted:
        refuse_foreign_calls(path, exported)
    here = default_platform()
    if here not in exported.platforms:
        raise ValueError(
            f"load: {path} is for {', '.join(exported.platforms)}, not for {here}. "
            "Save it with `platforms=`."
        )
    args, kwargs = jax.tree.unflatten(
        exported.in_tree,
        [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in exported.in_avals],
    )
    if kwargs:
        raise ValueError(f"load: the function of {path} takes keyword arguments.")
    options = {**(header["options"] if trusted else {}), **(compiler_options or {})}
    donate = [n for n in header["donate"] if isinstance(n, int) and 0 <= n < len(args)]
    try:
        return compile(exported.call, *args, donate=donate, compiler_options=options)
    except Exception as error:  # checksums are no proof that XLA finds a program
        raise ValueError(
            f"load: the StableHLO of {path} cannot be compiled: {error}"
        ) from error


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


def deserialize(path: Any, header: dict[str, Any], data: bytes) -> jax.export.Exported:
    try:
        return jax.export.deserialize(bytearray(data))
    except Exception as error:  # the bytes are anyone's; so is what they provoke
        raise ValueError(
            f"load: jax {jax.__version__} cannot read the StableHLO of {path}, made by "
            f"{header['made_by']}: {type(error).__name__}: {error}"
        ) from error


def refuse_foreign_calls(path: Any, exported: jax.export.Exported) -> None:
    """Raises unless every operation is one that cannot leave XLA or its buffers."""
    try:
        text = exported.mlir_module()
        with mlir.make_ir_context():
            module = ir.Module.parse(text)
    except Exception as error:  # the bytes are anyone's; so is what they provoke
        raise ValueError(
            f"load: the StableHLO of {path} is damaged: {error}"
        ) from error
    calls, others = set(), set()

    def visit(operation: Any) -> Any:
        operation = operation.operation
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            types = {str(x.type) for x in (*operation.operands, *operation.results)}
            ends = len(operation.operands), len(operation.results)
            if target not in MARKERS or len(types) > 1 or ends != (1, 1):
                calls.add(target)
        elif reason := refused_operation(operation):
            others.add(reason)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    found = []
    if calls:
        found.append(f"calls code outside XLA: {', '.join(sorted(calls))}")
    if others:
        names = ", ".join(sorted(others))
        found.append(f"has what no untrusted file may have: {names}")
    if found:
        raise ValueError(
            f"load: {path} {' and '.join(found)}. If you know who wrote the file, "
            "load(path, trusted=True)."
        )


def refused_operation(operation: Any) -> str | None:
    """Which operation it is if an untrusted file may not have it, or None."""
    name = operation.name
    if name == "stablehlo.composite":
        made_of = ir.StringAttr(operation.attributes["name"]).value
        if not made_of.startswith("chlo."):
            return f"{name} of {made_of}"
    dialect, _, short = name.partition(".")
    known = short in OF_STABLEHLO if dialect == "stablehlo" else name in OPERATIONS
    if not known:
        return name
    for x in operation.results:
        if not PLAIN.fullmatch(str(x.type)):
            return f"{name} of {x.type}"
    return None


def load_machine_code(
    path: Any, data: bytes, in_tree: Any, out_tree: Any
) -> tuple[jax.stages.Compiled, float]:
    """The executable, and the seconds that it took to read."""
    from jax.experimental import serialize_executable

    start = time.perf_counter()
    try:
        compiled = serialize_executable.deserialize_and_load(
            data, in_tree, out_tree, execution_devices=jax.devices()[:1]
        )
    except Exception as error:  # what a pickle or a plugin raises
        raise ValueError(
            f"load: the machine code of {path} cannot be loaded: {error}"
        ) from error
    return compiled, time.perf_counter() - start


def misfit(header: dict[str, Any]) -> str | None:
    """Why the machine code of a file cannot run here, or None."""
    if why := header.get("why_no_machine_code"):
        return f"the file has none: {why}"
    made_by, here = header["made_by"], versions()
    for name in ("jaxlib", "jax", "jaxkern"):
        if made_by.get(name) != here[name]:
            return f"it was made by {name} {made_by.get(name)}, here is {here[name]}"
    was, now = header["machine"], machine(jax.devices()[0])
    for name, value in now.items():
        if was.get(name) != value:
            return f"its {name} is {was.get(name)}, here it is {value}"
    return None


def versions() -> dict[str, str]:
    def version(distribution: str) -> str:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    return {
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "jaxkern": version("jaxkern-ops"),
    }


def machine(device: jax.Device) -> dict[str, str]:
    """What machine code depends on."""
    found = {"platform": device.platform, "device kind": device.device_kind}
    found["architecture"] = host.machine()
    if device.platform == "cpu":
        found["processor"] = processor()
    return found


def processor() -> str:
    """A fingerprint of the instruction sets, where the system lists them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return host.processor()
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = " ".join(sorted(match.group(1).split())) if match else host.processor()
    return sha256(flags.encode())[:16]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
