"""`implementations`: every kernel that an op has on a platform, and why it refuses."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax

import jaxkern
from jaxkern.lowering.explain import check_platform, default_platform, equations
from jaxkern.lowering.lower import refusal, rows_on, why_slower
from jaxkern.primitives.kernel_primitive import REGISTRY, KernelPrimitive, Tangent


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way in which one primitive can run on a platform.

    Attributes:
      op: name of the primitive: `rms_norm`, `rms_norm_fwd` (saves residuals),
        `rms_norm_bwd` (gradients).
      platform: "cpu", "cuda", ...
      backend: the kind of kernel, "xla" for the reference.
      kernel: where its source is.
      refusal: why it does not run, in words; None where it does, or as far as is known
        without operands. The first row without one runs.
    """

    op: str
    platform: str
    backend: str
    kernel: str
    refusal: str | None

    def __str__(self) -> str:
        end = f": {self.refusal}" if self.refusal else ""
        return f"{self.op} on {self.platform} by {self.backend}: {self.kernel}{end}"


def implementations(
    op: str | Callable | KernelPrimitive,
    device: str | jax.Device | None = None,
    *args: Any,
    **options: Any,
) -> tuple[Implementation, ...]:
    """The rows of an op in the order in which they are asked; the reference is last.

        implementations("rms_norm", "cuda", x, weight)

    With operands each row says whether it refuses them, under the `backend` in force.
    `explain` says what a whole function runs.

    Args:
      op: a name, a public function of jaxkern, or a primitive. With operands also any
        traceable function: the rows of each op that it calls.
      device: a platform or device; the default device's if None.
      args: operands as of the public function: arrays or `jax.ShapeDtypeStruct`.
      options: its options.

    Returns:
      Rows by primitive.

    Raises:
      ValueError: no op of that name, or no such platform.
    """
    platform = platform_of(device)
    if args or options:
        f = named_op(op)
        eqns = equations(jax.make_jaxpr(lambda *a: f(*a, **options))(*args).jaxpr)
        return tuple(dict.fromkeys(row for e in eqns for row in of_call(e, platform)))
    return tuple(
        row
        for p in primitives_of(op)
        for member in (p, p.fwd, p.bwd)
        if member is not None
        for row in of_primitive(member, platform)
    )


def platform_of(device: str | jax.Device | None) -> str:
    if device is None:
        return default_platform()
    name = device if isinstance(device, str) else device.platform
    platform = "cuda" if name == "gpu" else name
    check_platform("implementations", platform)
    return platform


def named_op(op: str | Callable) -> Callable:
    """The public function of that name, else the primitive."""
    if not isinstance(op, str):
        return op
    found = getattr(jaxkern, op, None) or REGISTRY.get(op)
    if found is None:
        raise ValueError(f"implementations: no op of jaxkern is called {op!r}.")
    return found


def primitives_of(op: str | Callable) -> list[KernelPrimitive]:
    """The primitive of that name, or those which the function's file declares."""
    if isinstance(op, str) and op in REGISTRY:
        return [REGISTRY[op]]
    f = named_op(op)
    if isinstance(f, KernelPrimitive):
        return [f]
    module = getattr(inspect.unwrap(f), "__module__", None)
    found = [p for p in REGISTRY.values() if p.reference.__module__ == module]
    same = [p for p in found if p.name == getattr(f, "__name__", None)]
    if not found:
        raise ValueError(
            f"implementations: {f} declares no primitive. Give operands: the rows of "
            "each op that it calls with them."
        )
    return same or found


def reference_of(p: KernelPrimitive, platform: str) -> Implementation:
    module = p.reference.__module__.removeprefix("jaxkern.")
    title = f"{module}.{p.reference.__name__}"
    return Implementation(p.name, platform, "xla", title, None)


def of_primitive(p: KernelPrimitive, platform: str) -> Iterator[Implementation]:
    for row in rows_on(p, platform):
        yield Implementation(p.name, platform, row.backend, row.title, None)
    yield reference_of(p, platform)


def of_call(eqn: Any, platform: str) -> Iterator[Implementation]:
    """The rows of one equation with what they say about its operands."""
    p, params = eqn.primitive, dict(eqn.params)
    if isinstance(p, Tangent):
        title = f"jvp of {p.op.reference.__name__}"
        yield Implementation(p.name, platform, "xla", title, None)
        return
    call = params.pop("call")
    avals = [v.aval for v in eqn.invars]
    for row in rows_on(p, platform):
        given = p, row, avals, call, params
        reason = refusal(*given) or why_slower(*given)
        yield Implementation(p.name, platform, row.backend, row.title, reason)
    yield reference_of(p, platform)
