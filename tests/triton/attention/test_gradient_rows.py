"""The kernels beside those of attention's gradients, in Triton's interpreter."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.attention import gradient_rows
from jaxkern.pallas.attention.attention import problem, rows
from tests.triton import interpreted
from tests.triton.interpreted import alone, check_in_its_own_process, starts_it

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
RNG = np.random.default_rng(0)


@pytest.mark.full
@starts_it
def test_in_a_process_of_its_own():
    check_in_its_own_process(__file__, 2)


def draw(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16)


@alone
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of infinities
@pytest.mark.parametrize("broken", [False, True])
def test_rows_as_xla_computes_them(monkeypatch, broken):
    monkeypatch.setattr(gradient_rows, "triton_call", interpreted.call)
    b, t, s, n, k, h = 2, 100, 200, 4, 2, 128
    q, key, value, out, dout = (
        draw(b, rows_, heads, h)
        for rows_, heads in ((t, n), (s, k), (s, k), (t, n), (t, n))
    )
    if broken:  # rows that see it are not counted in numbers
        key = key.at[0, 150, 0, 5].set(jnp.nan)
        value = value.at[1, 150, 1, 5].set(-jnp.inf)
    lse, dlse = (jnp.float32(RNG.standard_normal((b, t, n))) for _ in range(2))
    lse = lse.at[0, 3, 1].set(-jnp.inf).at[1, 7, 2].set(jnp.nan)
    c = problem.problem(q, key, value, None, 0.1, True, None, None)
    c = dataclasses.replace(c, consumers=2, block_k=64)
    expected = rows.counted_rows(c, key, value, out, lse, dout, dlse, True)
    padded = expected[0].shape[2]
    found = gradient_rows.counted_rows(
        key, value, out, lse, dout, dlse, padded, rows.dscale(c)
    )
    for x, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(x.reshape(e.shape), e, rtol=1e-5, atol=1e-5)
    for x, e in zip(
        gradient_rows.gradient_rows(out, lse, dout, dlse, padded),
        expected,
        strict=False,
    ):
        np.testing.assert_allclose(x, e, rtol=1e-5, atol=1e-5)
    integers = jnp.int32(RNG.integers(-(2**30), 2**30, expected[4].shape))
    y, e = (
        f(integers, expected[3], t, jnp.float32, *rest)
        for f, rest in ((gradient_rows.counted, ()), (rows.counted, (True,)))
    )
    np.testing.assert_allclose(y, e, rtol=1e-6)
