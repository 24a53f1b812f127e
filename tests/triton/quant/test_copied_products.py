"""One normalised activation, rows that bulk copies bring, lane by lane in Python."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.triton.quant import dense_products
from tests.triton.quant import lanes
from tests.triton.test_every_kernel import spec

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)

EPS = 1e-5


def launch_of(x, w, norm, bias=None, activation=None, capability=90):
    def product(x, w, norm, bias):
        around: dict = dict(norm=norm, bias=bias, eps=EPS, activation=activation)
        return dense_products.launch(x, w, **around, dtype=jnp.float32)

    with compiling_for(capability):
        jaxpr = jax.make_jaxpr(product)(x, w, norm, bias).jaxpr
    [eqn] = [e for e in jaxpr.eqns if e.primitive is bridge.triton_call_p]
    return eqn.params["launch"]


def activated(y, activation):
    z = 2 * (2 / np.pi) ** 0.5 * (y + 0.044715 * y**3)
    return y / (1 + np.exp(-(z if activation == "gelu_tanh" else y)))


@pytest.mark.parametrize("d, gated", dense_products.BY_COPIES)
@pytest.mark.parametrize("f, biased", [(5, True), (4, False)])
def test_sums_are_those_of_rows(f, biased, d, gated):
    rng = np.random.default_rng(d)
    activation = ("gelu_tanh" if biased else "silu") if gated else None
    x = rng.standard_normal((1, d)).astype(ml_dtypes.bfloat16)
    w = rng.standard_normal((2, f, d) if gated else (f, d)) / d**0.5
    w = w.astype(ml_dtypes.bfloat16)
    norm = rng.uniform(0.5, 1.5, d).astype(np.float32)
    bias = rng.standard_normal(f).astype(np.float32) if biased else None
    launch = launch_of(x, w, norm, bias, activation)
    assert launch.name == "copied_products_kernel"
    given = dict(x_ptr=x, w_ptr=w, norm_ptr=norm, bias_ptr=bias)
    held = lanes.side_by_side(given | {"y_ptr": np.full((1, f), np.nan, np.float32)})
    for program in range(launch.grid[0]):
        present = {name: a for name, a in held.items() if a is not None}
        lanes.run(launch, present, (program, 0))
    x = x.astype(np.float64)
    x = x / np.sqrt((x**2).mean() + EPS) * norm
    y = x @ np.swapaxes(w.astype(np.float64), -1, -2)
    truth = activated(y[0], activation) * y[1] if gated else y
    if bias is not None:
        truth += bias
    np.testing.assert_allclose(held["y_ptr"], truth, rtol=0, atol=2e-6)


NORM = spec(2048, dtype="float32")


@pytest.mark.parametrize(
    "x, w, norm, capability",
    [
        (spec(1, 2048), spec(64, 2048), NORM, 80),
        (spec(2, 2048), spec(64, 2048), NORM, 90),
        (spec(1, 2048, dtype="float32"), spec(64, 2048), NORM, 90),
        (spec(1, 2048), spec(64, 2048), spec(2048), 90),
        (spec(1, 1536), spec(64, 1536), spec(1536, dtype="float32"), 90),
    ],
    ids=["an A100", "two rows", "float32", "a norm of bfloat16", "another length"],
)
def test_others_are_multiplied_as_before(x, w, norm, capability):
    launch = launch_of(x, w, norm, capability=capability)
    assert launch.name == "few_products_kernel"


@pytest.mark.parametrize("d, gated", dense_products.BY_COPIES)
def test_kernels_compile_and_fit(d, gated):
    w = spec(2, 64, d) if gated else spec(64, d)
    activation = "silu" if gated else None
    launch = launch_of(spec(1, d), w, spec(d, dtype="float32"), activation=activation)
    with compiling_for(90):
        assert launch.stack_bytes == 0
        assert launch.registers <= 64  # so that programs of three kernels fit
        assert launch.dynamic_bytes <= bridge.max_shared_bytes()
