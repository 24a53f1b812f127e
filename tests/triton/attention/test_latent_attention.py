"""The row of latent attention without a GPU: refusals, and tiles that fit."""

import jax.numpy as jnp
import pytest

from jaxkern import explain, latent_attention
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)


def explained(n, value_dim=512, h=576, b=2, t=1, s=3000, dtype=jnp.bfloat16, **options):
    query, latent = jnp.zeros((b, t, n, h), dtype), jnp.zeros((b, s, h), dtype)
    f = lambda *x: latent_attention(*x, value_dim=value_dim, scale=0.1, **options)  # noqa: E731
    return explain(f, query, latent, platform="cuda")


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(n=2, t=9), "9 queries, more than 8"),
        (dict(n=2, dtype=jnp.float32), "`query` is float32"),
        (dict(n=2, value_dim=500), "value_dim 500 is no power of two"),
        (dict(n=2, value_dim=256), "320 dims behind the value, more than 128"),
        (dict(n=2, s=0), "`latent` is empty"),
    ],
)
def test_refusals_in_words(options, reason):
    text = str(explained(**options))
    assert reason in text and "latent_attention_kernel" not in text


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.full), 90])
@pytest.mark.parametrize(
    "options",
    [
        dict(n=128, t=2, causal=True),
        pytest.param(dict(n=128), marks=pytest.mark.full),
        pytest.param(dict(n=16), marks=pytest.mark.full),
        pytest.param(dict(n=32, b=128), marks=pytest.mark.full),
        pytest.param(dict(n=32, window=9), marks=pytest.mark.full),
        pytest.param(dict(n=3, h=512, dtype=jnp.float16), marks=pytest.mark.full),
    ],
)
def test_tiles_fit_and_hardly_spill(options, capability):
    with compiling_for(capability):
        [row] = explained(**options).rows
        assert row.launches[0].name == "latent_attention_kernel"
        for launch in row.launches:
            assert launch.shared_bytes <= bridge.max_shared_bytes(), launch.describe()
            # a thread holds 128 sums; Triton 3.9 spills up to 200 bytes beside them
            assert launch.stack_bytes <= 256, launch.describe()
