"""The Hopper gradients of RMSNorm on a machine without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain, rms_norm
from jaxkern.gpu.device import compiling_for
from jaxkern.pallas.norm import rms_norm as hopper

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "rows, d, dtype",
    [
        pytest.param(1, 128, "bfloat16", marks=pytest.mark.full),
        (37, 64, "float16"),
        (64, 128, "bfloat16"),  # whole tiles
        pytest.param(300, 256, "bfloat16", marks=pytest.mark.full),
        pytest.param(1485, 128, "bfloat16", marks=pytest.mark.full),  # many rounds
    ],
)
def test_gradients_of_odd_rows(monkeypatch, rows, d, dtype):
    monkeypatch.setattr(hopper, "num_sms", lambda: 8)
    x, dy = (jnp.asarray(RNG.standard_normal((1, rows, d)), dtype) for _ in range(2))
    weight = jnp.asarray(RNG.standard_normal(d), jnp.float32)
    u, w, slope = (np.asarray(v, np.float64) for v in (x, weight, dy))
    rstd = 1 / np.sqrt((u * u).mean(-1, keepdims=True) + 1e-6)
    dx, dweight, _ = hopper.rms_norm_bwd(
        x,
        weight,
        None,
        jnp.float32(rstd),
        dy,
        eps=1e-6,
        offset=1.0,
        wanted=(True, True, False),
        interpret=True,
    )
    along = slope * (w + 1)
    normed = u * rstd
    truth = rstd * (along - normed * (along * normed).mean(-1, keepdims=True))
    step = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(np.asarray(dx, np.float64), truth, rtol=step, atol=1e-5)
    np.testing.assert_allclose(
        np.asarray(dweight), (slope * normed).sum((0, 1)), atol=1e-4
    )


def slopes(x, weight):
    loss = lambda *a: rms_norm(*a).astype(jnp.float32).sum()  # noqa: E731
    return jax.grad(loss, (0, 1))(x, weight)


WEIGHT = jax.ShapeDtypeStruct((128,), jnp.bfloat16)
MANY = jax.ShapeDtypeStruct((4, 8192, 128), jnp.bfloat16)


def test_it_runs_where_it_was_measured():
    operands = dict(x=MANY, weight=WEIGHT, bias=None, dy=MANY)
    with compiling_for(90):
        assert hopper.unsupported(**operands) is None
        assert "no bias" in str(hopper.unsupported(**operands | {"bias": WEIGHT}))
        wide = jax.ShapeDtypeStruct((9, 96), jnp.bfloat16)
        assert "96 columns" in str(
            hopper.unsupported(**operands | dict(x=wide, dy=wide))
        )
    with compiling_for(80):
        assert "not 90" in str(hopper.unsupported(**operands))


@pytest.mark.full
def test_it_lowers_for_hopper():
    with compiling_for(90):
        text = str(explain(slopes, MANY, WEIGHT, platform="cuda"))
        assert "mosaic_gpu: pallas.norm.rms_norm." in text
        traced = jax.jit(slopes).trace(MANY, WEIGHT)
        assert "@mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
