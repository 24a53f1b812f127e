"""The fused kernels of MLX in plain JAX, with the manners of jax-mps.

`test_fused.py` holds them against MLX itself, and the rows of jaxkern against them.
"""

import jax
import jax.numpy as jnp
import numpy as np


def rms_norm(x, weight, *, eps):
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
    return y * weight


def layer_norm(x, weight, bias, *, eps):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight + bias


def gelu(x):
    return x / 2 * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (x + 0.044715 * x**3)))


def softmax(x, *, axis):
    return jax.nn.softmax(x, axis)


def rope(x, offset, *, dims, traditional, base, rope_scale):
    """x `[... t h]`."""
    freqs = base ** (-jnp.arange(0, dims, 2, dtype=jnp.float32) / dims)
    angles = (offset + jnp.arange(x.shape[-2]))[:, None] * rope_scale * freqs
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned, rest = x[..., :dims], x[..., dims:]
    halves = jnp.split(turned, 2, -1)
    a, b = (turned[..., ::2], turned[..., 1::2]) if traditional else halves
    a, b = a * cos - b * sin, b * cos + a * sin
    joined = jnp.stack([a, b], -1) if traditional else jnp.concatenate([a, b], -1)
    y = jnp.concatenate([joined.reshape(turned.shape), rest], -1)
    return y.astype(x.dtype)  # computed in float32 inside


def sdpa(q, k, v, mask, *, scale):
    """q `[b n t h]`; True in a mask shows a key, False takes 1e9 from its score."""
    groups = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, groups, axis=1) for x in (k, v))
    scores = scale * q @ jnp.swapaxes(k, -1, -2) + jnp.where(mask, 0, -1e9)
    return jax.nn.softmax(scores, -1) @ v


def sdpa_causal(q, k, v, *, scale):
    t, s = q.shape[-2], k.shape[-2]
    return sdpa(q, k, v, jnp.tri(t, s, s - t, dtype=bool), scale=scale)


def dequantize(codes, scales, biases, *, group_size, bits):
    """Refuses what MLX refuses: vectors, other groups, shapes that do not fit.

    Of NumPy's arrays too. Product and sum are rounded one by one, as MLX does on a CPU.
    """
    assert codes.ndim >= 2 and codes.dtype == "uint32"
    assert bits in (2, 3, 4, 5, 6, 8) and group_size in (32, 64, 128)
    assert scales.shape == biases.shape and scales.shape[:-1] == codes.shape[:-1]
    stream = codes[..., None] >> np.arange(32, dtype=np.uint32) & 1
    parts = stream.reshape(*scales.shape, group_size, bits)  # refuses other words
    q = (parts << np.arange(bits, dtype=np.uint32)).sum(-1).astype(scales.dtype)
    w = scales[..., None] * q + biases[..., None]
    return w.reshape(*codes.shape[:-1], -1)


def quantized_matmul(x, codes, scales, biases, *, transpose, group_size, bits):
    w = dequantize(codes, scales, biases, group_size=group_size, bits=bits)
    w = w.swapaxes(-1, -2) if transpose else w
    return (x.astype(np.float32) @ w.astype(np.float32)).astype(x.dtype)


KERNELS = {
    f"mps.{f.__name__}": f
    for f in (
        rms_norm,
        layer_norm,
        gelu,
        softmax,
        rope,
        sdpa,
        sdpa_causal,
        dequantize,
        quantized_matmul,
    )
}
