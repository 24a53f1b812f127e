"""The affine calls of jax-mps: their text, their meaning against MLX, their refusals.

tests/golden/mlx_quantized_matmul.npz holds what MLX computes on a CPU.
"""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern as jk
from jaxkern.lowering.apple import assume_jax_mps, check, fused_affine
from jaxkern.primitives.quant.affine_matmul import affine_matmul
from jaxkern.primitives.quant.affine_tensor import BITS
from jaxkern.primitives.quant.gguf_blocks import BLOCK_FORMATS, FLOAT_TYPES
from jaxkern.primitives.quant.requantize import AFFINE_CODES
from tests.lowering.apple import mlx_kernels
from tests.lowering.apple.fused_calls import sent
from tests.primitives.quant.block_bytes import decoded, random_blocks

with np.load(Path(__file__).parents[2] / "golden/mlx_quantized_matmul.npz") as file:
    GOLDEN = dict(file)
GROUPS = (32, 64, 128)
FLOATS = ("float32", "float16", "bfloat16")


def arrays(*shape, bits=4, group_size=32, dtype="float32"):
    """Random words, and scales and biases of a few digits, of NumPy."""
    *lead, d = shape
    rng = np.random.default_rng(bits)
    words = rng.integers(0, 2**32, (*lead, d * bits // 32), np.uint32)
    floats = rng.integers(-99, 100, (2, *lead, d // group_size)) / 64
    return words, *floats.astype(jnp.dtype(dtype))


def tensor(*shape, bits=4, group_size=32, dtype="float32"):
    made = arrays(*shape, bits=bits, group_size=group_size, dtype=dtype)
    return jk.AffineTensor(*map(jnp.asarray, made), bits, group_size)


def rows(*shape, dtype="float32"):
    return np.random.default_rng(0).normal(size=shape).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("bits, group_size", [*itertools.product(BITS, GROUPS)])
def test_kernels_against_mlx(bits, group_size):
    key, options = f"{bits}_{group_size}", dict(bits=bits, group_size=group_size)
    codes, *floats = (GOLDEN[f"{key}_{n}"] for n in ("codes", "scales", "biases"))
    x = GOLDEN["x"] if codes.ndim == 3 else GOLDEN["x"][0]
    for dtype in map(jnp.dtype, FLOATS if group_size == 32 else FLOATS[:1]):
        weights = codes, *(a.astype(dtype) for a in floats)
        w = mlx_kernels.dequantize(*weights, **options).astype(np.float32)
        np.testing.assert_array_equal(w[..., :1, :], GOLDEN[f"{key}_{dtype}_w"])
        y = mlx_kernels.quantized_matmul(
            x.astype(dtype), *weights, transpose=1, **options
        )
        size = np.abs(x).astype(np.float32) @ np.abs(w).swapaxes(-1, -2)
        error = np.abs(y.astype(np.float32) - GOLDEN[f"{key}_{dtype}_y"])
        assert (error <= 4 * float(jnp.finfo(dtype).eps) * size).all()


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("bits", BITS)
def test_rows_equal_the_operator(bits):
    """Every width, odd numbers of rows and groups, dims in front, every float."""
    for group_size, dtype in zip(GROUPS, FLOATS, strict=True):
        d, options = 3 * group_size, dict(bits=bits, group_size=group_size)
        w, x = arrays(7, d, **options, dtype=dtype), rows(5, 1, d, dtype=dtype)
        y = fused_affine.quantized_matmul(x, *w, **options, compute_dtype=None)
        wide = [a.astype(np.float32) for a in w[1:]]
        values = mlx_kernels.dequantize(w[0], *wide, **options)
        expected = x.astype(np.float32) @ values.T
        assert y.shape == (5, 1, 7) and y.dtype == dtype
        assert_within(2, y, expected)
    operator = jk.quantized_matmul(jnp.asarray(x), tensor(7, d, **options, dtype=dtype))
    assert_within(2, operator, expected)


def assert_within(ulps, y, expected):
    tolerance = ulps * float(jnp.finfo(y.dtype).eps) * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(y, np.float32), expected, atol=tolerance)


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("tokens", [1, 4], ids=["few_rows", "many_rows"])
def test_experts_equal_the_formula(tokens):
    w, x, options = arrays(3, 5, 64), rows(tokens, 64), dict(bits=4, group_size=32)
    ids = np.array([[2, 0], [1, 1], [-1, 2], [0, 3]], np.int32)[:tokens]
    y = fused_affine.quantized_matmul_id(
        *map(jnp.asarray, (x, ids, *w)), **options, compute_dtype=None
    )
    named = mlx_kernels.dequantize(*w, **options)[ids % 3]
    expected = np.einsum("td,tkfd->tkf", x, named)
    expected *= ((ids >= 0) & (ids < 3))[..., None]
    assert_within(8, y, expected)


@pytest.mark.usefixtures("played")
def test_a_vector_becomes_a_matrix():
    """MLX refuses vectors, which the kernels in plain JAX do too."""
    options = dict(bits=4, group_size=32)
    y = fused_affine.dequantize(*(a[0] for a in arrays(1, 64)), **options, dtype=None)
    np.testing.assert_array_equal(y, jk.dequantize(tensor(1, 64)[0]))


# What is sent to jax-mps.

W, W5 = tensor(6, 64), tensor(3, 6, 64, bits=5)
CODES, CODES5 = {"group_size": 32, "bits": 4}, {"group_size": 32, "bits": 5}
SENT = {
    "quantize": (lambda: jk.quantize_affine(rows(6, 64), group_size=32), CODES),
    "quantize a vector": (
        lambda: jk.quantize_affine(rows(64), bits=5, group_size=32),
        CODES5,
    ),
    "dequantize": (lambda: jk.dequantize(W), CODES),
    "dequantize a vector": (lambda: jk.dequantize(W5[0, 0]), CODES5),
    "dequantize rows": (
        lambda: jk.quantized_embedding(jnp.array([5, 0]), W5[0]),
        CODES5,
    ),
    "quantized_matmul": (
        lambda: jk.linear(rows(2, 3, 64), W),
        {"transpose": 1} | CODES,
    ),
    "quantized_matmul of experts": (
        lambda: jk.quantized_matmul_id(rows(1, 64), W5, jnp.array([2, 0]), top_k=2),
        {"transpose": 1} | CODES5,
    ),
}


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent(name):
    f, config = SENT[name]
    with assume_jax_mps():
        ((target, written, types),) = sent(f)
        assert check(f).findings == ()
    assert target == f"mps.{name.split()[0]}"
    assert json.loads(written) == config
    assert all("x" in t.removeprefix("tensor<").split("x", 1)[1] for t in types)
    assert {t.split("x")[-1] for t in types} <= {"f32>", "ui32>"}
    assert not list(sent(f)), "used without jax-mps"


def test_many_rows_of_experts_are_a_product_each():
    def routed():
        return jk.quantized_matmul_id(rows(4, 64), W5, jnp.array([0, 1, 2, 0]))

    with assume_jax_mps():
        targets = [target for target, _, _ in sent(routed)]
        assert check(routed).findings == ()
    assert targets == ["mps.quantized_matmul"] * 2  # the first one, and the loop


def test_gradients_and_vmap():
    x = rows(2, 64)
    with assume_jax_mps():
        assert check(jax.grad(lambda x: jk.linear(x, W).sum()), x).fused == 0
        stack = jax.vmap(lambda x: jk.linear(x, W))
        assert [t for t, _, _ in sent(lambda: stack(rows(3, 2, 64)))] == [
            "mps.quantized_matmul"
        ]


# Blocks of GGUF files.


def finite_blocks(qtype):
    """A tensor of random blocks, and its values by the gguf package."""
    blocks = random_blocks(qtype, 40, 256)
    values = decoded(blocks, qtype)
    finite = np.isfinite(values).all(-1)
    return jk.GGUFTensor(jnp.asarray(blocks[finite][:7]), qtype), values[finite][:7]


def product_of_affine(x, w):
    return jk.linear(x, jk.requantize(w, "affine"))


@pytest.mark.parametrize("qtype", sorted(AFFINE_CODES))
def test_blocks_that_are_affine(qtype):
    """The kernel's weights are the file's, to the last bit (a zero has no sign)."""
    w, values = finite_blocks(qtype)
    affine = jax.jit(lambda w: jk.requantize(w, "affine"))(w)
    options = dict(bits=affine.bits, group_size=affine.group_size)
    weights = map(np.asarray, jax.tree.leaves(affine))
    np.testing.assert_array_equal(mlx_kernels.dequantize(*weights, **options), values)
    with assume_jax_mps():
        ((_, config, types),) = sent(lambda: product_of_affine(rows(2, 256), w))
    assert json.loads(config) == {"transpose": 1} | options
    assert [t.split("x")[-1] for t in types] == ["f32>", "ui32>", *["f32>"] * 3]


@pytest.mark.parametrize("qtype", sorted(AFFINE_CODES))
@pytest.mark.full
def test_the_conversion_is_clean(qtype):
    w, _ = finite_blocks(qtype)
    with assume_jax_mps():
        assert check(product_of_affine, rows(2, 256), w).findings == ()


@pytest.mark.parametrize(
    "qtype",
    [
        q if q == "Q6_K" else pytest.param(q, marks=pytest.mark.full)
        for q in sorted({*BLOCK_FORMATS} - {*FLOAT_TYPES, *AFFINE_CODES})
    ],
)
def test_blocks_that_are_not(qtype):
    """They decode as on every platform."""
    w, _ = finite_blocks(qtype)
    with assume_jax_mps():
        report = check(jk.linear, rows(2, 256), w)
    assert report.fused == 0 and report.findings == ()


# Refusals.

UNPACKED = jk.AffineTensor(jnp.zeros((6, 64), jnp.uint8), W.scales, W.biases, 4, 32)


@pytest.mark.parametrize(
    "f, words",
    [
        (lambda: jk.linear(rows(2, 64), UNPACKED), "not packed in 32-bit words"),
        (lambda: jk.quantized_embedding(jnp.array([1]), UNPACKED), "not packed"),
        (lambda: jk.linear(rows(2, 64), tensor(6, 64, group_size=16)), "groups of 16"),
        (
            lambda: jk.quantized_matmul(rows(2, 64), W, compute_dtype=jnp.bfloat16),
            "rounded twice",
        ),
        (
            lambda: jk.quantized_matmul(
                rows(2, 64, dtype="bfloat16"), W, compute_dtype=jnp.bfloat16
            ),
            "computes in bfloat16, to which the scales would be rounded",
        ),
        (
            lambda: jk.quantized_matmul(rows(2, 64), W, compute_dtype=jnp.int8),
            "no activations to 8 bits",
        ),
        (
            lambda: affine_matmul(rows(2, 64), W, dequant_dtype=jnp.bfloat16),
            "rounds weights as it likes",
        ),
        (
            lambda: jk.quantize_affine(rows(6, 64), quantizer="minmax"),
            "MLX's quantiser",
        ),
    ],
)
def test_refusals(f, words):
    with assume_jax_mps():
        assert words in str(jk.explain(f, platform="mps"))
        assert not list(sent(f))


def test_scales_of_the_products_dtype_are_taken():
    w, x = tensor(6, 64, dtype="bfloat16"), rows(2, 64, dtype="bfloat16")
    with assume_jax_mps():
        ((_, _, types),) = sent(
            lambda: jk.quantized_matmul(x, w, compute_dtype=jnp.bfloat16)
        )
    assert {t.split("x")[-1] for t in types} == {"bf16>", "ui32>"}
