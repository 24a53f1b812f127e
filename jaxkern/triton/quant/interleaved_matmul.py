"""Products with interleaved rows of GGUF blocks, by packed_products.py."""

from jaxkern.triton.quant.packed_products import multiply, refusal


def unsupported(x, tiles, *, qtype, compute_dtype) -> str | None:
    return refusal(x, tiles, qtype, compute_dtype)


def interleaved_matmul(x, tiles, *, qtype, compute_dtype):
    return multiply(x, tiles, qtype, compute_dtype)
