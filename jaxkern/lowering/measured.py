"""What a table of measurements says of a call: the key of the call, and the look-up.

A key is readable, and whole: two calls with equal keys do the same work.

    rms_norm(x=float32[4,256], weight=float32[256]; eps=1e-06, offset=0.0)
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkern.primitives.call import Call, Measured
from jaxkern.primitives.family import KernelPrimitive


def call_key(
    p: KernelPrimitive, avals: Sequence, call: Call, static: dict[str, Any]
) -> str:
    """The op with its operands' shapes and dtypes, its options and what `call` records.

    Operands that are absent are left out, and so are the backend and how operands lie
    on a mesh. Axes that vmaps added are in the shapes, and their levels in `vmaps`.
    """
    operands, _ = p.array_annotations(call)
    arrays = [
        f"{operand.name}={x.dtype.name}[{','.join(map(str, x.shape))}]"
        for operand, x in zip(operands, avals, strict=True)
    ]
    recorded = {
        "vmaps": call.vmaps,
        "wanted": call.wanted,
        "matmul_precision": call.precision,
    }
    options = static | {name: value for name, value in recorded.items() if value}
    said = [f"{name}={option_text(value)}" for name, value in sorted(options.items())]
    return f"{p.name}({', '.join(arrays)}{'; ' * bool(said)}{', '.join(said)})"


def option_text(value: Any) -> str:
    is_scalar = isinstance(value, type) and issubclass(value, np.generic)
    if is_scalar or isinstance(value, np.dtype | type(jnp.float32)):
        return jnp.dtype(value).name
    return repr(value)


def measurement(
    p: KernelPrimitive, platform: str, avals: Sequence, call: Call, static: dict
) -> Measured | str:
    """What the table in force says of the call, or why it says nothing."""
    table = call.backend.table
    assert table is not None
    if table.platform != platform:
        return f"not measured: {table.path} is of {table.platform}"
    if is_cut(avals):
        return "not measured: the operands are cut over a mesh"
    found = table.calls.get(call_key(p, avals, call, static))
    return found or f"not measured: {table.path} has no call with these operands"


def is_cut(avals: Sequence) -> bool:
    """Whether an explicit mesh says how the operands lie on devices."""
    mesh = avals[0].sharding.mesh if avals else None
    return mesh is not None and not mesh.empty and bool(mesh.explicit_axes)


def in_words(found: Measured) -> str:
    times = sorted(found.microseconds.items(), key=lambda item: item[1])
    said = ", ".join(f"{name} {us:.4g} us" for name, us in times)
    return f"measured {found.date}: {said}"
