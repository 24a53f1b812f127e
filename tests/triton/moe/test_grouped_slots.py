"""Packed experts of many tokens: by lanes, and as machine code."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.moe.row_tiles import row_tiles
from jaxkern.primitives.moe.expert_order import expert_order
from jaxkern.primitives.moe.expert_slots import expert_hidden, expert_sum
from tests.primitives.moe.test_expert_slots import GPT_OSS, hidden_of, sum_of
from tests.triton.moe.test_expert_slots import drawn
from tests.triton.quant import lanes
from tests.triton.test_every_kernel import launches_of

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
E = 4
WORDS = {"mxfp4": 16}  # of a lane, else 2


def ids_of(tokens, k):
    """Most slots of one expert, one of another, none of a third, some of none."""
    ids = np.full((tokens, k), 1, np.int32)
    ids[0, 0], ids[1, -1], ids[2, 0] = 3, -1, E
    ids[3:5, 1:] = 0
    return ids


def by_lanes(f, operands, arrays, columns):
    """What every program of the one launch of an op writes."""
    with compiling_for(90):
        *_, launch = launches_of(f, operands)  # behind that of the order
    ids = operands[1]
    order, sizes = expert_order(jnp.asarray(ids), E)
    table, count = row_tiles(sizes, ids.size, columns)
    given = dict(order_ptr=order, table_ptr=table, count_ptr=count) | arrays
    given = lanes.side_by_side({n: np.asarray(a) for n, a in given.items()})
    assert int(count[0]) > E - 1
    for place in range(launch.grid[0]):
        lanes.run(launch, given, (place,))
    return given["y_ptr"]


def wide(x):
    return np.asarray(x, np.float64)


def check(y, f, *weights):
    """y is f of the weights, but for what rounding them to bfloat16 would change."""
    truth = f(*weights).reshape(y.shape)
    rounded = (wide(w.astype(ml_dtypes.bfloat16)) for w in weights)
    by_rounding = np.linalg.norm(f(*rounded).reshape(y.shape) - truth)
    bound = 1.5 * by_rounding + 2e-6 * np.linalg.norm(truth)
    assert np.linalg.norm(y - truth) <= bound


def named(**weights):
    """The pointers of containers."""
    found = {}
    for name, w in weights.items():
        leaves = jax.tree.leaves(w)
        found |= dict(zip((f"{name}_ptr", f"{name}_scales_ptr"), leaves, strict=False))
    return found


@pytest.mark.parametrize(
    "kind, d, f, both",
    [
        ("MXFP4", 320, 64, False),  # as of gpt-oss the last step is of 64 columns
        pytest.param("Q4_K", 256, 64, True, marks=pytest.mark.full),
        pytest.param("mxfp4", 160, 48, False, marks=pytest.mark.full),
        pytest.param("Q8_0", 544, 16, False, marks=pytest.mark.full),
        pytest.param("mxfp4", 416, 96, True, marks=pytest.mark.full),
    ],
)
def test_lanes_give_what_experts_give(kind, d, f, both):
    """Sizes that nothing divides, a table of several tiles of one expert."""
    rng = np.random.default_rng(d)
    ids = ids_of(24, 2)
    x = rng.standard_normal((len(ids), d)).astype(ml_dtypes.bfloat16)
    (gate, g), (up, u) = (drawn(rng, kind, E, f, d) for _ in range(2))
    biases = [rng.standard_normal((E, f)).astype(np.float32) for _ in range(2)]
    y = np.full((ids.size, f), np.nan, np.float32)
    operands = x, ids, gate, up, *biases
    arrays = named(gate=gate, up=up) | dict(gate_bias_ptr=biases[0], y_ptr=y)
    arrays["up_bias_ptr"] = biases[1]
    if both:
        packed = jax.tree.map(lambda *a: np.concatenate(a, axis=1), gate, up)
        bias = np.concatenate(biases, axis=1)
        operands = x, ids, packed, None, bias, None
        arrays = named(gate=packed) | dict(gate_bias_ptr=bias, y_ptr=y)
    arrays["x_ptr"] = lanes.in_lane_order(x, WORDS.get(kind, 2))
    hidden = functools.partial(expert_hidden, **GPT_OSS)
    y = by_lanes(hidden, operands, arrays, 32)
    check(y, lambda g, u: hidden_of(wide(x), ids, g, u, biases, None, GPT_OSS), g, u)


@pytest.mark.parametrize(
    "kind, d, f",
    [
        ("mxfp4", 160, 80),
        pytest.param("Q6_K", 512, 16, marks=pytest.mark.full),
        pytest.param("MXFP4", 320, 80, marks=pytest.mark.full),
    ],
)
def test_lanes_give_the_results_of_slots(kind, d, f):
    rng = np.random.default_rng(d)
    ids = ids_of(24, 2)
    x = rng.standard_normal((*ids.shape, d)).astype(ml_dtypes.bfloat16)
    down, w = drawn(rng, kind, E, f, d)
    bias = rng.standard_normal((E, f)).astype(np.float32)
    y = np.full((ids.size, f), np.nan, np.float32)
    ones = np.ones(ids.shape, np.float32)
    rows = lanes.in_lane_order(x.reshape(-1, d), WORDS.get(kind, 2))
    arrays = named(down=down) | dict(bias_ptr=bias, x_ptr=rows, y_ptr=y)
    y = by_lanes(expert_sum, (x, ids, ones, down, bias, None), arrays, 32)
    by_slot = wide(x).reshape(-1, 1, d), ids.reshape(-1, 1), np.ones((ids.size, 1))
    check(y, lambda w: sum_of(*by_slot, w, bias, None, None), w)
