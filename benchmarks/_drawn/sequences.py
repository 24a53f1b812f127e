"""Draws of what runs along a sequence, of the loss and of the optimiser."""

from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks._drawn.draw import Draw, Source, in_words, normals, with_options

STEPS = 40  # of AdamW in one call: its state is updated in place after the first


def causal_conv1d(source: Source) -> Draw:
    b, d = source.one_of((1, 1, 2, 3, 8)), source.size(16, 8192)
    t = source.size(1, max(1, source.elements // (b * d)), (700,))
    taps = source.one_of((2, 3, 4, 4, 4))
    activation = source.one_of((None, "silu"))
    state, dtype = source.chance(0.3), source.dtype()
    shapes = [(b, t, d), (d, taps), (d,)]
    if state:
        shapes.append((b, taps - 1, d))
    return Draw(
        f"{in_words(b, t, d, taps=taps, activation=activation, state=state)} {dtype}",
        normals(dtype, *shapes),
        with_options(jaxkern.causal_conv1d, activation=activation),
        floats=(0, 1, 2),
        slack=4.0,
    )


def gated_delta_rule(source: Source) -> Draw:
    k, h = source.one_of((1, 2, 4, 16)), source.one_of((64, 128, 128))
    n, b = k * source.one_of((1, 2, 3)), source.one_of((1, 1, 2, 3))
    t = source.size(1, max(1, source.elements // (8 * b * n * h)), (700, 4096))
    dtype = source.one_of(("bfloat16", "bfloat16", "float16"))

    def arrays(key):
        query, keys, value = normals(dtype, *[(b, t, k, h)] * 2, (b, t, n, h))(key)
        g, beta = normals("float32", (b, t, n), (b, t, n))(key)
        return (
            jaxkern.l2_norm(query),
            jaxkern.l2_norm(keys),
            value,
            -jax.nn.softplus(g - 2),
            jax.nn.sigmoid(beta),
        )

    return Draw(
        f"b{b} t{t} heads {n}/{k} of {h} {dtype}",
        arrays,
        jaxkern.gated_delta_rule,
        floats=(0, 1, 2, 3, 4),
        slack=4.0,
    )


def cross_entropy(source: Source) -> Draw:
    tokens, v = source.matrix(8, 2**18, (1000, 32000, 50257, 128256, 151936))
    options: dict[str, Any] = dict(
        label_smoothing=source.one_of((None, None, 0.1)),
        z_loss=source.one_of((None, None, 1e-4)),
        softcap=source.one_of((None, None, 30.0)),
    )
    dtype = source.dtype()

    def arrays(key):
        [logits] = normals(dtype, (tokens, v))(key)
        return 3 * logits, jax.random.randint(key, (tokens,), 0, v)

    return Draw(
        f"{in_words(tokens, v, **options)} {dtype}",
        arrays,
        with_options(jaxkern.cross_entropy, **options),
        floats=(0,),
        slack=3.0,
    )


def adamw(source: Source) -> Draw:
    """A tree of leaves of drawn shapes, for STEPS steps."""
    count = source.size(1, min(32, max(1, source.elements // 2**12)))
    shapes = [source.matrix(1, 8192) for _ in range(3)]
    budget = source.elements // (8 * count)
    leaves = []
    for i in range(count):
        rows, width = shapes[i % 3]
        leaves.append((min(rows, max(1, budget // width)), min(width, budget)))
    dtype = source.one_of(("float32", "bfloat16"))

    def arrays(key):
        params, grads = (normals(dtype, *leaves)(k) for k in jax.random.split(key))
        return params, grads, *([jnp.zeros(s) for s in leaves] for _ in range(2))

    def f(params, grads, m, v):
        def step(i, state):
            params, m, v = state
            return jaxkern.adamw_update(
                params, grads, m, v, i, learning_rate=1e-3, weight_decay=0.1
            )

        return jax.lax.fori_loop(1, STEPS + 1, step, (params, tuple(m), tuple(v)))

    kinds = ", ".join(in_words(*s) for s in dict.fromkeys(leaves))
    title = f"{count} leaves of {kinds} {dtype}, {STEPS} steps"
    return Draw(title, arrays, f)


GENERATORS = {
    "causal_conv1d": causal_conv1d,
    "gated_delta_rule": gated_delta_rule,
    "cross_entropy": cross_entropy,
    "adamw": adamw,
}
