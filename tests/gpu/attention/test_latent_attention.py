"""The latent decode kernel on a GPU against the reference in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, latent_attention
from tests.gpu.attention.test_decode_attention import check, draw
from tests.gpu.truth import on_a_gpu, relative_error

pytestmark = on_a_gpu


def ours(**options):
    return functools.partial(latent_attention, return_lse=True, scale=0.07, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("n, t, s", [(128, 1, 4096), (16, 3, 777), (5, 2, 1)])
@pytest.mark.parametrize("h, hv", [(576, 512), (512, 512), (80, 64), (40, 16)])
def test_shapes(h, hv, n, t, s, dtype):
    operands = draw((2, t, n, h), dtype), draw((2, s, h), dtype, 1)
    check(ours(value_dim=hv), *operands)


OPTIONS = {
    "lengths": dict(kv_lengths=[1000, 0, 1, 333]),
    "causal": dict(causal=True, q_offset=[700, 0, -2, 5000]),
    "window": dict(window=200, q_offset=[600, 5, -150, 1300], softcap=3.0),
}


@pytest.mark.parametrize("n, t", [(64, 1), (20, 4), (16, 8)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, n, t):
    options = dict(options)
    arrays = {
        name: jnp.asarray(options.pop(name), jnp.int32)
        for name in ("kv_lengths", "q_offset")
        if name in options
    }

    def f(query, latent, arrays):
        return ours(value_dim=512, **options)(query, latent, **arrays)

    operands = draw((4, t, n, 576), "bfloat16"), draw((4, 1000, 576), "bfloat16", 1)
    out, lse = check(f, *operands, arrays)
    if "kv_lengths" in arrays:
        assert (out[1] == 0).all() and (lse[1] == -jnp.inf).all()


def test_nan_behind_the_lengths_has_no_influence():
    query = draw((3, 1, 32, 576), "bfloat16")
    latent = draw((3, 3000, 576), "bfloat16", 1)
    lengths = jnp.array([0, 1500, 2999])
    behind = (jnp.arange(3000) >= lengths[:, None])[:, :, None]
    with backend("triton", strict=True):
        f = jax.jit(lambda x: ours(value_dim=512)(query, x, kv_lengths=lengths)[0])
        clean, dirty = f(latent), f(jnp.where(behind, jnp.nan, latent))
    np.testing.assert_array_equal(clean, dirty)
    assert np.isfinite(np.asarray(dirty, np.float32)).all()


def test_vmap_of_sequences():
    query = draw((2, 3, 1, 32, 576), "bfloat16")
    latent = draw((2, 3, 500, 576), "bfloat16", 1)
    f = ours(value_dim=512)
    with backend("triton", strict=True):
        found = jax.jit(jax.vmap(f))(query, latent)
        flat = f(query.reshape(6, 1, 32, 576), latent.reshape(6, 500, 576))
    for y, e in zip(found, flat, strict=True):
        assert relative_error(y.reshape(e.shape), e) < 1e-6
