"""A layer of experts in 8 bits on a Hopper GPU, against float64 of rounded operands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, dequantize, explain, moe_ffn, moe_ffn_fp8, quantize_fp8
from tests.gpu.truth import on_hopper, poison, relative_error
from tests.primitives.moe.test_expert_slots import GPT_OSS, PLAIN
from tests.primitives.moe.test_grouped_matmul_fp8 import rounded
from tests.primitives.moe.test_moe_ffn_fp8 import activated

pytestmark = on_hopper
E, D, F = 6, 320, 192


def drawn(rng, *shape):
    w = jnp.asarray(rng.standard_normal(shape) / shape[-1] ** 0.5, jnp.bfloat16)
    return quantize_fp8(w, block=(1, 0))


def loop(x, ids, weights, kept, biases, options):
    """y; products are rounded to bfloat16, as the layer rounds them."""
    gate, up, down = (np.float64(dequantize(w)) for w in kept)
    gate_bias, up_bias, down_bias = biases or [np.zeros((E, 1))] * 3
    x8, y = rounded(x), np.zeros(x.shape)

    def narrow(a):
        return np.float64(np.asarray(a).astype(jnp.bfloat16))

    for t, j in np.ndindex(ids.shape):
        if 0 <= (e := ids[t, j]) < E:
            z, u = narrow(gate[e] @ x8[t]), narrow(up[e] @ x8[t])
            z, u = narrow(z + gate_bias[e]), narrow(u + up_bias[e])
            hidden = rounded(activated(z, u, **options)[None])[0]
            y[t] += weights[t, j] * (narrow(down[e] @ hidden) + down_bias[e])
    return y


@pytest.mark.parametrize("tokens, k", [(3, 2), (333, 4)])
@pytest.mark.parametrize("options", [PLAIN, GPT_OSS], ids=["plain", "gpt_oss"])
def test_values(options, tokens, k):
    rng = np.random.default_rng(tokens)
    kept = drawn(rng, E, F, D), drawn(rng, E, F, D), drawn(rng, E, D, F)
    x = jnp.asarray(rng.standard_normal((tokens, D)), jnp.bfloat16)
    ids = rng.integers(-1, E + 1, (tokens, k)).astype(np.int32)
    weights = jnp.asarray(rng.uniform(0, 1, (tokens, k)), jnp.bfloat16)
    biases = None
    if options is GPT_OSS:
        biases = [rng.standard_normal(s).astype(np.float32) for s in ((E, F),) * 2]
        biases.append(rng.standard_normal((E, D)).astype(np.float32))
    f = functools.partial(moe_ffn_fp8, **options)
    operands = x, ids, weights, *kept, *(biases or ())
    poison(jnp.zeros((tokens * k, F), x.dtype), x)
    y, again = jax.jit(f)(*operands), jax.jit(f)(*operands)
    np.testing.assert_array_equal(y, again)
    with backend("xla"):
        plain = jax.jit(f)(*operands)
    wide = np.float64(np.asarray(weights))
    truth = loop(np.asarray(x), ids, wide, kept, biases, options)
    # hidden falls to the other side of a tie where a product differs in its last digit
    assert relative_error(y, truth) < 0.015
    assert relative_error(y, np.float64(np.asarray(plain))) < 0.015
    both = jax.tree.map(lambda *a: jnp.concatenate(a, 1), *kept[:2])
    packed = (np.concatenate(biases[:2], 1), None, biases[2]) if biases else ()
    same = jax.jit(f)(x, ids, weights, both, None, kept[2], *packed)
    assert relative_error(same, np.float64(np.asarray(y))) < 0.01


def test_gradients_of_x_and_of_the_weights_of_experts():
    rng = np.random.default_rng(0)
    kept = drawn(rng, E, F, D), drawn(rng, E, F, D), drawn(rng, E, D, F)
    decoded = [dequantize(w, dtype=jnp.bfloat16) for w in kept]
    x, dy = (jnp.asarray(rng.standard_normal((99, D)), jnp.bfloat16) for _ in "ab")
    ids = rng.integers(0, E, (99, 4)).astype(np.int32)
    weights = jnp.asarray(rng.uniform(0, 1, (99, 4)), jnp.bfloat16)

    def slopes(layer, experts):
        f = lambda x, weights: layer(x, ids, weights, *experts)  # noqa: E731
        return jax.jit(lambda x, w, dy: jax.vjp(f, x, w)[1](dy))(x, weights, dy)

    for found, plain in zip(
        slopes(moe_ffn_fp8, kept), slopes(moe_ffn, decoded), strict=True
    ):
        assert relative_error(found, np.float64(np.asarray(plain))) < 0.06


def test_explain_names_the_kernels():
    rng = np.random.default_rng(0)
    kept = drawn(rng, E, F, D), drawn(rng, E, F, D), drawn(rng, E, D, F)
    x, ids = jnp.zeros((64, D), jnp.bfloat16), jnp.zeros((64, 2), jnp.int32)
    text = str(explain(moe_ffn_fp8, x, ids, jnp.zeros((64, 2)), *kept))
    assert "triton: triton.linear.encode_rows_fp8" in text
    assert "mosaic_gpu: pallas.moe.grouped_matmul_fp8" in text
