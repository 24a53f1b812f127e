"""`load`: reads what `Plan.save` wrote, and refuses what a stranger may have written.

StableHLO is data: XLA compiles it. Of a file that is not trusted it may hold only
operations whose shapes XLA itself checks, and no call that leaves XLA.
Machine code is a program, as a shared library is, and comes in a pickle: `load` does
not touch it unless told that the file is trusted.
"""

import re
import time
from pathlib import Path
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jaxkern.cpu.cpu_call import library
from jaxkern.lowering.explain import default_platform
from jaxkern.lowering.machine import machine, versions
from jaxkern.runtime.plan.compile import compile
from jaxkern.runtime.plan.plan import Plan
from jaxkern.runtime.plan.saved_plan import read_parts

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

    Example:
      >>> from tempfile import mkdtemp
      >>> from jaxkern import runtime
      >>> path = mkdtemp() + "/sin.plan"
      >>> runtime.compile(jnp.sin, jnp.zeros(2)).save(path)
      >>> runtime.load(path)(jnp.zeros(2))
      Array([0., 0.], dtype=float32)
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
