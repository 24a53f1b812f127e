"""Which implementation an op runs: rows, and the choice with its reasons.

A row says that on a platform an op has a kernel, and when that kernel refuses:

    lower(rms_norm_p, "cuda", "triton", fwd=rms_norm_fwd, bwd=rms_norm_bwd,
          unless=unsupported)

Rows are asked in order; the first that does not refuse runs, else the reference. A
refusal is a sentence. Nothing falls back unseen: `explain` shows the choice with every
refusal, and `backend(..., strict=True)` raises instead of falling back.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.interpreters import mlir

from jaxkern.lowering.sharded_call import partitioned, refusal_by_type, sharded_by_type
from jaxkern.primitives.kernel_primitive import (
    Backend,
    Call,
    KernelPrimitive,
    backend_context,
)

# prim_requires_devices_during_lowering has no public name; custom_partitioning below a
# primitive needs the device assignment while it lowers.
try:
    from jax._src.dispatch import prim_requires_devices_during_lowering
except ImportError as error:  # a jax outside the supported range
    raise ImportError(
        f"jaxkern.lowering: jax {jax.__version__} lacks "
        "jax._src.dispatch.prim_requires_devices_during_lowering. "
        "Use jax >=0.11.2,<0.13."
    ) from error

BACKENDS = ("auto", "xla", "triton", "mosaic_gpu", "cpp")


def backend(
    name: str, *, strict: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Chooses the implementation of every op called in a `with` block.

    The choice is made when the op is called (under `jit`: traced) and stays with the
    equation, its gradients included.

    Args:
      name: "auto" for the first kernel that does not refuse; "triton", "mosaic_gpu" or
        "cpp" for kernels of that kind only; "xla" for the reference.
      strict: raise, naming every refusal, where no such kernel runs. With "auto" only
        ops that have a row for the platform can raise.

    Raises:
      ValueError: unknown name.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend: `name` must be one of {BACKENDS}, got {name!r}.")
    return backend_context(Backend(name, strict))


class Row(NamedTuple):
    """One kernel of one op on one platform."""

    backend: str
    kernel: Callable
    unless: Callable[..., str | None]
    on_request: str | None = None  # why "auto" does not choose it

    @property
    def title(self) -> str:
        module = getattr(self.kernel, "__module__", "").removeprefix("jaxkern.")
        return f"{module}.{getattr(self.kernel, '__name__', self.kernel)}"


class Choice(NamedTuple):
    """The row that runs, or None for the reference, and why the others do not."""

    row: Row | None
    refused: tuple[str, ...]


def never_refuses(**_: Any) -> None:
    return None


def lower(
    p: KernelPrimitive,
    platform: str,
    backend: str,
    *,
    fwd: Callable | None,
    bwd: Callable | None = None,
    primal: Callable | None = None,
    unless: Callable[..., str | None] = never_refuses,
    on_request: str | None = None,
) -> None:
    """Adds a row: on `platform`, `p` runs these kernels unless `unless` gives a reason.

    Args:
      p: the op.
      platform: "cpu", "cuda", or the name of a plugin's platform.
      backend: the kind of kernel, one of `BACKENDS`.
      fwd: kernel for the op with residuals (for the op itself if it saves none); None
        where only the backward pass has a kernel.
      bwd: kernel for the gradients; where it takes `wanted` it learns which.
      primal: kernel for inference; without it `fwd` with its residuals dropped.
      unless: called with the operands' shapes and dtypes by name (None where absent)
        and the options; returns a reason in words, or None.
      on_request: why "auto" does not choose the kernel; naming its backend does.
    """
    if backend not in BACKENDS[2:]:
        raise ValueError(
            f"lower: `backend` must be one of {BACKENDS[2:]}, got {backend!r}."
        )
    if p.fwd is not None and fwd is not None:
        add_row(p.fwd, platform, Row(backend, fwd, unless, on_request))
        primal = primal or without_residuals(fwd, len(p.results))
    if kernel := primal or fwd:
        add_row(p, platform, Row(backend, kernel, unless, on_request))
    if bwd is not None:
        if p.bwd is None:
            raise TypeError(f"lower: {p.name} declares no bwd, got {bwd}.")
        add_row(p.bwd, platform, Row(backend, bwd, unless, on_request))


def without_residuals(fwd: Callable, num_results: int) -> Callable:
    @functools.wraps(fwd)
    def primal(*arrays, **static):
        out = fwd(*arrays, **static)[:num_results]
        return out[0] if num_results == 1 else out

    return primal


def add_row(p: KernelPrimitive, platform: str, row: Row) -> None:
    p.rows.setdefault(platform, []).append(row)
    prim_requires_devices_during_lowering.add(p)
    # Without a platform the rule also serves plugins that are not known yet.
    mlir.register_lowering(p, functools.partial(lowering_rule, p, None))
    if platform in ("cpu", "cuda"):
        rule = functools.partial(lowering_rule, p, platform)
        mlir.register_lowering(p, rule, platform=platform)


def choose(
    p: KernelPrimitive, platform: str, avals: Sequence, call: Call, static: dict
) -> Choice:
    """The first row that does not refuse; raises under strict if none runs."""
    rows = p.rows.get(platform, ())
    refused = []
    for row in rows:
        reason = refusal(p, row, avals, call, static)
        if reason is None:
            return Choice(row, tuple(refused))
        refused.append(f"{row.title}: {reason}")
    wanted = call.backend.name
    if wanted not in ("auto", "xla") and all(r.backend != wanted for r in rows):
        refused.append(f"no {wanted} kernel on {platform}")
    offered = [r for r in rows if wanted != "auto" or not r.on_request]
    if call.backend.strict and wanted != "xla" and refused and (offered or not rows):
        reasons = "; ".join(refused)
        raise ValueError(
            f"{p.name}: backend {call.backend!r} on {platform}: {reasons}."
        )
    return Choice(None, tuple(refused))


def refusal(
    p: KernelPrimitive, row: Row, avals: Sequence, call: Call, static: dict
) -> str | None:
    if call.backend.name not in ("auto", row.backend):
        return f"backend is {call.backend.name}"
    if call.backend.name == "auto" and row.on_request:
        return f"{row.on_request}; ask for it by backend({row.backend!r})"
    operands, _ = p.array_annotations(call)
    named: dict[str, Any] = {a.name: None for a in p.operands}
    for i, (operand, aval) in enumerate(zip(operands, avals, strict=True)):
        depth = sum(level[i] is not None for level in call.vmaps)
        named[operand.name] = jax.ShapeDtypeStruct(aval.shape[depth:], aval.dtype)
    return row.unless(**named, **static) or refusal_by_type(p, call, avals, static)


def lowering_rule(p: KernelPrimitive, platform: str | None, ctx, *args, call, **static):
    target: str = platform or (ctx.platforms or ctx.module_context.platforms)[0]
    choice = choose(p, target, ctx.avals_in, call, static)
    if choice.row is None:
        f = functools.partial(p.evaluate, call=call, **static)
        return mlir.lower_fun(f, multiple_results=True)(ctx, *args)

    def local(*arrays):
        """The kernel on what one device holds; its shapes can be other ones."""
        row = choose(p, target, [jax.typeof(x) for x in arrays], call, static).row
        kernel = p.reference if row is None else row.kernel
        return p.evaluate_with(kernel, *arrays, call=call, **static)

    mesh = ctx.avals_in[0].sharding.mesh
    explicit = not mesh.empty and bool(mesh.explicit_axes)
    if explicit:
        f = sharded_by_type(p, local, call, ctx.avals_in, ctx.avals_out)
    else:
        devices = getattr(ctx.module_context.axis_context, "num_devices", 1) or 1
        f = partitioned(p, local, call, ctx.avals_in, ctx.avals_out, devices)
    return mlir.lower_fun(f, multiple_results=True)(ctx, *args)
