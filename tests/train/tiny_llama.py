"""A llama of two small layers, and the same in plain JAX with whole logits.

Its attention output is square, and its table is also the output: the two layouts that a
page and training keep apart.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.models.llama import Layer, LlamaConfig, LlamaWeights
from jaxkern.train import next_token_loss

D, HEADS, KV_HEADS, H, FFN, VOCABULARY = 16, 2, 1, 8, 24, 32
CONFIG = LlamaConfig(
    architecture="llama",
    context=64,
    layers=2,
    d_model=D,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=H,
    vocabulary=VOCABULARY,
    eps=1e-5,
    rotary_dim=H,
    theta=100.0,
    pairing="neox",
)


def weights_of(seed=0, layers=2, d=D, ffn=FFN):
    """Random ones, output-major as training keeps them."""
    rng = np.random.default_rng(seed)

    def matrix(f, d):
        return (jnp.asarray(rng.standard_normal((f, d)) / d**0.5, jnp.float32),)

    heads, pairs = HEADS * d // D, KV_HEADS * d // D
    one = jnp.ones(d)
    layer = [
        Layer(
            attention_norm=one + 0.1 * i,
            qkv=matrix((heads + 2 * pairs) * H, d),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            attention_output=matrix(d, heads * H),
            ffn_norm=one - 0.1 * i,
            gate_up=matrix(2 * ffn, d),
            down=matrix(d, ffn),
        )
        for i in range(layers)
    ]
    (table,) = matrix(VOCABULARY, d)
    return LlamaWeights(table, tuple(layer), one + 0.2, (), None)


def batches(n, rows=8, length=12, seed=1):
    """Texts of a few rules, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, VOCABULARY, (n, rows, 1))
    stride = rng.integers(1, 4, (n, rows, 1))
    return ((start + stride * np.arange(length)) % VOCABULARY).astype(np.int32)


def norm(x, w):
    x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = x32 * (jnp.mean(x32 * x32, -1, keepdims=True) + CONFIG.eps) ** -0.5
    return (y * w.astype(y.dtype)).astype(x.dtype)


def rotated(x):
    """Pairs (i, i + h / 2) of x `[b, t, n, h]` by t * theta**(-2 i / h)."""
    half = H // 2
    frequency = CONFIG.theta ** (-np.arange(half) / half)
    angle = np.arange(x.shape[1])[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    cos, sin = (
        jnp.asarray(c, jnp.promote_types(x.dtype, "float32")) for c in (cos, sin)
    )
    y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return y.astype(x.dtype)


def plain_loss(weights, tokens):
    """Mean cross entropy of the next tokens; every matrix is `[f, d]`."""
    x = weights.embedding[tokens]
    b, t, _ = x.shape
    for layer in weights.layers:
        y = norm(x, layer.attention_norm) @ layer.qkv[0].T
        y = y.reshape(b, t, -1, H)
        n = y.shape[2] // 2
        q, k, v = (
            rotated(y[:, :, :n]),
            rotated(y[:, :, n : n + n // 2]),
            y[:, :, n + n // 2 :],
        )
        k, v = (jnp.repeat(a, 2, axis=2) for a in (k, v))
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=wide)
        scores = jnp.where(np.tri(t, dtype=bool), scores * H**-0.5, -jnp.inf)
        p = jax.nn.softmax(scores)
        y = jnp.einsum("bnts,bsnh->btnh", p, v.astype(wide)).astype(x.dtype)
        x = x + y.reshape(b, t, -1) @ layer.attention_output[0].T
        gate, up = jnp.split(norm(x, layer.ffn_norm) @ layer.gate_up[0].T, 2, -1)
        x = x + (jax.nn.silu(gate.astype(wide)) * up).astype(x.dtype) @ layer.down[0].T
    x = norm(x, weights.output_norm)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.einsum(
        "btd,vd->btv", x, weights.embedding, preferred_element_type=wide
    )
    picked = jnp.take_along_axis(
        jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1
    )
    return -jnp.mean(picked)


def loss_of_one_layer():
    return next_token_loss(dataclasses.replace(CONFIG, layers=1))
