"""Which implementation an op runs: rows, and the choice with its reasons.

A row says that on a platform an op has a kernel, and when that kernel refuses. The
tables of the platforms (cuda.py, cpu.py, apple/rows.py) have a line for each kernel,
which `kernel_table.py` reads; a row of one's own is added by

    lower(rms_norm_p, "cuda", "triton", fwd=rms_norm_fwd, bwd=rms_norm_bwd,
          unsupported=unsupported)

Rows are asked in order; the first that does not refuse runs, else the reference. A
refusal is a sentence. Inside of `jaxkern.tuned` what was measured of a call counts
more than the order. Nothing falls back unseen: `explain` shows the choice with every
refusal, and `backend(..., strict=True)` raises instead of falling back.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.interpreters import mlir

from jaxkern.lowering.lowered_ahead import find
from jaxkern.lowering.measured import in_words, is_cut, measurement
from jaxkern.lowering.sharded_call import partitioned, refusal_by_type, sharded_by_type
from jaxkern.primitives.call import Call, Measured, backend_context
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.family import KernelPrimitive
from jaxkern.primitives.kernel_primitive import lower_named

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

# (platform, name of a primitive) -> what makes its rows of the platform's table
TABLED: dict[tuple[str, str], list[Callable[[], "Row"]]] = {}
BACKENDS = ("auto", "xla", "triton", "mosaic_gpu", "cpp", "mps")


@check_arguments
def backend(
    name: str, *, strict: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Chooses the implementation of every op called in a `with` block.

    The choice is made when the op is called (under `jit`: traced) and stays with the
    equation, its gradients included.

    Args:
      name: "auto" for the first kernel that does not refuse, or for what is measured to
        be fastest (`jaxkern.tuned`); "triton", "mosaic_gpu", "cpp" or "mps" for kernels
        of that kind only; "xla" for the reference.
      strict: raise, naming every refusal, where no such kernel runs. With "auto" only
        ops that have a row for the platform can raise.

    Returns:
      A context manager; nothing else holds the choice.

    Raises:
      ValueError: unknown name.

    Example:
      >>> with jaxkern.backend("xla"):
      ...     found = jaxkern.explain(jaxkern.softmax, jnp.ones(4))
      >>> found.rows[0].runs
      'xla: softmax_reference'
    """
    if name not in BACKENDS:
        pallas = ' The Pallas kernels are "mosaic_gpu".' if name == "pallas" else ""
        names = ", ".join(map(repr, BACKENDS))
        raise ValueError(
            f"backend: `name` must be one of {names}, got {name!r}.{pallas}"
        )
    asked = dataclasses.replace(backend_context.value, name=name, strict=strict)
    return backend_context(asked)


def never_refuses(**_: Any) -> None:
    return None


class Row(NamedTuple):
    """One kernel of one op on one platform."""

    backend: str
    kernel: Callable
    unsupported: Callable[..., str | None]
    slower: Callable[..., str | None] | str = never_refuses

    @property
    def title(self) -> str:
        module = getattr(self.kernel, "__module__", "").removeprefix("jaxkern.")
        return f"{module}.{getattr(self.kernel, '__name__', self.kernel)}"


class Chosen(NamedTuple):
    """The row that runs, or None for the reference, and why the others do not."""

    row: Row | None
    refused: tuple[str, ...]
    measured: str = ""  # what the table in force says of the call


def lower(
    p: KernelPrimitive,
    platform: str,
    backend: str,
    *,
    fwd: Callable | None,
    bwd: Callable | None = None,
    primal: Callable | None = None,
    inference: bool = True,
    unsupported: Callable[..., str | None] = never_refuses,
    slower: Callable[..., str | None] | str = never_refuses,
) -> None:
    """Adds a row: on `platform`, `p` runs these kernels unless they refuse.

    Args:
      p: the op.
      platform: "cpu", "cuda", or the name of a plugin's platform.
      backend: the kind of kernel, one of `BACKENDS`.
      fwd: kernel for the op with residuals (for the op itself if it saves none); None
        where only the backward pass has a kernel.
      bwd: kernel for the gradients; where it takes `wanted` it learns which.
      primal: kernel for inference; without it `fwd` with its residuals dropped.
      inference: whether the row is for inference too.
      unsupported: called with the operands' shapes and dtypes by name (None where
        absent) and the options; returns a reason in words, or None.
      slower: called likewise; where the reference is faster, "auto" takes that. A
        sentence where that is so of all operands. Naming the backend takes the kernel
        all the same.

    Raises:
      ValueError: an unknown backend.
      TypeError: a `bwd` of an op that declares none.

    Example:
      >>> from jaxkern.lowering.lower import lower
      >>> from jaxkern.primitives.kernel_primitive import kernel_primitive
      >>> from jaxtyping import Array, Float
      >>> def twice_reference(x: Float[Array, "... d"]) -> Float[Array, "... d"]:
      ...     return 2 * x
      >>> twice_p = kernel_primitive(twice_reference)
      >>> lower(twice_p, "cpu", "cpp", fwd=lambda x: x + x)
      >>> jaxkern.explain(twice_p, jnp.ones(2), platform="cpu").rows[0].runs[:4]
      'cpp:'
    """
    if backend not in BACKENDS[2:]:
        raise ValueError(
            f"lower: `backend` must be one of {BACKENDS[2:]}, got {backend!r}."
        )
    if p.fwd is not None and fwd is not None:
        add_row(p.fwd, platform, Row(backend, fwd, unsupported, slower))
        primal = primal or without_residuals(fwd, len(p.results))
    if inference and (kernel := primal or fwd):
        add_row(p, platform, Row(backend, kernel, unsupported, slower))
    if bwd is not None:
        if p.bwd is None:
            raise TypeError(f"lower: {p.name} declares no bwd, got {bwd}.")
        add_row(p.bwd, platform, Row(backend, bwd, unsupported, slower))


def without_residuals(fwd: Callable, num_results: int) -> Callable:
    @functools.wraps(fwd)
    def primal(*arrays, **static):
        out = fwd(*arrays, **static)[:num_results]
        return out[0] if num_results == 1 else out

    return primal


def add_row(p: KernelPrimitive, platform: str, row: Row) -> None:
    p.rows.setdefault(platform, []).append(row)
    lower_by_rows(p, platform)


def lower_by_rows(p: KernelPrimitive, platform: str) -> None:
    prim_requires_devices_during_lowering.update((p, *p.callers))
    # Without a platform the rule also serves plugins that are not known yet.
    mlir.register_lowering(p, functools.partial(lowering_rule, p, None))
    if platform in ("cpu", "cuda"):
        rule = functools.partial(lowering_rule, p, platform)
        mlir.register_lowering(p, rule, platform=platform)


def add_row_later(p: KernelPrimitive, platform: str, make: Callable[[], Row]) -> None:
    """A row that is made, and its kernel imported, when one is first asked for."""
    TABLED.setdefault((platform, p.name), []).append(make)
    lower_by_rows(p, platform)


def rows_on(p: KernelPrimitive, platform: str) -> Sequence[Row]:
    """The rows in the order in which they are asked."""
    if makers := TABLED.pop((platform, p.name), None):
        added = p.rows.get(platform, [])
        p.rows[platform] = [*(make() for make in makers), *added]
    return p.rows.get(platform, ())


def implementation(p: KernelPrimitive, row: Row | None) -> str:
    """The name of a row, or of the reference if that is None, in tables and words."""
    if row is None:
        return f"xla: {p.reference.__name__}"
    return f"{row.backend}: {row.title}"


def choose(
    p: KernelPrimitive, platform: str, avals: Sequence, call: Call, static: dict
) -> Chosen:
    """What was measured to be fastest; without a measurement, by the rules."""
    if call.backend.table is None or call.backend.name != "auto":
        return choose_by_rules(p, platform, avals, call, static)
    found = measurement(p, platform, avals, call, static)
    if isinstance(found, Measured):
        rows = rows_on(p, platform)
        asked = [(row, refusal(p, row, avals, call, static)) for row in rows]
        able = [None, *(row for row, why in asked if not why)]
        runs = {implementation(p, row): row for row in able}
        refused = [f"{row.title}: {why}" for row, why in asked if why]
        refused += [f"{name}: {why}" for name, why in found.left.items()]
        if found.choice in runs:
            return Chosen(runs[found.choice], tuple(refused), in_words(found))
        found = f"measured {found.date}, but {found.choice} does not run here"
    by_rules = choose_by_rules(p, platform, avals, call, static)
    return by_rules._replace(measured=found)


def choose_by_rules(
    p: KernelPrimitive, platform: str, avals: Sequence, call: Call, static: dict
) -> Chosen:
    """The first row that does not refuse; raises under strict if none runs."""
    rows = rows_on(p, platform)
    wanted = call.backend.name
    refused, slower = [], []
    for row in rows:
        if reason := refusal(p, row, avals, call, static):
            refused.append(f"{row.title}: {reason}")
        elif reason := why_slower(p, row, avals, call, static):
            slower.append(f"{row.title}: {reason}")
        else:
            return Chosen(row, (*refused, *slower))
    if wanted not in ("auto", "xla") and all(r.backend != wanted for r in rows):
        refused.append(f"no {wanted} kernel on {platform}")
    if call.backend.strict and wanted != "xla" and refused and not slower:
        reasons = "; ".join(refused)
        raise ValueError(
            f"{p.name}: backend {call.backend!r} on {platform}: {reasons}."
        )
    return Chosen(None, (*refused, *slower))


def refusal(
    p: KernelPrimitive, row: Row, avals: Sequence, call: Call, static: dict
) -> str | None:
    """Why the row cannot run, or None."""
    if call.backend.name not in ("auto", row.backend):
        return f"backend is {call.backend.name}"
    named = p.named_shapes(avals, call)
    for name, x in named.items():
        if x is not None and not all(isinstance(n, int) for n in x.shape):
            return f"`{name}` has a symbolic size"
    return row.unsupported(**named, **static) or refusal_by_type(p, call, avals, static)


def why_slower(
    p: KernelPrimitive, row: Row, avals: Sequence, call: Call, static: dict
) -> str | None:
    """Why "auto" prefers the next row or the reference, or None."""
    if call.backend.name != "auto":
        return None
    if isinstance(row.slower, str):
        reason = row.slower
    elif call.vmaps:  # the operands' shapes do not say how large the work is
        return None
    else:
        with jax.default_matmul_precision(call.precision):
            reason = row.slower(**p.named_shapes(avals, call), **static)
    faster = "another kernel" if row.backend == "mosaic_gpu" else "XLA"
    return reason and f"{faster} is faster, {reason}"


def lowering_rule(p: KernelPrimitive, platform: str | None, ctx, *args, call, **static):
    targets = ctx.platforms or ctx.module_context.platforms
    target: str = platform or targets[0]
    devices = getattr(ctx.module_context.axis_context, "num_devices", 1) or 1
    choose_here = (
        choose if devices == 1 else choose_by_rules
    )  # each device's part: below
    choice = choose_here(p, target, ctx.avals_in, call, static)
    # one module for several plugins takes no kernel that only one of them has
    if choice.row is None or (platform is None and len(targets) > 1):
        f = functools.partial(p.evaluate, call=call, **static)
        return lower_named(p, f, ctx, *args)
    if devices == 1 and (
        ahead := find(p, choice.row.kernel, ctx.avals_in, call, static)
    ):
        return lower_named(p, ahead, ctx, *args)

    def local(*arrays):
        """The kernel on what one device holds; its shapes can be other ones."""
        row = choose(p, target, [jax.typeof(x) for x in arrays], call, static).row
        kernel = p.reference if row is None else row.kernel
        return p.evaluate_with(kernel, *arrays, call=call, **static)

    if is_cut(ctx.avals_in):
        f = sharded_by_type(p, local, call, ctx.avals_in, ctx.avals_out)
    else:
        f = partitioned(p, local, call, ctx.avals_in, ctx.avals_out, devices)
    return lower_named(p, f, ctx, *args)
