"""quantized_matmul_id: each row times its expert, few rows and many, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import GGUFTensor, quantized_matmul_id
from jaxkern.testing.checks import bf16, case, f32, i32
from tests.primitives.quant.block_bytes import quiet_bytes, weight

CASES = [
    case(
        "many_rows",
        x=f32(4, 32),
        ids=i32(4, 2, low=-1, high=4),
        blocks=quiet_bytes(3, 4, 34),
        qtype="Q8_0",
    ),
    case(
        "few_rows",
        x=f32(2, 32),
        ids=i32(2, 1, low=-1, high=7),
        blocks=quiet_bytes(6, 2, 34),
        qtype="Q8_0",
        full=True,
    ),
    case(
        "qwen3_moe",
        x=bf16(8, 2048),
        ids=i32(8, 8, high=128),
        blocks=quiet_bytes(128, 768, 1152),
        qtype="Q4_K",
        full=True,
    ),
]


def expected(x, values, ids, top_k):
    """Row by row in float64, zeros for an id that names no expert."""
    rows = [
        values[i] @ x[r // top_k] if 0 <= i < len(values) else 0 * values[0] @ x[0]
        for r, i in enumerate(ids)
    ]
    return np.stack(rows)


@pytest.mark.parametrize("experts", [3, 40], ids=["many_rows", "few_rows"])
def test_formula_and_gradient(experts):
    w, values = weight("Q5_1", experts, 6, 64)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4, 64)).astype(np.float32)
    ids = rng.integers(-1, experts + 1, 12).astype(np.int32)
    ids[:2] = [-1, experts]
    y, pull = jax.vjp(lambda x: quantized_matmul_id(x, w, ids, top_k=3), x)
    truth = expected(x.astype(np.float64), values, ids, 3)
    np.testing.assert_allclose(y, truth, atol=1e-5 * np.abs(truth).max())
    assert not np.asarray(y)[:2].any()
    dy = rng.normal(size=y.shape).astype(np.float32)
    dx = np.zeros_like(x, np.float64)
    for r, i in enumerate(ids):
        if 0 <= i < experts:
            dx[r // 3] += values[i].T @ dy[r]
    np.testing.assert_allclose(pull(dy)[0], dx, atol=1e-5 * np.abs(dx).max())


def test_no_stack_of_experts_is_decoded():
    w, _ = weight("Q8_0", 16, 64, 64)
    x, ids = jnp.ones((32, 64)), jnp.zeros(32, jnp.int32)
    compiled = jax.jit(quantized_matmul_id).lower(x, w, ids).compile()
    one_expert, result = 64 * 64 * 4, 32 * 64 * 4
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < w.nbytes + 3 * one_expert + 8 * result


def test_an_expertless_stack_gives_zeros():
    w = GGUFTensor(jnp.zeros((0, 4, 34), jnp.uint8), "Q8_0")
    y = quantized_matmul_id(jnp.ones((2, 32)), w, jnp.zeros(2, jnp.int32))
    assert y.shape == (2, 4) and not np.asarray(y).any()


def test_refusals():
    w, _ = weight("Q4_0", 3, 4, 64)
    ids = jnp.zeros(4, jnp.int32)
    with pytest.raises(TypeError, match="`w` must have 3 dims"):
        quantized_matmul_id(jnp.ones((4, 64)), w[0], ids)
    with pytest.raises(TypeError, match=r"`ids` \[t \* top_k\], got \(3, 64\) and"):
        quantized_matmul_id(jnp.ones((3, 64)), w, ids)
    with pytest.raises(TypeError, match="dim `d` is 32 in `x` but 64 in `w`"):
        quantized_matmul_id(jnp.ones((4, 32)), w, ids)
