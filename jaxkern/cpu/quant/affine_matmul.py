"""Products with MLX's affine weights on a CPU; the kernel is affine_matmul.h."""

import math

import jax
import jax.numpy as jnp

from jaxkern.cpu.cpu_call import FLOATS, cpu_call, library, missing
from jaxkern.cpu.quant.quantized_matmul_id import as_int32

BITS = (2, 4, 8)  # of codes that do not cross words; bytes may hold any
GROUPS = (32, 64, 128)
FEW, MANY = 8, 128  # rows of x


def refusal(
    x, codes, scales, biases, bits: int, group_size: int, compute_dtype
) -> str | None:
    """Why no kernel of this file runs."""
    if compute_dtype not in (None, jnp.float32):
        return f"compute_dtype is {compute_dtype}, products are of float32"
    if codes.dtype != jnp.uint8 and bits not in BITS:
        return f"words with codes of {bits} bits, not one of {BITS}"
    if group_size not in GROUPS:
        return f"groups of {group_size}, not one of {GROUPS}"
    if scales.dtype != biases.dtype:
        return f"`scales` are {scales.dtype}, `biases` {biases.dtype}"
    for name, a in {"x": x, "scales": scales}.items():
        if a.dtype not in FLOATS:
            return f"`{name}` is {a.dtype}, not one of {', '.join(FLOATS)}"
    if not math.prod(x.shape) * math.prod(codes.shape):
        return "there are no elements"
    return missing()


def unsupported(
    x, codes, scales, biases, *, bits, group_size, compute_dtype, dequant_dtype
) -> str | None:
    if dequant_dtype is not None:
        return f"weights are to be rounded to {dequant_dtype} as they are decoded"
    return refusal(x, codes, scales, biases, bits, group_size, compute_dtype)


def unsupported_id(
    x, ids, codes, scales, biases, *, bits, group_size, compute_dtype
) -> str | None:
    if not math.prod(ids.shape):
        return "there are no elements"
    return refusal(x, codes, scales, biases, bits, group_size, compute_dtype)


def slower(x, codes, scales, biases, **_) -> str | None:
    del codes, scales, biases
    rows = math.prod(x.shape[:-1])
    if rows > FEW and not library().instruction_set.startswith("avx512"):
        return f"{rows} rows without AVX-512"
    return f"{rows} rows" if rows > MANY else None


def affine_matmul(
    x, codes, scales, biases, *, bits, group_size, compute_dtype, dequant_dtype
):
    del compute_dtype, dequant_dtype  # the row asked
    rows, f = math.prod(x.shape[:-1]), codes.shape[0]
    y = cpu_call(
        "affine_matmul",
        jax.ShapeDtypeStruct((rows, f), x.dtype),
        x.reshape(rows, x.shape[-1]),
        codes,
        scales,
        biases,
        bits=bits,
        group_size=group_size,
    )
    return y.reshape(*x.shape[:-1], f)


def affine_matmul_id(x, ids, codes, scales, biases, *, bits, group_size, compute_dtype):
    del compute_dtype
    rows, k, f = math.prod(x.shape[:-1]), ids.shape[-1], codes.shape[1]
    y = cpu_call(
        "affine_matmul_id",
        jax.ShapeDtypeStruct((rows, k, f), x.dtype),
        x.reshape(rows, x.shape[-1]),
        as_int32(ids, codes.shape[0]).reshape(rows, k),
        codes,
        scales,
        biases,
        bits=bits,
        group_size=group_size,
    )
    return y.reshape(*ids.shape, f)
