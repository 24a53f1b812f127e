"""Kernels of row-major containers: what is launched and refused, and that it fits.

Products are compared with float64 on a GPU, in tests/gpu/quant/; Gluon has no
interpreter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    IntTensor,
    dequantize,
    explain,
    quantize_affine,
    quantize_fp8,
    quantize_int,
    quantize_microscaled,
    quantized_embedding,
    quantized_matmul,
    quantized_matmul_id,
)
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch import Launch
from jaxkern.triton.quant.row_codes import BITS
from jaxkern.triton.quant.row_problem import Rows
from jaxkern.triton.quant.row_products import problem_of
from tests.triton.test_every_kernel import packed, spec

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)

WEIGHTS = {
    "int4": functools.partial(quantize_int, bits=4, group_size=128),
    "uint4": functools.partial(quantize_int, bits=4, group_size=32, zero_point=True),
    "int8": quantize_int,
    "affine 2": functools.partial(quantize_affine, bits=2, group_size=64),
    "affine 3": functools.partial(quantize_affine, bits=3, group_size=64),
    "affine 8": functools.partial(quantize_affine, bits=8, group_size=64),
    "fp8": functools.partial(quantize_fp8, block=(128, 128)),
    "mxfp4": functools.partial(quantize_microscaled, format="mxfp4"),
    "nvfp4": functools.partial(quantize_microscaled, format="nvfp4"),
}


def weights(kind, *shape):
    return jax.eval_shape(WEIGHTS[kind], spec(*shape, dtype="float32"))


def last_row(f, *operands):
    *_, row = explain(f, *operands, platform="cuda").rows
    return row


@pytest.mark.parametrize(
    "kind",
    [
        "mxfp4",
        *(
            pytest.param(kind, marks=pytest.mark.full)
            for kind in WEIGHTS
            if kind != "mxfp4"
        ),
    ],
)
@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.full)])
def test_one_activation_takes_one_launch_and_spills_nothing(kind, capability):
    with compiling_for(capability):
        row = last_row(quantized_matmul, spec(1, 4096), weights(kind, 64, 4096))
        [launch] = row.launches
        assert isinstance(launch, Launch) and launch.name == "row_product_kernel"
        assert launch.stack_bytes == 0 and launch.registers <= 168, launch.describe()
        assert "HMMA" in launch.sass


def test_many_activations_get_decoded_weights():
    for kind, most in (("int4", 32), ("mxfp4", 16)):
        w = weights(kind, 32, 512)
        for rows, name in (
            (most + 1, "row_decode_kernel"),
            (most, "row_product_kernel"),
        ):
            row = last_row(quantized_matmul, spec(rows, 512), w)
            assert [launch.name for launch in row.launches] == [name]


def routed(x, w, ids):
    return quantized_matmul_id(x, w, ids, top_k=2)


def test_rows_and_experts_are_one_launch():
    ids = spec(6, dtype="int32")
    for w in (weights("int4", 4, 32, 512), weights("affine 8", 4, 32, 512)):
        [launch] = last_row(routed, spec(3, 512), w, ids).launches
        assert launch.name == "row_product_kernel" and launch.grid == (2, 6)
    for kind in ("int4", "affine 3", "fp8", "nvfp4"):
        [launch] = last_row(quantized_embedding, ids, weights(kind, 32, 512)).launches
        assert launch.name == "row_decode_kernel"
    tiles = packed("Q4_K", 32, 512)
    [launch] = last_row(quantized_embedding, ids, tiles).launches
    assert launch.name == "decode_tiles_kernel"
    stack = jax.tree.map(lambda a: spec(4, *a.shape, dtype="uint8"), tiles)
    [launch] = last_row(routed, spec(3, 512), stack, ids).launches
    assert launch.name == "packed_product_kernel" and launch.grid == (2, 6)


def int4_by(group, d=512):
    return jax.eval_shape(
        functools.partial(quantize_int, bits=4, group_size=group),
        spec(32, d, dtype="float32"),
    )


def e5m2(w):
    return quantize_fp8(w, format="e5m2")


@pytest.mark.parametrize(
    "reason, f, operands",
    [
        (
            "rows of 48 columns of 4 bits",
            quantized_matmul,
            (spec(1, 48), int4_by(16, 48)),
        ),
        ("groups of 20 columns", quantized_matmul, (spec(1, 320), int4_by(20, 320))),
        (
            "e5m2 has no kernel",
            quantized_matmul,
            (spec(1, 512), jax.eval_shape(e5m2, spec(32, 512, dtype="float32"))),
        ),
        (
            "compute_dtype is int8",
            lambda x, w: quantized_matmul(x, w, compute_dtype=jnp.int8),
            (spec(1, 512), int4_by(128)),
        ),
        (
            "65 activations of 4 terms",
            quantized_matmul,
            (spec(65, 512, dtype="float32"), int4_by(128)),
        ),
        ("there are no elements", quantized_matmul, (spec(0, 512), int4_by(128))),
        (
            "66 rows are routed, over 64",
            routed,
            (spec(33, 512), weights("int4", 4, 32, 512), spec(66, dtype="int32")),
        ),
    ],
)
def test_refusals(reason, f, operands):
    row = last_row(f, *operands)
    assert row.runs.startswith("xla"), row.runs
    assert any(reason in r for r in row.refused), row.refused


def test_a_container_is_read_as_what_it_means():
    """The formula of `Rows`, in numpy, gives the weights of every container."""
    from jaxkern.triton.quant import affine_matmul, fp8, int_matmul, microscaled

    w = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    q = quantize_int(jnp.asarray(w), bits=4, group_size=64, zero_point=True)
    plain = IntTensor(q.codes, q.scales, bits=4, group_size=64, signed=False)
    f, m = WEIGHTS["fp8"](w), WEIGHTS["mxfp4"](w)
    a = WEIGHTS["affine 3"](w)
    read = [
        (q, int_matmul.rows_of(q.codes, q.scales, q.zeros, 4, 64, False)),
        (plain, int_matmul.rows_of(q.codes, q.scales, None, 4, 64, False)),
        (a, affine_matmul.rows_of(a.codes, a.scales, a.biases, 3, 64)),
        (f, fp8.rows_of(f.codes, f.scales, 16)),
        (m, microscaled.rows_of(m.codes, m.scales, None, "mxfp4")),
    ]
    for container, rows in read:
        np.testing.assert_allclose(
            by_formula(rows), dequantize(container), rtol=1e-6, atol=1e-6
        )


def by_formula(w: Rows):
    bits = BITS[w.format]
    stream = np.unpackbits(
        np.asarray(w.codes).view(np.uint8), axis=-1, bitorder="little"
    )
    fields = stream.reshape(w.rows, w.columns, bits)
    codes = (fields.astype(np.int64) << np.arange(bits)).sum(-1)
    if w.format == "e4m3":
        values = codes.astype(np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)
    elif w.format == "e2m1":
        doubled = np.array([0, 1, 2, 3, 4, 6, 8, 12])
        values = np.concatenate([doubled, -doubled])[codes] / 2
    elif w.format in ("i4", "i8"):
        values = codes - (codes >> (bits - 1) << bits)
    else:
        values = codes - w.zero
    scales = np.asarray(w.scales)
    if w.kind == "e8m0":
        scales = 2.0 ** (scales - 127.0)
    elif w.kind == "e4m3":
        scales = scales.view(jnp.float8_e4m3fn).astype(np.float64)
    if w.factors is not None:
        scales = scales * np.asarray(w.factors)[:, None]

    def spread(array):
        rows = np.repeat(np.asarray(array), w.rows_of_scale, axis=0)[: w.rows]
        return np.repeat(rows, w.group, axis=1)[:, : w.columns]

    if w.offset == "zero":
        values = values - spread(w.offsets)
    y = spread(scales) * values
    return y + spread(w.offsets) if w.offset == "bias" else y


@pytest.mark.parametrize("activations", [1, 3, 16, 40])
@pytest.mark.parametrize("kind", ["int4", "mxfp4"])
def test_sizes_of_a_launch_cover_all(kind, activations):
    """Every column belongs to one step, every activation to one column of sums."""
    from jaxkern.triton.quant import int_matmul, microscaled

    w = weights(kind, 48, 2880 if kind == "mxfp4" else 4096)
    if kind == "int4":
        rows = int_matmul.rows_of(w.codes, w.scales, None, 4, 128, True)
    else:
        rows = microscaled.rows_of(w.codes, w.scales, None, "mxfp4")
    p = problem_of(rows, activations)
    assert p.turns * p.shares * p.batch * p.step >= p.columns
    assert p.split == (kind == "mxfp4") and p.ragged == (p.columns % 4096 != 0)
    assert p.eights * (2 if p.split else 8) >= p.together
    assert p.batch % p.steps_of_scale == 0
