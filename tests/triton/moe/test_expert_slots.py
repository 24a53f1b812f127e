"""Experts of a few tokens: kernels of packed rows by lanes, and as machine code."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern import backend, dequantize, explain, quantize_microscaled
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.primitives.moe.expert_slots import expert_hidden, expert_sum
from jaxkern.triton.quant.block_codes import BYTES
from tests.primitives.moe.test_expert_slots import GPT_OSS, PLAIN, hidden_of, sum_of
from tests.triton.quant import lanes
from tests.triton.quant.test_one_activation import weights
from tests.triton.test_every_kernel import launches_of, spec
from tests.triton.test_every_kernel import packed as shaped_tiles

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
E, TOKENS = 3, 2
IDS = np.array([[2, 0, 3], [1, -1, 4]], np.int32)  # 3 is the shared one's, if any


def drawn(rng, kind, *shape):
    """(container, the same in float64)."""
    *lead, f, d = shape
    if kind.isupper():  # of blocks
        w, values = weights(rng, kind, int(np.prod(lead, dtype=int)) * f, d)
        tiles = np.asarray(w.tiles).reshape(*lead, f // 16, -1)
        return type(w)(tiles, kind), values.reshape(shape)
    w = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    packed = quantize_microscaled(w, format=kind, two_level=False)
    return jax.tree.map(np.asarray, packed), np.asarray(dequantize(packed), float)


def by_lanes(f, operands, y):
    """y as every program of the one launch of an op writes it.

    The shared expert, which an op's kernel has before what is added, is the last.
    """
    with compiling_for(90):
        [launch] = launches_of(f, operands)
    names = [n for n in launch.kernel.arg_names if n not in dict(launch.constants)]
    *others, one, other, shared = operands
    flat = jax.tree.leaves((*others, shared, one, other))
    if "zeros_ptr" in names:
        flat.append(np.zeros(64, ml_dtypes.bfloat16))
    given = lanes.side_by_side(dict(zip(names, [*flat, y], strict=True)))
    for place in np.ndindex(*launch.grid):
        lanes.run(launch, given, tuple(map(int, place)))
    return given["y_ptr"]


@pytest.mark.parametrize(
    "kind, d, f, shared",
    [
        pytest.param("Q4_K", 1280, 16, True, marks=pytest.mark.full),
        pytest.param("Q8_0", 352, 16, False, marks=pytest.mark.full),
        ("mxfp4", 160, 24, False),
        pytest.param("nvfp4", 192, 16, True, marks=pytest.mark.full),
    ],
)
def test_lanes_give_what_experts_give(kind, d, f, shared):
    rng = np.random.default_rng(d)
    options = PLAIN if shared else GPT_OSS
    x = rng.standard_normal((TOKENS, d)).astype(ml_dtypes.bfloat16)
    (gate, g), (up, u) = (drawn(rng, kind, E, f, d) for _ in range(2))
    biases = [None if shared else rng.standard_normal((E, f)) for _ in range(2)]
    (both, b) = drawn(rng, kind, 2 * f, d) if shared else (None, None)
    narrow = [None if a is None else a.astype(np.float32) for a in biases]
    hidden = functools.partial(expert_hidden, **options)
    unwritten = np.full((*IDS.shape, f), np.nan, np.float32)
    y = by_lanes(hidden, (x, IDS, gate, up, *narrow, both), unwritten)
    truth = hidden_of(x.astype(float), IDS, g, u, biases, b, options)
    assert np.linalg.norm(y - truth) <= 2e-6 * np.linalg.norm(truth)
    packed = jax.tree.map(lambda *a: np.concatenate(a, axis=1), gate, up)
    bias = None if shared else np.concatenate(narrow, axis=1)
    same = by_lanes(hidden, (x, IDS, packed, None, bias, None, both), unwritten)
    np.testing.assert_array_equal(same, y)


@pytest.mark.parametrize(
    "kind, d, f, shared",
    [
        ("Q4_K", 512, 16, True),
        pytest.param("Q8_0", 352, 16, False, marks=pytest.mark.full),
        pytest.param("mxfp4", 672, 24, True, marks=pytest.mark.full),
        pytest.param("nvfp4", 192, 16, False, marks=pytest.mark.full),
    ],
)
def test_lanes_give_the_weighted_sum(kind, d, f, shared):
    rng = np.random.default_rng(d)
    x = rng.standard_normal((*IDS.shape, d)).astype(ml_dtypes.bfloat16)
    by_expert = rng.uniform(0, 1, IDS.shape).astype(np.float32)
    down, w = drawn(rng, kind, E, f, d)
    bias = None if shared else rng.standard_normal((E, f)).astype(np.float32)
    residual = rng.standard_normal((TOKENS, f)).astype(ml_dtypes.bfloat16)
    (back, b) = drawn(rng, kind, f, d) if shared else (None, None)
    y = np.full((TOKENS, f), np.nan, np.float32)
    y = by_lanes(expert_sum, (x, IDS, by_expert, down, bias, residual, back), y)
    truth = sum_of(x.astype(float), IDS, by_expert, w, bias, residual.astype(float), b)
    assert np.linalg.norm(y - truth) <= 2e-6 * np.linalg.norm(truth)


def of_shapes(kind, *shape):
    """A container of this kind without its numbers."""
    if kind in BYTES:
        *lead, f, d = shape
        w: Any = shaped_tiles(kind, f, d)
        return type(w)(spec(*lead, *w.tiles.shape, dtype="uint8"), kind)
    pack = functools.partial(quantize_microscaled, format=kind, two_level=False)
    return jax.eval_shape(pack, spec(*shape, dtype="float32"))


def ops_of(kind, d, f, e, k, shared, tokens):
    """Both ops and the shapes of their operands."""
    gate, down = of_shapes(kind, e, f, d), of_shapes(kind, e, d, f)
    both, back = None, None
    if shared:
        both, back = of_shapes(kind, 2 * f, d), of_shapes(kind, d, f)
    x, ids = spec(tokens, d), spec(tokens, k, dtype="int32")
    f32 = functools.partial(spec, dtype="float32")
    wide = functools.partial(expert_hidden, **GPT_OSS)
    around = f32(tokens, k), down, f32(e, d), x, back
    return (
        (wide, (x, ids, gate, gate, f32(e, f), f32(e, f), both)),
        (expert_sum, (spec(tokens, k, f), ids, *around)),
    )


# A multiprocessor has one program of these, by Triton 3.6 or by 3.9: a limit of 128
# registers spills.
ONE_PROGRAM = "Q5_K", "NVFP4_256", "nvfp4"


@pytest.mark.full
@pytest.mark.parametrize(
    "kind, d, f, e, k, shared",
    [
        ("mxfp4", 2880, 2880, 32, 4, False),  # gpt-oss-20b
        *((kind, 2048, 512, 256, 9, True) for kind in (*BYTES, "nvfp4")),
    ],
)
def test_nothing_spills_on_hopper(kind, d, f, e, k, shared):
    with compiling_for(90):
        for op, operands in ops_of(kind, d, f, e, k, shared, tokens=2):
            [launch] = launches_of(op, operands)
            assert launch.stack_bytes == 0, kind
            assert launch.registers <= 128 or kind in ONE_PROGRAM, kind
            assert "HMMA" in launch.sass


@pytest.mark.parametrize(
    "reason, x, ids, w",
    [
        ("`x` is float32, not bfloat16", spec(1, 64, dtype="float32"), (1, 2), "Q8_0"),
        ("over 8 tokens need compute capability 9.0", spec(9, 64), (9, 2), "Q8_0"),
        ("a token has 17 experts, over 16", spec(1, 64), (1, 17), "mxfp4"),
        ("there are no elements", spec(0, 64), (0, 2), "mxfp4"),
        ("mxfp8 has no kernel for experts in one launch", spec(1, 64), (1, 2), "mxfp8"),
        ("rows of 48 columns of 4 bits", spec(1, 48), (1, 2), "nvfp4"),
        ("rows of 32 columns are one group", spec(1, 32), (1, 2), "mxfp4"),
    ],
)
def test_refusals(reason, x, ids, w):
    gate = of_shapes(w, 4, 32, x.shape[-1])
    hidden = functools.partial(expert_hidden, **PLAIN)
    operands = x, spec(*ids, dtype="int32"), gate, gate, None, None
    with backend("auto"):
        [row] = explain(hidden, *operands, platform="cuda").rows
    assert row.runs.startswith("xla") and any(reason in r for r in row.refused), row
