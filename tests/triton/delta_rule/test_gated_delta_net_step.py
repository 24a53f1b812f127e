"""The kernel of gated_delta_net_step: its launch, and its values in the interpreter."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain, gated_delta_net_step
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.primitives.delta_rule.gated_delta_net_step import (
    gated_delta_net_step_reference,
)
from jaxkern.testing.interpreter import evaluated
from jaxkern.triton.delta_rule import gated_delta_net_step as kernel
from jaxkern.triton.norm import split_rows
from tests.primitives.delta_rule.test_gated_delta_net_step import draw
from tests.triton.clusters import in_a_cluster
from tests.triton.interpreted import (
    INTERPRETED,
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

SHAPES = [  # b, k, group, h, hv, w: heads that share a key, odd dims, no window
    (2, 2, 2, 4, 3, 4),
    (1, 1, 3, 5, 16, 2),
    (3, 2, 1, 8, 1, 1),
    (1, 1, 2, 300, 16, 4),  # two blocks of rows
]


@starts_it
@pytest.mark.skipif(bridge.triton is None, reason="triton is not installed")
def test_in_a_process_of_its_own():
    check_in_its_own_process(__file__, 2 * len(SHAPES) + 3)


@pytest.mark.skipif(INTERPRETED or bridge.missing() is not None, reason="no compiler")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_is_one_launch_in_place_without_spilling(dtype):
    x = draw(1, 16, 2, 128, 128)
    x["qkv"], x["gate"] = (x[name].astype(dtype) for name in ("qkv", "gate"))
    for capability in (80, 90):
        with compiling_for(capability):
            [row] = explain(gated_delta_net_step, **x, platform="cuda").rows
            [launch] = row.launches
            assert row.runs.startswith("triton") and launch.stack_bytes == 0
            programs = 4 if capability == 90 else 1
            assert launch.cluster == programs and launch.grid == (32 * programs,)
    text = jax.jit(gated_delta_net_step).trace(**x).lower(lowering_platforms=("cuda",))
    assert re.search(r"output_tuple_indices = \[2\], operand_index = 9", text.as_text())


@pytest.mark.skipif(INTERPRETED or bridge.missing() is not None, reason="no compiler")
@pytest.mark.parametrize(
    "h, hv, state",
    [
        (64, 64, "float32"),
        (256, 128, "float32"),
        (256, 256, "float32"),
        (128, 128, "bfloat16"),
        pytest.param(64, 256, "float32", marks=pytest.mark.full),
        pytest.param(128, 256, "float16", marks=pytest.mark.full),
    ],
)
def test_heads_of_every_size_fit_registers(h, hv, state):
    x = draw(1, 2, 2, h, hv)
    x["state"] = x["state"].astype(state)
    for capability in (80, 90):
        with compiling_for(capability):
            [row] = explain(gated_delta_net_step, **x, platform="cuda").rows
            [launch] = row.launches
            assert launch.stack_bytes == 0


@pytest.mark.skipif(INTERPRETED or bridge.missing() is not None, reason="no compiler")
def test_wide_values_are_left_to_xla():
    x = draw(1, 1, 1, 1, 1025)
    [row] = explain(gated_delta_net_step, **x, platform="cuda").rows
    assert row.runs.startswith("xla")
    assert "values of 1025 dims, above 1024" in row.refused[0]


@alone
@pytest.mark.parametrize("counts", [None, [0, 1, 1]])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape, counts):
    x = draw(*shape)
    counts = counts and jnp.array(counts[-shape[0] :])
    expected = evaluated(
        functools.partial(gated_delta_net_step_reference, eps=1e-3), *x.values(), counts
    )
    with interpreted():
        found = kernel.gated_delta_net_step(*x.values(), counts, eps=1e-3)
    for y, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, e, atol=2e-5)
    if counts is not None and not counts[0]:
        np.testing.assert_array_equal(found[2][0], x["state"][0])
        np.testing.assert_array_equal(found[1][0], x["inputs"][0])


@alone
@pytest.mark.parametrize("hv, programs", [(64, 2), (70, 4)])
def test_a_cluster_has_the_value_dims_of_a_head(monkeypatch, hv, programs):
    """Of the last one fewer, or none."""
    x = draw(2, 2, 2, 40, hv)
    counts = jnp.array([0, 1])
    expected = evaluated(
        functools.partial(gated_delta_net_step_reference, eps=1e-3), *x.values(), counts
    )
    step = functools.partial(kernel.gated_delta_net_step, eps=1e-3)
    found, [(cluster, constants)] = in_a_cluster(
        monkeypatch, step, *x.values(), counts, kernel=split_rows
    )
    assert cluster == constants["CLUSTER"] == programs
    assert constants["grid"] == (2 * 4 * programs,)
    for y, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(y[1], e[1], atol=2e-5)
    np.testing.assert_array_equal(found[1][0], x["inputs"][0])
    np.testing.assert_array_equal(found[2][0], x["state"][0])


@alone
def test_gates_far_from_zero():
    x = draw(1, 1, 2, 4, 4)
    for rate in (200.0, -60.0):
        x["rate"] = jnp.full((1, 2), rate)
        expected = evaluated(
            functools.partial(gated_delta_net_step_reference, eps=1e-3),
            *x.values(),
            None,
        )
        with interpreted():
            found = kernel.gated_delta_net_step(*x.values(), None, eps=1e-3)
        for y, e in zip(found, expected, strict=True):
            assert np.isfinite(y).all()
            np.testing.assert_allclose(y, e, atol=2e-5)
