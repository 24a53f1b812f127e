"""Rows in clusters of Hopper's multiprocessors, on a machine without a GPU."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxkern import cross_entropy, explain, softmax
from jaxkern.gpu.device import compiling_for
from jaxkern.pallas.activation import softmax as hopper
from jaxkern.pallas.rows import plan as plans

ROWS = jax.ShapeDtypeStruct((64, 131072), jnp.bfloat16)


@pytest.mark.parametrize(
    "d, kilobytes",
    [
        (25088, 60),  # clusters of 2, of 4 for the gradient, with different ends
        pytest.param(24960, 60, marks=pytest.mark.full),  # lines of 128
        pytest.param(8192, 60, marks=pytest.mark.full),  # no cluster
    ],
)
def test_in_the_interpreter(d, kilobytes):
    """24 threads wait for each other, so the runtime needs as many."""
    subprocess.run(
        [sys.executable, "-m", "tests.pallas.interpreted_rows", str(d), str(kilobytes)],
        env=os.environ | {"NPROC": "32", "JAX_PLATFORMS": "cpu"},
        check=True,
        timeout=300,
    )


@pytest.mark.parametrize("d", [4096, 32000, 50304, 128256, 131072, 151936, 262144])
@pytest.mark.parametrize("bytes_of_element", [2, 4, 8])
def test_a_plan_covers_each_row(monkeypatch, d, bytes_of_element):
    monkeypatch.setattr(plans, "num_sms", lambda: 132)
    c = plans.plan(1000, d, bytes_of_element)
    if c is None:
        assert d * bytes_of_element > 3.5 * plans.SHARED
        return
    most, fewest = c.tails
    assert 0 < fewest <= most <= c.chunk[0]
    before = (c.chunks - 1) * c.chunk[0]
    lines = (c.cluster - 1) * (before + most) + before + fewest
    assert lines * c.width == d
    assert c.slots > c.chunks
    assert c.slots * c.chunk[0] * c.width * bytes_of_element <= plans.SHARED


def test_it_runs_where_it_was_measured():
    short = jax.ShapeDtypeStruct((64, 65536), jnp.bfloat16)
    odd = jax.ShapeDtypeStruct((64, 131073), jnp.bfloat16)
    double = jax.ShapeDtypeStruct((64, 131072), jnp.float64)
    with compiling_for(90):
        assert hopper.unsupported(x=ROWS, scale=1.0) is None
        assert hopper.slower(x=ROWS, scale=1.0) is None
        assert "stays in the caches" in str(hopper.slower(x=short, scale=1.0))
        for x, why in ((odd, "no multiple of 64"), (double, "none of bfloat16")):
            assert why in str(hopper.unsupported(x=x, scale=1.0))
        assert "mask" in str(hopper.unsupported(x=ROWS, mask=ROWS, scale=1.0))
    with compiling_for(80):
        assert "not 90" in str(hopper.unsupported(x=ROWS, scale=1.0))


def slopes(x):
    return jax.vjp(softmax, x)[1](x)


def loss_and_gradient(x):
    labels = jnp.zeros(x.shape[:-1], int)
    return jax.value_and_grad(cross_entropy)(x, labels, reduction="mean")


@pytest.mark.parametrize("f", [slopes, loss_and_gradient])
def test_it_lowers_for_hopper(f):
    with compiling_for(90):
        text = str(explain(f, ROWS, platform="cuda"))
        assert "mosaic_gpu: pallas." in text
        assert "clusters of" in text
        lowered = jax.jit(f).trace(ROWS).lower(lowering_platforms=("cuda",))
        assert "@mosaic_gpu" in lowered.as_text()
