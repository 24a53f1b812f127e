"""What the instructions of a product of blocks do to the registers of 32 lanes."""

import re

import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.triton_call import tl
from jaxkern.triton.delta_rule.gated_delta_rule import block_products

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
LANE, REGISTER = np.arange(32)[:, None], np.arange(8)
ROW = LANE // 4 + 8 * (REGISTER // 2 % 2)
COLUMN = 2 * (LANE % 4) + REGISTER % 2 + 8 * (REGISTER // 4)


def operand(registers, halves):
    """A matrix operand `[8 * halves, terms]`: the halves of rows lie innermost."""
    registers = np.array(registers).reshape(2, halves, 8, 4, -1)  # terms, rows, g, t
    return registers.transpose(1, 2, 0, 3, 4).reshape(8 * halves, -1)


@pytest.mark.parametrize("dtype, numbers", [("float32", 1), ("bfloat16", 2)])
@pytest.mark.parametrize("parts", block_products.PARTS)
@pytest.mark.parametrize("add", [False, True])
def test_instructions_of_a_product(dtype, numbers, parts, add):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 16, 16, numbers))
    before = rng.standard_normal((16, 16))
    held = {f"${8 + i}": np.zeros((32, numbers)) for i in range(8)}
    left = block_products.left_text("signs")
    for to, of in re.findall(r"xor.b32 \$(\d), \$(\d+), signs;", left):
        held[f"${8 + int(to)}"] = -x[ROW, COLUMN][:, int(of) - 8]
    held |= {f"${16 + i}": y[ROW, COLUMN][:, i] for i in range(8)}
    held |= {f"${24 + i}": before[ROW, COLUMN][:, i, None] for i in range(8)}
    held["zero"] = np.zeros((32, 1))
    text = block_products.product_text(getattr(tl, dtype), parts, add)
    for line in text.splitlines():
        vectors = [v.split(", ") for v in re.findall(r"\{([^{}]+)\}", line)]
        if line.startswith("mma"):
            to, a, b, c = vectors
            a = operand([held[r] for r in a], 2)
            b = operand([held[r] for r in b], 1)
            product = (a @ b.T)[ROW[:, :4], COLUMN[:, :4]]
            for i in range(4):
                held[to[i]] = held[c[i]] + product[:, i, None]
        elif line.startswith("mov.f32 $"):
            to, of = re.findall(r"\$\d+|zero", line)
            held[to] = held[of]
    found = np.stack([held[f"${i}"][:, 0] for i in range(8)], 1)
    expected = before.copy() if add else np.zeros((16, 16))
    for n, s in block_products.PARTS[parts]:
        rows, terms = (slice(8 * half, 8 * half + 8) for half in (n, s))
        expected[:, rows] -= np.einsum("ikw,jkw->ij", x[:, terms], y[rows, terms])
    np.testing.assert_allclose(found, expected[ROW, COLUMN], atol=1e-12)
