"""Calls a Triton kernel from JAX: compiled while lowering, launched by XLA.

The launch goes through the FFI target of jax's CUDA plugin, which XLA captures into CUDA
graphs; nothing of ours runs when the executable does. Kernel files import `jit` and
`tl` from here, so they can be imported (and refuse in words) where Triton is absent.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

try:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    jit: Any = triton.jit
except ImportError:
    triton: Any = None

    class tl:  # type: ignore[no-redef]
        """Stands for triton.language in annotations, where Triton is absent."""

        constexpr = None

    def jit(f: Callable) -> Callable:
        return f


POINTER = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "float64": "*fp64",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e5m2": "*fp8e5",
    "bool": "*i1",
    "int8": "*i8",
    "int16": "*i16",
    "int32": "*i32",
    "int64": "*i64",
    "uint8": "*u8",
    "uint16": "*u16",
    "uint32": "*u32",
    "uint64": "*u64",
}
OLDEST = 80  # the compute capability that every kernel must compile for


def missing() -> str | None:
    """Why no Triton kernel can run here, or None."""
    if triton is None:
        return "the package triton is not installed"
    return None if plugin() else "the CUDA plugin of jax is not installed"


def unsupported(**named: Any) -> str | None:
    """Why no kernel of this folder takes these operands and options, or None."""
    if reason := missing():
        return reason
    if (device_capability() or OLDEST) < OLDEST:
        return f"the GPU has compute capability {device_capability()}, below {OLDEST}"
    for name, x in named.items():
        dtype = getattr(x, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.float64):
            return f"`{name}` is float64"
    return None


@functools.cache
def plugin() -> Any:
    """jaxlib's access to the plugin that launches Triton kernels, or None."""
    from jaxlib import gpu_triton

    return gpu_triton if hasattr(gpu_triton, "TritonKernelCall") else None


class Launch(NamedTuple):
    """One launch of one kernel, all of it static; hashable.

    Attributes:
      kernel: the `jit` function. Its parameters are pointers to the operands, pointers
        to the results, then constants.
      operands: names of the Triton types of all pointers, such as "*bf16".
      constants: (name, value) of every `tl.constexpr` parameter.
      grid: number of programs along each of up to three axes.
      num_warps, num_stages: of one program.
    """

    kernel: Any
    operands: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        return self.kernel.__name__


@functools.lru_cache(maxsize=4096)
def compiled(launch: Launch, capability: int) -> Any:
    """The kernel as Triton compiled it: `.asm` has every stage, `.metadata` its needs.

    Args:
      launch: the kernel with its types and constants; the grid does not matter.
      capability: 80 for an A100, 90 for an H100 or H200.
    """
    names = list(launch.kernel.arg_names)
    constants = dict(launch.constants)
    pointers = [n for n in names if n not in constants]
    if len(pointers) != len(launch.operands) or set(constants) - set(names):
        raise TypeError(
            f"triton_call: {launch.name} takes pointers {pointers} and constants "
            f"{[n for n in names if n in constants]}, got {len(launch.operands)} "
            f"arrays and {sorted(constants)}."
        )
    types = dict(zip(pointers, launch.operands, strict=True))
    source = ASTSource(
        launch.kernel,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs=constants,
        # XLA aligns every buffer to 16 bytes: loads can be 16 bytes wide.
        attrs={
            (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in types
        },
    )
    options = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": True,
    }
    return triton.compile(source, GPUTarget("cuda", capability, 32), options)


def triton_call(
    kernel: Any,
    *operands: jax.Array,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 3,
    aliases: tuple[tuple[int, int], ...] = (),
    **constants: Any,
) -> list[jax.Array]:
    """Runs a Triton kernel on whole arrays.

    Args:
      kernel: a `jit` function of pointers to the operands, pointers to the results and
        constants, in this order.
      operands: arrays, contiguous.
      out: shapes and dtypes of the results.
      grid: number of programs along each of up to three axes.
      num_warps: warps of one program.
      num_stages: depth to which Triton pipelines loads in loops.
      aliases: pairs (operand, result) that share a buffer.
      constants: values of the `tl.constexpr` parameters.

    Returns:
      The results. A kernel without programs or without elements leaves zeros.
    """
    if 0 in grid or all(0 in o.shape for o in out):
        return [jnp.zeros(o.shape, o.dtype) for o in out]
    pointers = tuple(POINTER[jnp.dtype(x.dtype).name] for x in (*operands, *out))
    launch = Launch(
        kernel, pointers, tuple(constants.items()), grid, num_warps, num_stages
    )
    shapes = tuple((o.shape, jnp.dtype(o.dtype)) for o in out)
    return triton_call_p.bind(*operands, launch=launch, out=shapes, aliases=aliases)


triton_call_p = Primitive("triton_call")
triton_call_p.multiple_results = True


def abstract_eval(*avals, launch: Launch, out: tuple, aliases: tuple) -> list:
    """Results vary over the manual axes of all operands together."""
    del launch, aliases
    varying = frozenset().union(*(a.manual_axis_type.varying for a in avals))
    like = next((a for a in avals if a.manual_axis_type.varying == varying), None)
    if like is None:
        return [ShapedArray(shape, dtype) for shape, dtype in out]
    return [
        ShapedArray(shape, dtype, manual_axis_type=like.manual_axis_type)
        for shape, dtype in out
    ]


def batch(args: Sequence, axes: Sequence, **params: Any):
    """One launch after the other; ops fold leading dims before it comes to this."""
    moved = [
        x if a is None else jnp.moveaxis(x, a, 0)
        for x, a in zip(args, axes, strict=True)
    ]

    def one(mapped):
        rest = iter(mapped)
        full = [
            x if a is None else next(rest) for x, a in zip(moved, axes, strict=True)
        ]
        return triton_call_p.bind(*full, **params)

    mapped = [x for x, a in zip(moved, axes, strict=True) if a is not None]
    out = jax.lax.map(one, mapped)
    return out, [0] * len(out)


def lower(ctx, *args, launch: Launch, out: tuple, aliases: tuple):
    del out
    if reason := missing():
        raise RuntimeError(f"triton_call: {launch.name}: {reason}.")
    capability = compute_capability()
    binary = compiled(launch, capability)
    metadata = binary.metadata
    lib = plugin()
    kernel = lib.TritonKernel(
        metadata.name,
        metadata.num_warps,
        getattr(metadata, "num_ctas", 1),
        metadata.shared,
        binary.asm["ptx"],
        binary.asm["ttir"],
        capability,
    )
    grid = (*launch.grid, 1, 1)[:3]
    # The launcher checks 16-byte alignment; it need not clear the results.
    parameters = [lib.create_array_parameter(0, 16) for _ in launch.operands]
    call = lib.TritonKernelCall(kernel, *grid, parameters)
    opaque = zlib.compress(call.to_proto(launch.name, b""))
    rule = jax.ffi.ffi_lowering(
        "triton_kernel_call_ffi",
        api_version=4,
        operand_output_aliases=dict(aliases),
    )
    return rule(ctx, *args, opaque=opaque)


@functools.cache
def device_capability() -> int | None:
    """90 for an H200; None without a CUDA GPU."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return None
    return int(device.compute_capability.replace(".", ""))


def compute_capability() -> int:
    """Of the GPU that is compiled for: this machine's, else the oldest supported."""
    return device_capability() or OLDEST


triton_call_p.def_impl(
    functools.partial(jax.interpreters.xla.apply_primitive, triton_call_p)
)
triton_call_p.def_abstract_eval(abstract_eval)
batching.primitive_batchers[triton_call_p] = batch
mlir.register_lowering(triton_call_p, lower, platform="cuda")
