"""The kernel that quantises new tokens into a cache on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    QuantizedVectors,
    TurboQuantCodec,
    backend,
    update_quantized_kv_cache,
)
from tests.gpu.truth import on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("bits", [3, 4, 7])
def test_a_cache_takes_new_tokens(bits):
    codec = TurboQuantCodec(bits)
    cache = QuantizedVectors.zeros((2, 16, 3, 128), codec)
    new = jax.random.normal(jax.random.key(0), (2, 5, 3, 128), jnp.bfloat16)
    written = {}
    for name in ("triton", "xla"):
        with backend(name, strict=name == "triton"):
            written[name] = jax.jit(update_quantized_kv_cache)(
                cache, new, jnp.array([3, 9])
            )
    np.testing.assert_allclose(
        written["triton"].scales, written["xla"].scales, rtol=1e-5
    )
    same = written["triton"].codes == written["xla"].codes
    assert same.mean() > 0.99
