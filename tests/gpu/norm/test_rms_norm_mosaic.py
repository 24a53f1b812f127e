"""The Hopper gradients of RMSNorm on a GPU, against the reference in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import rms_norm
from jaxkern.pallas.norm import rms_norm as hopper
from tests.gpu.truth import EPSILON, on_hopper, poison, relative_error

pytestmark = on_hopper


@jax.jit
def gradients(x, weight, dy):
    x32 = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt((x32 * x32).mean(-1, keepdims=True) + 1e-6)
    dx, dweight, _ = hopper.rms_norm_bwd(
        x, weight, None, rstd, dy, eps=1e-6, offset=1.0, wanted=(True, True, False)
    )
    return dx, dweight


def draw(rows, dtype, d=128):
    rng = np.random.default_rng(rows)
    x, dy = (jnp.asarray(rng.standard_normal((rows, d)), dtype) for _ in range(2))
    return x, jnp.asarray(rng.standard_normal(d), jnp.float32), dy


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("d", hopper.FASTER)
@pytest.mark.parametrize("rows", [1, 31, 300, 4096, 4097, 13001, 131072])
def test_gradients_of_many_and_few_rows(rows, d, dtype):
    x, weight, dy = draw(rows, dtype, d)
    poison(x, weight, x[:132])
    found = gradients(x, weight, dy)
    again = gradients(x, weight, dy)
    u, w, slope = (np.asarray(v, np.float64) for v in (x, weight, dy))
    rstd = 1 / np.sqrt((u * u).mean(-1, keepdims=True) + 1e-6)
    normed, along = u * rstd, slope * (w + 1)
    dx = rstd * (along - normed * (along * normed).mean(-1, keepdims=True))
    assert relative_error(found[0], dx) < EPSILON[dtype]
    assert relative_error(found[1], (slope * normed).sum(0)) < EPSILON["float32"]
    for y, same in zip(found, again, strict=True):
        np.testing.assert_array_equal(y, same)


def test_a_bad_row_spoils_no_other():
    x, weight, dy = draw(5000, "bfloat16")
    dx, _ = gradients(x, weight, dy)
    spoilt, dweight = gradients(x.at[4999, 3].set(jnp.nan), weight, dy)
    np.testing.assert_array_equal(spoilt[:4999], dx[:4999])
    assert jnp.isnan(spoilt[4999]).all() and jnp.isnan(dweight).all()


def test_jit_and_vmap_and_grad_choose_it():
    x, weight, dy = draw(2 * 16384, "bfloat16")

    def slopes(x, dy):
        y, pull = jax.vjp(lambda x, w: rms_norm(x, w, offset=1.0), x, weight)
        return pull(dy.astype(y.dtype))

    assert "mosaic_gpu" in jax.jit(slopes).lower(x, dy).as_text()
    whole = jax.jit(slopes)(x, dy)
    assert relative_error(whole[0], gradients(x, weight, dy)[0]) < 1e-3
    halves = [v.reshape(2, -1, 128) for v in (x, dy)]
    dx, dweight = jax.jit(jax.vmap(slopes))(*halves)
    assert relative_error(dx.reshape(-1, 128), whole[0]) < 1e-6
    np.testing.assert_allclose(dweight.sum(0), whole[1], rtol=1e-4, atol=1e-2)
