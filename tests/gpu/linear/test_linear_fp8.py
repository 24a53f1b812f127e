"""Products of 8-bit floats on a GPU, against float64 of the rounded operands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, linear
from jaxkern.train.train_step import COMPILER_OPTIONS
from tests.gpu.truth import on_a_gpu
from tests.primitives.linear.test_linear_fp8 import rounded

pytestmark = on_a_gpu
fp8 = functools.partial(linear, compute_dtype=jnp.float8_e4m3fn)
SHAPES = [(1, 256, 512, 128), (2, 128, 1024, 768), (2, 65, 200, 72), (1, 3, 17, 5)]


@pytest.mark.parametrize("kernels", ["triton", "xla"])
@pytest.mark.parametrize("b, t, d, f", SHAPES)
def test_three_products(b, t, d, f, kernels):
    rng = np.random.default_rng(0)
    draw = lambda *s: jnp.asarray(rng.standard_normal(s), jnp.bfloat16)  # noqa: E731
    x, w, dy = draw(b, t, d), draw(f, d), draw(b, t, f)

    def both(x, w, dy):
        y, pull = jax.vjp(fp8, x, w)
        return y, *pull(dy)

    with backend(kernels):
        lowered = jax.jit(both).lower(x, w, dy)
        as_trained = jax.jit(both, compiler_options=COMPILER_OPTIONS).lower(x, w, dy)
    x8, w8 = (rounded(a, jnp.float8_e4m3fn) for a in (x, w))
    dy8 = rounded(dy, jnp.float8_e5m2)
    rows = dy8.reshape(-1, f), x8.reshape(-1, d)
    expected = x8 @ w8.T, dy8 @ w8, rows[0].T @ rows[1]
    for compiled in (lowered.compile(), as_trained.compile()):
        for y, e in zip(compiled(x, w, dy), expected, strict=True):
            error = np.abs(np.asarray(y, np.float64) - e).max()
            assert error <= 1.5 * 2**-8 * np.abs(e).max()
    if all(n % 16 == 0 for n in (b * t, d, f)):
        text = compiled.as_text()
        assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 3
