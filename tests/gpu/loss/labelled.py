"""Logits and labels of the tests of losses, and every option at once."""

import jax.numpy as jnp
import numpy as np

EVERY = dict(label_smoothing=0.1, z_loss=0.01, softcap=5.0, ignore_index=2)


def draw(*shape, dtype="float32", scale=3.0):
    values = np.random.default_rng(list(shape)).standard_normal(shape)
    return jnp.asarray(scale * values, dtype)


def draw_labels(rows, v):
    labels = np.random.default_rng(rows).integers(0, v, rows)
    return jnp.asarray(labels, jnp.int32).at[:3].set(jnp.array([2, -100, v - 1]))
