"""Kernels of gated_delta_net_inputs on a GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.primitives.delta_rule.gated_delta_net_inputs import (
    gated_delta_net_inputs_p,
)
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "b, t, key_heads, key_dim, value_heads, gate, rest, w",
    [
        (2, 300, 4, 128, 8, 1024, 16, 4),
        (1, 70, 3, 128, 1, 100, 7, 3),
        (3, 65, 2, 256, 2, 512, 0, 4),
        (1, 520, 1, 512, 1, 0, 12, 2),
        (2, 16, 1, 128, 2, 8, 8, 1),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_every_part(
    b, t, key_heads, key_dim, value_heads, gate, rest, w, packed, dtype
):
    rng = np.random.default_rng(t)
    c = (2 * key_heads + value_heads) * key_dim

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    ids = jnp.asarray(np.sort(rng.integers(0, 5, (b, t)), 1), jnp.int32)

    def f(x, weight):
        parts = gated_delta_net_inputs_p(
            x,
            weight,
            ids if packed else None,
            key_heads=key_heads,
            key_dim=key_dim,
            gate_columns=gate,
            eps=1e-6,
        )
        return tuple(y for y in parts if y.size)  # what is empty has no error

    check_against_float64(f, draw(b, t, c + gate + rest), draw(c, w), slack=2.0)
