"""Products, rows and experts of packed weights on a GPU, against float64.

The truth has the decoded weights in float64. An error may be 1.5 times that of the same
product with activations and decoded weights rounded to bfloat16.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern import (
    backend,
    dequantize,
    quantized_embedding,
    quantized_matmul,
    quantized_matmul_id,
)
from tests.gpu.truth import EPSILON, poison, relative_error


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def on_the_cpu(f, *operands):
    """What the library makes of them there, as arrays of the GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        w = f(*(jnp.asarray(np.asarray(a)) for a in operands))
        values = np.asarray(dequantize(w), np.float64)
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), w), values


def rounded(a):
    return np.asarray(a).astype(jnp.bfloat16).astype(np.float64)


def compare(found, truth, plain, dtype):
    error, its = relative_error(found, truth), relative_error(plain, truth)
    assert error <= min(1.5 * max(its, 1e-6), EPSILON[dtype]), (error, its)


def check_product(w, values, rows, dtype="bfloat16"):
    x = jnp.asarray(0.1 * normal((rows, values.shape[1]), rows), dtype)
    poison(jnp.zeros((rows, values.shape[0]), dtype))
    with backend("triton", strict=True):
        found = jax.jit(quantized_matmul)(x, w)
    assert found.dtype == x.dtype
    x64 = np.asarray(x, np.float64)
    plain = (rounded(x64) @ rounded(values).T).astype(dtype)
    compare(found, x64 @ values.T, plain, dtype)


def check_rows(w, values, dtype="bfloat16"):
    v = values.shape[0]
    ids = jnp.asarray([[0, v - 1, -1], [v // 2, v, 1]])
    poison(jnp.zeros((*ids.shape, values.shape[1]), dtype))
    with backend("triton", strict=True):
        found = jax.jit(lambda i, w: quantized_embedding(i, w, dtype=dtype))(ids, w)
    known = np.asarray((ids >= 0) & (ids < v))
    truth = np.where(known[..., None], values[np.clip(ids, 0, v - 1)], 0)
    assert relative_error(found, truth) < {"bfloat16": 4e-3}.get(dtype, 1e-6)


def check_weights(w, values, dtype="bfloat16"):
    """All of them; `w` may have dims in front."""
    poison(jnp.zeros(w.shape, dtype))
    with backend("triton", strict=True):
        found = jax.jit(lambda w: dequantize(w, dtype=dtype))(w)
    assert found.shape == w.shape and found.dtype == dtype
    error = relative_error(found, values.reshape(w.shape))
    assert error < {"bfloat16": 4e-3, "float16": 5e-4}.get(dtype, 1e-6)


def check_experts(w, values, tokens=3, top_k=2, dtype="bfloat16"):
    """Every third id names no expert."""
    e, f, d = values.shape
    x = jnp.asarray(0.1 * normal((tokens, d)), dtype)
    ids = np.random.default_rng(0).integers(0, e, tokens * top_k)
    ids[2::3] = np.where(np.arange(len(ids[2::3])) % 2, -1, e)
    poison(jnp.zeros((len(ids), f), dtype))
    with backend("triton", strict=True):
        found = jax.jit(lambda x, w, i: quantized_matmul_id(x, w, i, top_k=top_k))(
            x, w, jnp.asarray(ids)
        )
    x64 = np.repeat(np.asarray(x, np.float64), top_k, axis=0)
    chosen = np.where(
        ((ids >= 0) & (ids < e))[:, None, None], values[np.clip(ids, 0, e - 1)], 0
    )
    truth = np.einsum("rd,rfd->rf", x64, chosen)
    plain = np.einsum("rd,rfd->rf", rounded(x64), rounded(chosen)).astype(dtype)
    compare(found, truth, plain, dtype)
