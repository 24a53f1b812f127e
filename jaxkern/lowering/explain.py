"""`explain`: what each op of a function runs, why, and what its kernels use."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxkern.lowering.lower import Row, choose, implementation
from jaxkern.primitives.call import Call
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.family import KernelPrimitive, Tangent
from jaxkern.primitives.kernel_primitive import REGISTRY, REWRITES

if TYPE_CHECKING:
    from jaxkern.gpu.launch import Launch
    from jaxkern.pallas.mosaic_launch import MosaicLaunch

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")  # of JAX itself


@dataclasses.dataclass(frozen=True)
class Choice:
    """What one op runs.

    Attributes:
      op: name of the primitive.
      sites: number of calls in the function.
      runs: the backend and the kernel or reference.
      refused: why the rows before it do not run.
      measured: what the table of `jaxkern.tuned` says of the call, for one device;
        "" outside of it.
      launches: what one call launches. A Triton launch knows its grid, constants, and
        as compiled its registers, shared memory, `ttir`, `ptx` and `sass`; a Mosaic
        launch its grid, block sizes, registers, shared memory and `mlir`, and on a
        machine with a GPU its `ptx` and `sass`.
    """

    op: str
    sites: int
    runs: str
    refused: tuple[str, ...]
    measured: str
    launches: "tuple[Launch | MosaicLaunch, ...]"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What each op of a function runs on a platform, and why.

    Attributes:
      platform: where.
      rows: one `Choice` for each op with operands of the same kind.
      assumed: the GPU that is assumed where none was asked, or None.
    """

    platform: str
    rows: tuple[Choice, ...]
    assumed: str | None = None

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            times = f" ({row.sites} call sites)" if row.sites > 1 else ""
            lines.append(f"{row.op} on {self.platform} runs {row.runs}{times}")
            lines += [f"  {row.measured}"] * bool(row.measured)
            lines += [f"  {launch.describe()}" for launch in row.launches]
            lines += [f"  not {reason}" for reason in row.refused]
        if lines and self.assumed:
            lines.append(self.assumed)
        return "\n".join(lines) or f"no jaxkern op on {self.platform}"

    __repr__ = __str__


@check_arguments
def explain(
    f: Callable, *args: Any, platform: str | None = None, **kwargs: Any
) -> Explanation:
    """Says for each op in `f(*args, **kwargs)` which implementation runs, and why.

    Traces `f`, runs nothing. Print the result, for which kernels are compiled as far as
    that goes here, or read its `rows`: `rows[0].launches[0].ptx` is the PTX of its
    first kernel, `sass` the machine code; a Triton kernel has its `ttir`, a Mosaic
    kernel its `mlir`. PTX and SASS of a Mosaic kernel need a GPU.

    Args:
      f: any traceable function: an op, a jitted model, a gradient.
      args, kwargs: what f is called with; arrays, or `jax.ShapeDtypeStruct`s of them.
        What is no array, such as `causal=True`, reaches f as it is.
      platform: "cpu", "cuda", ...; the default device's if None. "cuda" on a machine
        without a GPU is one of compute capability 8.0, and the result says so.

    Returns:
      An `Explanation`.

    Raises:
      TypeError, ValueError: what `f` itself raises for its arguments.
      ValueError: no such platform.

    Example:
      >>> x = jax.ShapeDtypeStruct((4, 1024), jnp.bfloat16)
      >>> found = jaxkern.explain(jaxkern.rms_norm, x, platform="cpu")
      >>> [(row.op, row.runs) for row in found.rows]
      [('rms_norm', 'xla: rms_norm_reference')]
    """
    platform = default_platform() if platform is None else platform
    check_platform("explain", platform)
    called, arrays = of_arrays(f, args, kwargs)
    found: dict[tuple, int] = {}
    for eqn in equations(jax.make_jaxpr(called)(arrays).jaxpr):
        row = explain_equation(eqn, platform)
        found[row] = found.get(row, 0) + 1
    return Explanation(
        platform,
        tuple(Choice(op, n, *rest) for (op, *rest), n in found.items()),
        assumed_gpu() if platform == "cuda" and found else None,
    )


def of_arrays(
    f: Callable, args: Sequence, kwargs: Mapping[str, Any]
) -> tuple[Callable[[dict[int, Any]], Any], dict[int, Any]]:
    """`f(*args, **kwargs)` as a function of its arrays alone, and these by position."""
    leaves, tree = jax.tree.flatten((args, kwargs))

    def called(arrays: dict[int, Any]) -> Any:
        every = [arrays.get(i, x) for i, x in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(tree, every)
        return f(*args, **kwargs)

    return called, {i: x for i, x in enumerate(leaves) if hasattr(x, "dtype")}


def check_platform(op: str, platform: str) -> None:
    """Raises a ValueError unless JAX, a plugin that we know or a row has the name."""
    of_rows = (name for p in REGISTRY.values() for name in p.rows)
    known = {*PLATFORMS, *REWRITES, *of_rows, default_platform()}
    if platform not in known:
        names = ", ".join(sorted(known))
        gpu = ' An NVIDIA GPU is "cuda".' if platform == "gpu" else ""
        raise ValueError(
            f"{op}: `platform` must be one of {names}, got {platform!r}.{gpu}"
        )


def assumed_gpu() -> str | None:
    """Which GPU kernels are chosen and compiled for, unless it is this machine's."""
    from jaxkern.gpu.device import assumed_capability, compute_capability
    from jaxkern.gpu.device import device_capability as of_this_machine

    if not assumed_capability and of_this_machine() is not None:
        return None
    major, minor = divmod(compute_capability(), 10)
    why = "as asked" if assumed_capability else "there is no CUDA GPU here"
    return f"for a GPU of compute capability {major}.{minor}: {why}"


def default_platform() -> str:
    device = jax.devices()[0]
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def explain_equation(eqn, platform: str) -> tuple:
    """(op, what runs, refusals, what was measured, launches)."""
    p, params = eqn.primitive, dict(eqn.params)
    if isinstance(p, Tangent):
        return p.name, f"xla: jvp of {p.op.name}_reference", (), "", ()
    call = params.pop("call")
    avals = [v.aval for v in eqn.invars]
    row, refused, measured = choose(p, platform, avals, call, params)
    launched = ()
    if row is not None and row.backend in ("triton", "mosaic_gpu"):
        launched = launches(p, row, avals, call, params)
    return p.name, implementation(p, row), refused, measured, launched


def launches(
    p: KernelPrimitive, row: Row, avals: list, call: Call, static: dict
) -> "tuple[Launch | MosaicLaunch, ...]":
    """The launches of one call of an op, on unsharded operands."""
    from jaxkern.gpu.triton_call import triton_call_p  # imports Triton
    from jaxkern.pallas.mosaic_launch import MosaicKernels, mosaic_launch

    f = jax.jit(functools.partial(p.evaluate_with, row.kernel, call=call, **static))
    plain = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    traced = f.trace(*plain)

    kernels = MosaicKernels(traced)
    found = []
    for eqn in every_equation(traced.jaxpr):
        if eqn.primitive is triton_call_p:
            found.append(eqn.params["launch"])
        elif isinstance(eqn.primitive, KernelPrimitive):  # a kernel leaves it to others
            found += explain_equation(eqn, "cuda")[-1]
        elif launch := mosaic_launch(eqn, every_equation, kernels):
            found.append(launch)
    return tuple(found)


def equations(jaxpr) -> Iterator[Any]:
    """Every equation of one of our primitives, also inside jit, scan or cond."""
    for eqn in every_equation(jaxpr):
        if isinstance(eqn.primitive, KernelPrimitive | Tangent):
            yield eqn


def every_equation(jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies(eqn):
            yield from every_equation(body)


def bodies(eqn) -> list[Any]:
    """The jaxprs in an equation's parameters."""
    leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr)
    return [getattr(x, "jaxpr", x) for x in leaves if is_jaxpr(x)]


def is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns")
