"""Heads of the tests of rotations with a norm: even and odd dims, every pairing."""

import jax.numpy as jnp
import numpy as np

HEADS = [  # n, k, h, pairs, options
    (32, 8, 128, 64, {}),
    (40, 8, 128, 64, {"pairing": "interleaved"}),
    (16, 2, 256, 32, {}),
    (6, 3, 80, 16, {"pairing": "interleaved"}),
    (5, 1, 96, 24, {"pair_offset": 48}),
    (3, 3, 13, 5, {}),
    (1, 1, 2, 1, {}),
    (2, 1, 4096, 2048, {}),
]


def draw_operands(t, n, k, h, pairs, dtype):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    angle = rng.standard_normal((2, t, pairs))
    tables = jnp.float32(np.cos(angle)), jnp.float32(np.sin(angle))
    return (draw(2, t, n, h), draw(2, t, k, h), draw(h), draw(h)), tables
