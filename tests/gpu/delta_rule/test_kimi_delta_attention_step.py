"""Kernel of kimi_delta_attention_step on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, kimi_delta_attention_step
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "b, k, group, h, hv", [(4, 32, 1, 128, 128), (3, 2, 3, 100, 70), (2, 1, 1, 1, 1)]
)
def test_step(b, k, group, h, hv, dtype):
    rng = np.random.default_rng(h)

    def draw(*shape, of=dtype):
        return jnp.asarray(rng.standard_normal(shape), of)

    n = k * group
    query, key, value = draw(b, k, h), draw(b, k, h) * h**-0.5, draw(b, n, hv)
    g = -jnp.abs(draw(b, n, h, of="float32"))
    beta = jnp.abs(draw(b, n, of="float32")) / 2
    state = draw(b, n, h, hv, of="float32")
    operands = (query, key, value, g, beta, state)
    with backend("triton", strict=True):
        jax.block_until_ready(jax.jit(kimi_delta_attention_step)(*operands))
    # the gradient has no kernel
    check_against_float64(kimi_delta_attention_step, *operands, slack=2.0, strict=False)
