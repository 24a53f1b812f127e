"""policy: linear layers compute as it says, every other op as without it."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import attention, linear, quantize_fp8, rms_norm, softmax
from jaxkern.primitives.linear.policy import Policy, current_policy, policy

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((3, 64)), jnp.float32)
W = jnp.asarray(RNG.standard_normal((8, 64)), jnp.float32)
BIAS = jnp.linspace(-1, 1, 8)


def rounded(a, dtype):
    return np.asarray(jnp.asarray(a).astype(dtype)).astype(np.float64)


@pytest.mark.parametrize(
    "name, compute, weights",
    [
        ("f32", "float32", "float32"),
        ("bf16", "bfloat16", "bfloat16"),
        pytest.param("f16", "float16", "float16", marks=pytest.mark.full),
        ("fp8", "bfloat16", "float8_e4m3fn"),
    ],
)
def test_dtypes_are_what_linear_computes_with(name, compute, weights):
    chosen = policy(name)
    assert (str(chosen.compute), str(chosen.weights)) == (compute, weights)
    assert str(chosen.accum) == "float32" and chosen.output is None
    assert f"{name}: weights {weights}, compute {compute}, sums float32" in str(chosen)
    truth = rounded(X, compute) @ rounded(W, compute).T
    with chosen as entered:
        assert entered is chosen is current_policy()
        y = jax.jit(linear)(X, W)
        biased = jax.jit(linear)(X, W, BIAS)
        narrow = linear(X.astype(jnp.bfloat16), W)
        jaxpr = str(jax.make_jaxpr(linear)(X, W))
    assert y.dtype == jnp.float32 and narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(y, truth, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(biased, truth + np.asarray(BIAS), rtol=1e-5, atol=1e-5)
    assert ("HIGHEST" in jaxpr) == (name == "f32")
    if name in ("bf16", "f16"):
        plain = np.asarray(X, np.float64) @ np.asarray(W, np.float64).T
        assert np.abs(np.asarray(y) - plain).max() > 1e-4  # it did round


def test_quantised_weights_round_to_the_compute_dtype():
    w = quantize_fp8(W)
    decoded = np.asarray(w.codes).view(jnp.float8_e4m3fn).astype(np.float32)
    decoded = decoded * np.asarray(w.scales)
    with policy("fp8"):
        y = linear(X, w)
    truth = rounded(X, "bfloat16") @ rounded(decoded, "bfloat16").T
    np.testing.assert_allclose(y, truth, rtol=1e-5, atol=1e-5)
    with policy("f16", output="float32"):
        wide = linear(X.astype(jnp.bfloat16), w)
    truth = rounded(X.astype(jnp.bfloat16), "float16") @ rounded(decoded, "float16").T
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, truth, rtol=1e-5, atol=1e-5)


def test_output_is_explicit():
    x = X.astype(jnp.bfloat16)
    with policy("bf16", output="float32") as chosen:
        y = linear(x, W)
    assert chosen.output == jnp.float32 == y.dtype
    truth = rounded(x, "bfloat16") @ rounded(W, "bfloat16").T
    np.testing.assert_allclose(y, truth, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_rounded_product():
    with policy("bf16"):
        dx, dw = jax.grad(lambda x, w: linear(x, w).sum(), (0, 1))(X, W)
    assert dx.dtype == dw.dtype == jnp.float32
    ones = np.ones((3, 8))
    np.testing.assert_allclose(dx, ones @ rounded(W, "bfloat16"), rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(
        dw, ones.T @ rounded(X, "bfloat16"), rtol=1e-2, atol=2e-2
    )


def test_norms_softmax_and_lse_are_untouched():
    q = jnp.ones((1, 2, 2, 4), jnp.bfloat16)
    for f, args in [
        (rms_norm, (X,)),
        (softmax, (X,)),
        (lambda q: attention(q, q, q, return_lse=True), (q,)),
    ]:
        plain = str(jax.make_jaxpr(f)(*args))
        with policy("f16"):
            assert str(jax.make_jaxpr(f)(*args)) == plain
    with policy("f16"):
        lse = attention(q, q, q, return_lse=True)[1]
    assert lse.dtype == jnp.float32


def test_no_policy_no_difference():
    before = str(jax.make_jaxpr(linear)(X, W, BIAS))
    with policy("bf16"):
        inside = str(jax.make_jaxpr(linear)(X, W, BIAS))
    assert str(jax.make_jaxpr(linear)(X, W, BIAS)) == before != inside
    assert "bf16" not in before and "HIGHEST" not in before
    traced = []
    f = jax.jit(lambda x: (traced.append(0), linear(x, W))[1])
    for _ in range(2):
        f(X)
        with policy("bf16"):
            f(X)
        with policy("bf16"):
            f(X)
    assert len(traced) == 2  # once without, once with


def test_blocks_nest_and_belong_to_a_thread():
    seen = []
    with policy("bf16"), policy("f16"):
        assert current_policy() == policy("f16")
        thread = threading.Thread(target=lambda: seen.append(current_policy()))
        thread.start()
        thread.join()
    with pytest.raises(ZeroDivisionError):
        with policy("bf16"):
            with policy("bf16"):
                pass
            assert current_policy() is not None
            raise ZeroDivisionError
    assert seen == [None] and current_policy() is None
    with pytest.raises(ValueError, match="f32, bf16, f16, fp8, got 'int8'"):
        policy("int8")
    assert isinstance(policy("f32"), Policy) and hash(policy("f32"))
