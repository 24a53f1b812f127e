"""The kernel of gated_delta_net_verify: its launch, its values in the interpreter."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain, gated_delta_net_verify
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.primitives.delta_rule.gated_delta_net_verify import (
    gated_delta_net_verify_reference,
)
from jaxkern.triton.delta_rule import gated_delta_net_verify as kernel
from tests.primitives.delta_rule.test_gated_delta_net_verify import draw
from tests.triton.interpreted import (
    INTERPRETED,
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

SHAPES = [  # b, t, k, group, h, hv, w: heads that share a key, odd dims; no window
    (3, 3, 2, 2, 5, 3, 4),
    (4, 8, 2, 1, 8, 1, 1),
]


@starts_it
@pytest.mark.skipif(bridge.triton is None, reason="triton is not installed")
def test_in_a_process_of_its_own():
    check_in_its_own_process(__file__, len(SHAPES))


def launched(x, capability):
    """How it runs, and its one launch."""
    with compiling_for(capability):
        [row] = explain(gated_delta_net_verify, **x, platform="cuda").rows
    return row, *row.launches


@pytest.mark.skipif(INTERPRETED or bridge.missing() is not None, reason="no compiler")
@pytest.mark.parametrize(
    "t, dtype",
    [
        (4, "bfloat16"),
        *(
            pytest.param(t, dtype, marks=pytest.mark.full)
            for t in (2, 3, 8)
            for dtype in ("bfloat16", "float32")
        ),
    ],
)
def test_it_is_one_launch_in_place_without_spilling(t, dtype):
    x = draw(1, t, 16, 2, 128, 128) | {"accepted": jnp.zeros(1, jnp.int32)}
    x["qkv"], x["gate"] = (x[name].astype(dtype) for name in ("qkv", "gate"))
    for capability in (80, 90):
        row, launch = launched(x, capability)
        assert row.runs.startswith("triton") and launch.stack_bytes == 0
    step = jax.jit(gated_delta_net_verify).trace(**x)
    text = step.lower(lowering_platforms=("cuda",)).as_text()
    pairs = {2: 9, 3: 10, 4: 11, 5: 12}  # state, keys, corrections, g
    for result, operand in pairs.items():
        found = f"output_tuple_indices = \\[{result}\\], operand_index = {operand}"
        assert re.search(found, text)


@pytest.mark.skipif(INTERPRETED or bridge.missing() is not None, reason="no compiler")
@pytest.mark.parametrize(
    "shape, reason",
    [
        ((1, 9, 1, 1, 4, 4), "9 tokens a call, above 8"),
        ((1, 2, 1, 1, 256, 128), "a state of 256 x 128 numbers, above 16384"),
    ],
    ids=str,
)
def test_what_is_left_to_xla(shape, reason):
    x = draw(*shape) | {"accepted": jnp.zeros(1, jnp.int32)}
    [row] = explain(gated_delta_net_verify, **x, platform="cuda").rows
    assert row.runs.startswith("xla") and reason in row.refused[0]


@alone
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape):
    """Rows keep none of the last call's tokens, all of them, or what lies between.

    Gates are far from zero, a decay is to nothing, and what the row that keeps none has
    of its last call is NaN.
    """
    b, t = shape[:2]
    x = draw(*shape)
    x["rate"] = x["rate"].at[:, 0].set(200.0).at[:, -1].set(-60.0)
    x["g"] = x["g"].at[-1, 1].set(-jnp.inf)
    x["keys"] = x["keys"].at[0].set(jnp.nan)
    operands = (*x.values(), jnp.arange(b) * t // (b - 1))
    reference = functools.partial(gated_delta_net_verify_reference, eps=1e-3)
    with jax.enable_x64(True):
        exact = [y.astype(jnp.float64) for y in operands[:-1]]
        expected = jax.jit(reference)(*exact, operands[-1])
    with interpreted():
        found = kernel.gated_delta_net_verify(*operands, eps=1e-3)
    for y, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, e, atol=5e-5)
    np.testing.assert_array_equal(found[2][0], x["state"][0])
