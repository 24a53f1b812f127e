"""Rows of bfloat16 and one activation by tensor cores, lane by lane in Python."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern.gpu import peer_sum
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.triton.quant import dense_products
from tests.triton.quant import lanes
from tests.triton.test_every_kernel import spec

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)


def launch_of(x, w, norm=None, residual=None, activation=None, dtype="float32"):
    def product(x, w, norm, residual):
        around: dict = dict(norm=norm, residual=residual, activation=activation)
        return dense_products.launch(x, w, **around, dtype=jnp.dtype(dtype))

    with compiling_for(90):
        jaxpr = jax.make_jaxpr(product)(x, w, norm, residual).jaxpr
    [eqn] = [e for e in jaxpr.eqns if e.primitive is bridge.triton_call_p]
    return eqn.params["launch"]


def result_of(launch, f, **arrays):
    """[1, f], of all programs one after the other."""
    arrays["y_ptr"] = np.full((1, f), np.nan, np.float32)
    held = lanes.side_by_side(arrays)
    given = {name: a for name, a in held.items() if a is not None}
    for program in range(launch.grid[0]):
        lanes.run(launch, given, (program, 0))
    return held["y_ptr"]


@pytest.mark.parametrize(
    "f, d, added",
    [(5, d, True) for d in dense_products.BY_LANES]
    + [(4, d, False) for d in dense_products.BY_LANES if d <= dense_products.SUMMED],
)
def test_sums_are_those_of_rows(f, d, added):
    rng = np.random.default_rng(d)
    x = rng.standard_normal((1, d)).astype(ml_dtypes.bfloat16)
    w = rng.standard_normal((f, d)).astype(ml_dtypes.bfloat16)
    residual = rng.standard_normal((1, f)).astype(np.float32) if added else None
    launch = launch_of(x, w, residual=residual)
    assert launch.name == "lane_products_kernel"
    found = result_of(launch, f, x_ptr=x, w_ptr=w, residual_ptr=residual)
    truth = x.astype(np.float64) @ w.astype(np.float64).T
    if residual is not None:
        truth += residual
    np.testing.assert_allclose(found, truth, rtol=0, atol=2e-5)


def test_not_a_number_stays_in_its_row():
    """Products of two lanes' columns are computed as well, and not looked at."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 512)).astype(ml_dtypes.bfloat16)
    w = rng.standard_normal((4, 512)).astype(ml_dtypes.bfloat16)
    w[1, 77] = np.nan
    with np.errstate(invalid="ignore"):
        found = result_of(launch_of(x, w), 4, x_ptr=x, w_ptr=w)
    assert np.isnan(found[0]).tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    "x, w, more",
    [
        (spec(2, 2048), spec(64, 2048), {}),
        (spec(1, 8192), spec(64, 8192), {}),
        (spec(1, 2048, dtype="float32"), spec(64, 2048), {}),
        (spec(1, 1024), spec(64, 1024), {"norm": spec(1024, dtype="float32")}),
        (spec(1, 2048), spec(2, 64, 2048), {}),
    ],
    ids=["two rows", "another length", "float32", "a norm", "gated"],
)
def test_others_are_multiplied_as_before(x, w, more):
    activation = "silu" if len(w.shape) == 3 else None
    launch = launch_of(x, w, **more, activation=activation)
    assert launch.name == "few_products_kernel"


def test_a_part_of_a_sum_is_sent_by_the_other_kernel():
    x, w = spec(1, 4096), spec(64, 4096)
    assert launch_of(x, w).name == "few_products_kernel"
    residual = spec(1, 64, dtype="float32")
    assert launch_of(x, w, residual=residual).name == "lane_products_kernel"
    assert launch_of(x, w, dtype="bfloat16").name == "lane_products_kernel"
    logits = spec(peer_sum.MOST + 1, 4096)
    assert launch_of(x, logits).name == "lane_products_kernel"


@pytest.mark.parametrize(
    "d, capability", [(512, 80), (2048, 80), (2048, 90), (4096, 90)]
)
def test_kernels_compile_and_fit(d, capability):
    launch = launch_of(spec(1, d), spec(64, d), dtype="bfloat16")
    with compiling_for(capability):
        assert launch.stack_bytes == 0
        assert launch.shared_bytes <= bridge.max_shared_bytes()
