"""Calls a Triton kernel from JAX: compiled while lowering, launched by XLA.

The launch goes through the FFI target of jax's CUDA plugin, which XLA captures into
CUDA graphs; nothing of ours runs when the executable does. Kernel files import `jit`
and `tl`, or `gluon_jit` and `gl`, from here: they can be imported, and refuse in words,
where Triton is absent.
"""

import functools
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern.gpu.device import OLDEST, compute_capability, device_capability
from jaxkern.gpu.launch import Launch, compiled, intermediate, triton
from jaxkern.gpu.plain_text import plain_assembly, plain_representation

try:
    import triton.language as language
    from triton.experimental import gluon as gluon_package
    from triton.experimental.gluon import language as gluon_language
    from triton.experimental.gluon.language.nvidia import ampere, hopper
    from triton.language.extra import libdevice as device_library
except ImportError:
    language = gluon_package = gluon_language = device_library = None
    ampere = hopper = None

# Without Triton a kernel stays the function it decorates; nothing calls it.
tl: Any = language or SimpleNamespace(constexpr=None)
libdevice: Any = device_library
jit: Any = triton.jit if triton else lambda f: f
# Gluon is Triton with the layout of every tensor written out.
gl: Any = gluon_language or SimpleNamespace(constexpr=None)
mma_v2: Any = ampere.mma_v2 if ampere else None
async_copy: Any = ampere.async_copy if ampere else None
# one function, whose name changed between the versions that are supported
async_load: Any = getattr(async_copy, "async_load", None) or getattr(
    async_copy, "async_copy_global_to_shared", None
)
# a method of shared memory, whose name changed likewise: dtype, shape and layout follow
reinterpreted: Any = gluon_language and (
    getattr(gl.shared_memory_descriptor, "reinterpret", None)
    or gl.shared_memory_descriptor._reinterpret
)
warpgroup_mma: Any = hopper.warpgroup_mma if hopper else None
mbarrier: Any = hopper.mbarrier if hopper else None
fence_async_shared: Any = hopper.fence_async_shared if hopper else None
warpgroup_mma_wait: Any = hopper.warpgroup_mma_wait if hopper else None
gluon_jit: Any = gluon_package.jit if gluon_package else lambda f: f
warp_specialize: Any = getattr(gl, "warp_specialize", None)
constexpr_function: Any = triton.constexpr_function if triton else lambda f: f

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


def triton_call(
    kernel: Any,
    *operands: jax.Array | Sequence[jax.Array],
    out: Sequence,
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 3,
    max_registers: int | None = None,
    cluster: int = 1,
    aliases: tuple[tuple[int, int], ...] = (),
    **constants: Any,
) -> list[jax.Array]:
    """Runs a Triton kernel on whole arrays.

    Args:
      kernel: a `jit` function of pointers to the operands, pointers to the results and
        constants, in this order.
      operands: arrays, contiguous; a list is one parameter, a tuple of pointers.
      out: shapes and dtypes of the results, in lists likewise.
      grid: number of programs along each of up to three axes.
      num_warps: warps of one program.
      num_stages: depth to which Triton pipelines loads in loops.
      max_registers: of one thread, so that more programs run beside each other.
      cluster: programs that run together, as `cluster.py` has them.
      aliases: pairs (operand, result) that share a buffer, counted without the lists.
        Where either is a slice of a larger array XLA may give them two all the same: a
        kernel must write the whole result then.
      constants: values of the `tl.constexpr` parameters.

    Returns:
      The results, in one list. A kernel without programs or without elements leaves
      zeros.
    """
    arrays, results = jax.tree.leaves(operands), jax.tree.leaves(out)
    if 0 in grid or all(0 in o.shape for o in results):
        return [jnp.zeros(o.shape, o.dtype) for o in results]
    if "AHEAD" in getattr(kernel, "arg_names", ()):  # of dependent_launch.py
        constants = {"AHEAD": 0, **constants}
    pointers = tuple(map(pointer_type, (*operands, *out)))
    launch = Launch(
        kernel,
        pointers,
        tuple(constants.items()),
        grid,
        num_warps,
        num_stages,
        max_registers,
        cluster,
    )
    shapes = tuple((o.shape, jnp.dtype(o.dtype)) for o in results)
    return triton_call_p.bind(*arrays, launch=launch, out=shapes, aliases=aliases)


def pointer_type(x: Any) -> str | tuple[str, ...]:
    if isinstance(x, list | tuple):
        return tuple(POINTER[jnp.dtype(leaf.dtype).name] for leaf in x)
    return POINTER[jnp.dtype(x.dtype).name]


def like(x: jax.Array | None) -> jax.ShapeDtypeStruct | None:
    return None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)


def sparse_call(
    kernel,
    grid: tuple[int, ...],
    given: dict,
    results: dict,
    constants: dict,
    in_place: dict[str, str] | None = None,
) -> tuple[jax.Array | None, ...]:
    """`triton_call` by names, in which an absent pointer is the constant None.

    `in_place` names operands and the results that share their buffers.
    """
    absent = {n: None for n, x in (given | results).items() if x is None}
    operand_names, result_names = (
        [n for n, x in arrays.items() if x is not None] for arrays in (given, results)
    )
    aliases = tuple(
        (operand_names.index(operand), result_names.index(result))
        for operand, result in (in_place or {}).items()
        if operand in operand_names
    )
    out = iter(
        triton_call(
            kernel,
            *(given[n] for n in operand_names),
            out=[results[n] for n in result_names],
            grid=grid,
            aliases=aliases,
            **absent,
            **constants,
        )
    )
    return tuple(None if r is None else next(out) for r in results.values())


triton_call_p = Primitive("triton_call")
triton_call_p.multiple_results = True


def abstract_eval(*avals, launch: Launch, out: tuple, aliases: tuple) -> list:
    """Results vary over the manual axes of all operands together."""
    del launch, aliases
    varying = frozenset().union(*(a.manual_axis_type.varying for a in avals))
    like = next((a for a in avals if a.manual_axis_type.varying == varying), None)
    if like is None:
        return [ShapedArray(shape, dtype) for shape, dtype in out]
    mesh = like.sharding.mesh
    return [
        ShapedArray(
            shape,
            dtype,
            sharding=NamedSharding(mesh, P(*[None] * len(shape))),
            manual_axis_type=like.manual_axis_type,
        )
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
    """Compiles the kernel and gives its launch to the FFI target of jax's plugin."""
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
        launch.cluster,  # a kernel of one `num_ctas`, launched in clusters
        launch.dynamic_bytes,
        plain_assembly(binary.asm["ptx"]),
        plain_representation(intermediate(binary)),
        capability,
    )
    x, *rest = (*launch.grid, 1, 1)[:3]
    grid = x // launch.cluster, *rest
    # The launcher checks 16-byte alignment; it need not clear the results.
    parameters = [
        lib.create_array_parameter(0, 16) for _ in jax.tree.leaves(launch.operands)
    ]
    call = lib.TritonKernelCall(kernel, *grid, parameters)
    opaque = zlib.compress(call.to_proto(launch.name, b""))
    rule = jax.ffi.ffi_lowering(
        "triton_kernel_call_ffi",
        api_version=4,
        operand_output_aliases=dict(aliases),
    )
    return rule(ctx, *args, opaque=opaque)


def max_shared_bytes() -> int:
    """Shared memory that one program can have on the GPU that is compiled for."""
    large = {80: 166_912, 87: 166_912, 90: 232_448, 100: 232_448, 103: 232_448}
    return large.get(compute_capability(), 101_376)


triton_call_p.def_impl(functools.partial(xla.apply_primitive, triton_call_p))
triton_call_p.def_abstract_eval(abstract_eval)
batching.primitive_batchers[triton_call_p] = batch
mlir.register_lowering(triton_call_p, lower, platform="cuda")
