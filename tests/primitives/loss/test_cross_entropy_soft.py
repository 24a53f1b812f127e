"""soft_cross_entropy: cases of its rules; test_cross_entropy.py has its values."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern import cross_entropy
from jaxkern.testing.checks import bf16, case, f32, uniform

CASES = {
    "soft_cross_entropy": [
        case(
            "every_option",
            logits=f32(2, 8, 5, scale=2),
            targets=uniform(2, 8, 5),
            class_weights=uniform(5, low=0.5, high=2.0),
            z_loss=0.01,
            softcap=3.0,
        ),
        case(
            "bf16", logits=bf16(3, 17), targets=uniform(3, 17), z_loss=0.0, softcap=None
        ),
        case(
            "llama3_8b",
            full=True,
            logits=bf16(16, 128256),
            targets=uniform(16, 128256, high=1e-5),
            z_loss=0.0,
            softcap=None,
            ulps=16,
        ),
    ],
}


def test_one_hot_probabilities_are_labels():
    rng = np.random.default_rng(0)
    logits, labels = jnp.float32(rng.standard_normal((5, 9))), rng.integers(0, 9, 5)
    options = dict(z_loss=0.1, softcap=4.0, label_smoothing=0.2)

    def loss(x, labels):
        return cross_entropy(x, labels, **options).sum()

    for found, expected in zip(
        jax.value_and_grad(loss)(logits, jnp.eye(9)[labels]),
        jax.value_and_grad(loss)(logits, jnp.asarray(labels)),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
