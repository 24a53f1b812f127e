"""The arithmetic of packed rows, lane by lane, against decoded weights in float64.

Without a GPU no other check runs these kernels: Gluon has no interpreter. `lanes.py`
follows their source and their instructions, on the formats and shapes whose paths
differ, of which one activation summed by groups is the newest.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern import InterleavedTensor, dequantize
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.primitives.quant.interleaved_tensor import interleaved
from jaxkern.primitives.quant.tile_formats import OWN_FORMATS, TILE_FORMATS
from jaxkern.triton.quant import packed_products
from tests.primitives.quant.tile_bytes import put_numbers
from tests.triton.quant import lanes
from tests.triton.test_every_kernel import packed, spec

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
# where the float16 scales of a block are, and how large
SCALES = {"Q8_0": {0: 0.02}, "Q6_K": {208: 0.004}, "Q4_K": {0: 0.02, 2: 0.15}}
PRODUCT = "packed_product_kernel"
SCALES |= {"Q5_K": {0: 0.02, 2: 0.15}, "Q4_0": {0: 0.05}, "Q5_0": {0: 0.05}}
SCALES |= {"Q4_1": {0: 0.05, 2: 0.3}, "Q2_K": {80: 0.05, 82: 0.1}, "Q3_K": {108: 0.01}}
SCALES |= {"IQ4_NL": {0: 0.01}, "IQ4_XS": {0: 0.001}}


def weights(rng, qtype, f, k):
    """(interleaved tensor, the same in float64)."""
    form = TILE_FORMATS[qtype]
    blocks = rng.integers(0, 256, (f, k // form.elements, form.bytes), np.uint8)
    for at, scale in SCALES.get(qtype, {}).items():
        scales = rng.uniform(0.5, 1.0, blocks.shape[:2]) * scale
        blocks[:, :, at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    if qtype == "MXFP4":
        blocks[:, :, 0] = rng.integers(116, 126, blocks.shape[:2])
    if qtype in OWN_FORMATS:
        put_numbers(rng, qtype, blocks)
    tiles = jnp.asarray(interleaved(blocks.reshape(f, -1), qtype))
    w = InterleavedTensor(tiles, qtype)
    return w, np.asarray(dequantize(w), np.float64)


def launches_of(f, *operands):
    with compiling_for(90):
        jaxpr = jax.make_jaxpr(f)(*operands).jaxpr
    return [
        eqn.params["launch"]
        for eqn in jaxpr.eqns
        if eqn.primitive is bridge.triton_call_p
    ]


def launch_of(f, *operands):
    [launch] = launches_of(f, *operands)
    return launch


def halves_of(gated):
    return 1 if gated in (False, "times") else 2


def factor(rng, gated, shape):
    """`up` where it is an operand, and the activation."""
    up = rng.standard_normal(shape).astype(np.float32) if gated == "times" else None
    activation = "silu" if gated is True else "gelu_tanh"
    return up, activation if gated else None


def activated(y, activation):
    if activation == "gelu_tanh":
        return y / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (y + 0.044715 * y**3)))
    return y * (y > -500) / (1 + np.exp(-y.clip(-500)))


@pytest.mark.parametrize(
    "qtype, k, rows, normed, gated, added",
    [
        ("Q4_K", 768, 1, True, True, False),
        ("Q4_K", 2304, 1, False, False, True),
        ("Q4_K", 256, 1, True, False, False),
        ("Q5_K", 768, 1, False, False, False),
        ("Q5_K", 512, 1, True, False, False),
        ("Q4_K", 512, 3, True, False, False),
        ("Q4_K", 512, 2, False, False, True),
        ("Q6_K", 768, 1, True, False, True),
        ("Q8_0", 768, 1, False, True, False),
        ("Q4_0", 544, 2, False, False, False),
        ("MXFP4", 544, 2, False, False, False),
        ("NVFP4_256", 512, 1, True, False, False),
        ("AFFINE4_64_BF16", 576, 2, False, False, False),
        ("INT4_128_F16", 384, 1, False, True, False),
        ("Q4_K", 256, 1, True, "gelu", False),
        ("Q8_0", 256, 2, False, "times", False),
    ],
)
def test_lanes_give_the_product(qtype, k, rows, normed, gated, added):
    can = packed_products.SUMMED
    rng = np.random.default_rng(k)
    x = rng.standard_normal((rows, k))
    x[0, : k // 2] += 2  # sums of groups that are far from zero
    x = x.astype(ml_dtypes.bfloat16).astype(np.float32)  # for a float32 result
    halves = [weights(rng, qtype, 16, k) for _ in range(halves_of(gated))]
    tiles = np.stack([np.asarray(w.tiles) for w, _ in halves])
    tiles = tiles if len(halves) > 1 else tiles[0]
    up, activation = factor(rng, gated, (rows, 1, 16))
    norm = rng.uniform(0.5, 2.0, k).astype(np.float32) if normed else None
    residual = rng.standard_normal((rows, 1, 16)).astype(np.float32)
    residual = residual if added else None

    def product(x, tiles, norm, residual, up):
        around = norm, residual, 1e-5
        gate = dict(up=up, activation=activation)
        return packed_products.launch(x, tiles, qtype, 1, *around, **gate)

    launch = launch_of(product, x, tiles, norm, residual, up)
    assert dict(launch.constants)["SUMMED"] == (rows == 1 and qtype in can)
    y = np.full((rows, 1, 16), np.nan, np.float32)
    arrays = {"x_ptr": x, "norm_ptr": norm, "tiles_ptr": tiles, "y_ptr": y}
    if norm is None:
        arrays["x_ptr"] = x.astype(ml_dtypes.bfloat16)
    arrays |= {"residual_ptr": residual, "up_ptr": up}
    lanes.run(launch, {n: a for n, a in arrays.items() if a is not None}, (0, 0))

    wide = x.astype(np.float64)
    if norm is not None:
        wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * norm
        wide = wide.astype(ml_dtypes.bfloat16).astype(np.float64)
    results = [wide @ w.T for _, w in halves]
    want = results[0]
    if gated:
        want = activated(want, activation) * (results[1] if up is None else up[:, 0])
    if residual is not None:
        want = want + residual[:, 0].astype(np.float64)
    got = y[:, 0].astype(np.float64)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    # where a norm ends between two bfloat16 the kernel may take the other one
    assert error < (3e-4 if normed else 2e-5)


@pytest.mark.parametrize(
    "qtype, k, units, normed, gated, added, programs",
    [
        ("Q4_K", 768, 3, True, True, False, 1),
        ("Q4_K", 2304, 3, False, False, True, 1),
        ("Q4_K", 256, 3, True, False, False, 2),
        ("Q4_K", 512, 37, False, False, False, 2),
        ("Q5_K", 768, 3, False, True, False, 2),
        ("Q5_K", 2560, 3, True, False, False, 1),
        ("Q6_K", 768, 3, True, False, True, 2),
        ("Q6_K", 512, 3, False, True, False, 1),
        ("Q6_K", 256, 20, False, True, False, 1),
        ("Q8_0", 768, 3, False, True, False, 2),
        ("Q8_0", 1280, 3, True, False, False, 1),
        ("MXFP4", 768, 3, True, True, False, 2),
        ("MXFP4", 2304, 3, False, False, True, 1),
        ("NVFP4_256", 768, 3, True, False, True, 2),
        ("NVFP4_256", 512, 3, False, True, False, 1),
        ("AFFINE4_64_BF16", 768, 3, True, True, False, 2),
        ("INT4_128_F16", 512, 3, False, False, True, 1),
        ("INT4_32_BF16", 512, 3, False, False, False, 1),
        ("Q4_K", 256, 3, True, "gelu", False, 2),
        ("Q6_K", 256, 3, False, "times", False, 2),
    ],
)
def test_whole_numbers_give_the_product(
    monkeypatch, qtype, k, units, normed, gated, added, programs
):
    monkeypatch.setattr(packed_products, "num_sms", lambda: programs)
    rng = np.random.default_rng(k)
    x = rng.standard_normal(k) * np.exp(rng.standard_normal(k))
    x[: k // 2] += 2  # sums of groups that are far from zero
    x[-64:] = 0  # groups of nothing
    x = x.astype(ml_dtypes.bfloat16)
    halves = [weights(rng, qtype, 16 * units, k) for _ in range(halves_of(gated))]
    tiles = np.stack([np.asarray(w.tiles) for w, _ in halves])
    tiles = tiles if len(halves) > 1 else tiles[0]
    up, activation = factor(rng, gated, (units, 16))
    norm = rng.uniform(0.5, 2.0, k).astype(np.float32) if normed else None
    residual = rng.standard_normal((units, 16)).astype(np.float32) if added else None

    def product(x, tiles, norm, residual, up):
        around = dict(norm=norm, residual=residual, eps=1e-5)
        gate = dict(up=up, activation=activation)
        return packed_products.multiply(x, tiles, qtype, None, **around, **gate)

    launch = launch_of(product, x, tiles, norm, residual, up)
    assert launch.kernel.__name__ == "fixed_point_kernel"
    assert dict(launch.constants)["PROGRAMS"] == programs
    y = np.full((units, 16), np.nan, np.float32)  # not rounded to bfloat16
    arrays = {"x_ptr": x, "norm_ptr": norm, "tiles_ptr": tiles, "y_ptr": y}
    arrays |= {"residual_ptr": residual, "up_ptr": up}
    for program in range(programs):
        given = {n: a for n, a in arrays.items() if a is not None}
        lanes.run(launch, given, (program, 0))

    wide = x.astype(np.float64)
    if norm is not None:
        wide = wide / np.sqrt((wide**2).mean() + 1e-5) * norm
    results = [w @ wide for _, w in halves]
    want = results[0]
    if gated:
        other = results[1] if up is None else up.reshape(-1)
        want = activated(want, activation) * other
    if residual is not None:
        want = want + residual.reshape(-1).astype(np.float64)
    error = np.linalg.norm(y.reshape(-1) - want) / np.linalg.norm(want)
    assert error < 1e-4


def test_float32_of_bfloat16_is_multiplied_by_whole_numbers():
    """The logits of a model: their activation is wide, and its product is asked for."""
    x, tiles = spec(1, 512, dtype="float32"), packed("Q4_K", 32, 512).tiles
    for dtype, name in ((jnp.bfloat16, "fixed_point_kernel"), (None, PRODUCT)):

        def product(x, tiles, dtype=dtype):
            return packed_products.multiply(x, tiles, "Q4_K", dtype)

        launch = launch_of(product, x, tiles)
        assert launch.kernel.__name__ == name and launch.operands[-1] == "*fp32"


def test_rows_of_several_rounds_are_the_same_kernels():
    x, rows = spec(1, 256), 3 * 16 * packed_products.TOGETHER * 132 + 16
    tiles = packed("Q4_K", rows, 256).tiles
    run = partial(packed_products.multiply, qtype="Q4_K", compute_dtype=None)
    assert launch_of(run, x, tiles).kernel.__name__ == "fixed_point_kernel"


@pytest.mark.parametrize("qtype", ["Q4_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_whole_numbers_keep_what_is_no_number(qtype, number):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(512).astype(ml_dtypes.bfloat16)
    x[77] = number
    w, _ = weights(rng, qtype, 16, 512)
    launch = launch_of(lambda x: packed_products.multiply(x, w.tiles, qtype, None), x)
    y = np.zeros((1, 16), np.float32)
    arrays = {"x_ptr": x, "tiles_ptr": np.asarray(w.tiles), "y_ptr": y}
    lanes.run(launch, arrays, (0, 0))
    assert np.isnan(y).all()


def instructions_of_a_step(sass: str) -> int:
    """Those of the innermost loop with products of whole numbers."""
    lines = sass.splitlines()
    labels = {x.strip()[:-1]: i for i, x in enumerate(lines) if x.strip().endswith(":")}
    jumps = re.compile(r"BRA (LBB\d+)")
    loops = [
        lines[labels[to[1]] : i]
        for i, line in enumerate(lines)
        if (to := jumps.search(line)) and labels[to[1]] < i
    ]
    return min(
        sum(x.endswith(";") for x in loop)
        for loop in loops
        if any("IMMA.16832" in x for x in loop)
    )


@pytest.mark.parametrize(
    "qtype, most",
    [
        ("MXFP4", 290),
        pytest.param("NVFP4_256", 350, marks=pytest.mark.full),
        pytest.param("Q4_K", 235, marks=pytest.mark.full),
        pytest.param("AFFINE4_64_BF16", 180, marks=pytest.mark.full),
        pytest.param("INT4_128_F16", 190, marks=pytest.mark.full),
    ],
)
def test_a_step_takes_few_instructions_and_spills_nothing(qtype, most):
    """On Hopper, with the end of a tile, where about as many are left out as 44."""
    tiles = packed(qtype, 28672, 8192).tiles
    x = jax.ShapeDtypeStruct((1, 8192), jnp.bfloat16)
    with compiling_for(90):
        launch = launch_of(
            lambda x, w: packed_products.multiply(x, w, qtype, None), x, tiles
        )
        assert launch.stack_bytes == 0 and launch.registers <= 128
        assert instructions_of_a_step(launch.sass) <= most
