"""The kernels of quantized_matmul.h on rows that are interleaved already."""

from jaxkern.cpu.quant.quantized_embedding import look_up
from jaxkern.cpu.quant.quantized_matmul import multiply, not_f32, not_int8, refusal
from jaxkern.cpu.quant.quantized_matmul_id import multiply_routed
from jaxkern.primitives.quant.interleaved_tensor import ROWS, tile_width


def unsupported_int8(x, tiles, *, qtype, compute_dtype) -> str | None:
    return not_int8(compute_dtype) or refusal(x.dtype, qtype, x, tiles)


def unsupported_f32(x, tiles, *, qtype, compute_dtype) -> str | None:
    return not_f32(compute_dtype) or refusal(x.dtype, qtype, x, tiles)


def int8_activations(x, tiles, *, qtype, compute_dtype):
    del compute_dtype
    return multiply_tiles(x, tiles, qtype, int8_activations=True)


def f32_activations(x, tiles, *, qtype, compute_dtype):
    del compute_dtype
    return multiply_tiles(x, tiles, qtype)


def multiply_tiles(x, tiles, qtype: str, int8_activations: bool = False):
    u = tiles.shape[0]
    y = multiply(
        x,
        tiles,
        u * ROWS,
        qtype=qtype,
        interleaved=True,
        int8_activations=int8_activations,
    )
    return y.reshape(*x.shape[:-1], u, ROWS)


def unsupported_int8_id(x, ids, tiles, *, qtype, compute_dtype) -> str | None:
    return not_int8(compute_dtype) or refusal(x.dtype, qtype, x, ids, tiles)


def unsupported_f32_id(x, ids, tiles, *, qtype, compute_dtype) -> str | None:
    return not_f32(compute_dtype) or refusal(x.dtype, qtype, x, ids, tiles)


def int8_activations_id(x, ids, tiles, *, qtype, compute_dtype):
    del compute_dtype
    return multiply_tiles_id(x, ids, tiles, qtype, int8_activations=True)


def f32_activations_id(x, ids, tiles, *, qtype, compute_dtype):
    del compute_dtype
    return multiply_tiles_id(x, ids, tiles, qtype)


def multiply_tiles_id(x, ids, tiles, qtype: str, int8_activations: bool = False):
    u = tiles.shape[1]
    y = multiply_routed(
        x,
        ids,
        tiles,
        u * ROWS,
        qtype=qtype,
        interleaved=True,
        int8_activations=int8_activations,
    )
    return y.reshape(*ids.shape, u, ROWS)


def unsupported_rows(ids, tiles, *, qtype, dtype) -> str | None:
    return refusal(dtype, qtype, ids, tiles)


def interleaved_embedding(ids, tiles, *, qtype, dtype):
    d = tile_width("interleaved_embedding", qtype, tiles.shape[-1])
    v = tiles.shape[0] * ROWS
    return look_up(ids, tiles, v, d, qtype=qtype, dtype=dtype, interleaved=True)
