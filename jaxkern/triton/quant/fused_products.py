"""Products with what stands around them: packed_products.py and dense_products.py.

The norm before, and the gate or the addition after, are in the kernel of the product.
"""

from jaxkern.triton.quant import dense_products, packed_products


def unsupported_interleaved_norm(
    x, tiles, norm, *, qtype, compute_dtype, eps
) -> str | None:
    del eps
    return packed_products.refusal(x, tiles, qtype, compute_dtype, norm=norm)


def unsupported_interleaved_gate(
    x, tiles, norm, up, *, qtype, compute_dtype, eps, activation
) -> str | None:
    del eps, activation
    return packed_products.refusal(x, tiles, qtype, compute_dtype, norm=norm, up=up)


def unsupported_interleaved_add(
    x, tiles, residual, *, qtype, compute_dtype
) -> str | None:
    return packed_products.refusal(x, tiles, qtype, compute_dtype, residual=residual)


def unsupported_dense_norm(x, w, norm, bias, *, eps) -> str | None:
    del eps
    return dense_products.refusal(x, w, norm=norm, bias=bias)


def unsupported_dense_gate(x, w, norm, up, *, eps, activation) -> str | None:
    del eps, activation
    return dense_products.refusal(x, w, norm=norm, up=up)


def unsupported_dense_add(x, w, residual, bias) -> str | None:
    return dense_products.refusal(x, w, residual=residual, bias=bias)


def interleaved_rms_norm_matmul(x, tiles, norm, *, qtype, compute_dtype, eps):
    return packed_products.multiply(x, tiles, qtype, compute_dtype, norm=norm, eps=eps)


def interleaved_swiglu(x, tiles, norm, up, *, qtype, compute_dtype, eps, activation):
    if up is not None:
        tiles = tiles.reshape(tiles.shape[1:])
    around: dict = dict(norm=norm, eps=eps, up=up, activation=activation)
    return packed_products.multiply(x, tiles, qtype, compute_dtype, **around)


def interleaved_matmul_add(x, tiles, residual, *, qtype, compute_dtype):
    return packed_products.multiply(x, tiles, qtype, compute_dtype, residual=residual)


def dense_rms_norm_matmul(x, w, norm, bias, *, eps):
    return dense_products.multiply(x, w, norm=norm, bias=bias, eps=eps)


def dense_swiglu(x, w, norm, up, *, eps, activation):
    if up is not None:
        w = w.reshape(w.shape[1:])
    around: dict = dict(norm=norm, eps=eps, up=up, activation=activation)
    return dense_products.multiply(x, w, **around)


def dense_matmul_add(x, w, residual, bias):
    return dense_products.multiply(x, w, bias=bias, residual=residual)
