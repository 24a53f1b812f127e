"""gated_delta_net_step: the operators one by one, a sequence token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    causal_conv1d,
    causal_conv1d_step,
    compute_g_beta,
    gated_delta_net_step,
    gated_delta_rule,
    gated_delta_step,
    gated_rms_norm,
    l2_norm,
)
from jaxkern.testing.checks import bf16, case, f32, i32, uniform

WEIGHTS = ("weight", "a_log", "dt_bias", "norm")


def shapes(b, k, group, h, hv, w=3, spec=f32, counts=True):
    n = k * group
    c = 2 * k * h + n * hv
    return dict(
        qkv=spec(b, c),
        gate=spec(b, n, hv),
        write=spec(b, n),
        rate=spec(b, n),
        weight=spec(c, w),
        a_log=uniform(n),
        dt_bias=f32(n),
        norm=f32(hv),
        inputs=f32(b, w - 1, c),
        state=f32(b, n, h, hv),
        counts=i32(b, high=2) if counts else None,
        eps=1e-3,
    )


CASES = [
    case("plain", **shapes(2, 1, 2, 3, 2)),
    case("all_count", **shapes(1, 2, 1, 2, 3, w=1, counts=False)),
    case("no_sequences", full=True, **shapes(0, 2, 1, 2, 2)),
    case("qwen3_next_decode", full=True, **shapes(2, 16, 2, 128, 128, 4, bf16)),
]


def draw(b, k, group, h, hv, w=4, seed=0):
    rng = np.random.default_rng([b, k, group, h, hv, w, seed])
    n = k * group
    c = 2 * k * h + n * hv
    sizes = dict(
        qkv=(b, c),
        gate=(b, n, hv),
        write=(b, n),
        rate=(b, n),
        weight=(c, w),
        a_log=(n,),
        dt_bias=(n,),
        norm=(hv,),
        inputs=(b, w - 1, c),
        state=(b, n, h, hv),
    )
    return {
        name: jnp.asarray(rng.standard_normal(s), jnp.float32)
        for name, s in sizes.items()
    }


def one_by_one(x, eps):
    """The operators that it stands for."""
    (b, n, h, hv), c = x["state"].shape, x["qkv"].shape[1]
    k = (c - n * hv) // (2 * h)
    mixed, inputs = causal_conv1d_step(
        x["qkv"], x["weight"], None, x["inputs"], activation="silu"
    )
    query, key, value = jnp.split(mixed, (k * h, 2 * k * h), axis=1)
    query, key = (l2_norm(y.reshape(b, k, h)) for y in (query, key))
    g, beta = compute_g_beta(x["rate"], x["write"], x["a_log"], x["dt_bias"])
    token = (query, key, value.reshape(b, n, hv), g, beta)
    y, state = gated_delta_step(*token, x["state"])
    return gated_rms_norm(y, x["gate"], x["norm"], eps=eps), inputs, state


@pytest.mark.parametrize("shape", [(2, 2, 2, 4, 3), (1, 1, 3, 2, 5)], ids=str)
def test_it_is_its_operators(shape):
    x = draw(*shape)
    found = gated_delta_net_step(**x, eps=1e-3)
    for y, e in zip(found, one_by_one(x, 1e-3), strict=True):
        np.testing.assert_allclose(y, e, atol=2e-5)


def test_steps_are_the_sequence():
    t, (b, k, group, h, hv) = 5, (2, 1, 2, 4, 3)
    tokens = [draw(b, k, group, h, hv, seed=i) for i in range(t)]
    weights = {name: tokens[0][name] for name in WEIGHTS}
    inputs, state = tokens[0]["inputs"], tokens[0]["state"]
    text = {
        name: jnp.stack([x[name] for x in tokens], axis=1)
        for name in ("qkv", "gate", "write", "rate")
    }
    mixed, after = causal_conv1d(
        text["qkv"], weights["weight"], None, inputs, activation="silu"
    )
    query, key, value = jnp.split(mixed, (k * h, 2 * k * h), axis=-1)
    query, key = (l2_norm(y.reshape(b, t, k, h)) for y in (query, key))
    gates = (text["rate"], text["write"], weights["a_log"], weights["dt_bias"])
    operands = query, key, value.reshape(b, t, -1, hv), *compute_g_beta(*gates)
    y, final = gated_delta_rule(*operands, state)
    expected = gated_rms_norm(y, text["gate"], weights["norm"])
    for i in range(t):
        token = {name: x[:, i] for name, x in text.items()}
        out, inputs, state = gated_delta_net_step(
            **token, **weights, inputs=inputs, state=state
        )
        np.testing.assert_allclose(out, expected[:, i], atol=2e-5)
    np.testing.assert_allclose(inputs, after, atol=1e-6)
    np.testing.assert_allclose(state, final, atol=2e-5)


def test_a_row_without_a_token_stays_bit_by_bit():
    x = draw(3, 1, 2, 4, 3)
    counts = jnp.array([0, 1, 0])
    every = gated_delta_net_step(**x)
    found = jax.jit(gated_delta_net_step)(**x, counts=counts)
    for y, e, name in zip(found[1:], every[1:], ("inputs", "state"), strict=True):
        np.testing.assert_array_equal(y[::2], x[name][::2])
        np.testing.assert_allclose(y[1], e[1], atol=1e-6)
    np.testing.assert_allclose(found[0][1], every[0][1], atol=1e-6)


def test_gates_far_from_zero():
    """softplus neither overflows nor vanishes before its argument does."""
    x = draw(1, 1, 1, 2, 2)
    for rate in (200.0, -60.0):
        x["rate"] = jnp.full((1, 1), rate)
        found = gated_delta_net_step(**x)
        for y, e in zip(found, one_by_one(x, 1e-6), strict=True):
            assert np.isfinite(y).all()
            np.testing.assert_allclose(y, e, atol=2e-5)


def test_what_is_refused():
    x = draw(1, 2, 2, 4, 3)
    with pytest.raises(ValueError, match="`qkv` has 24 channels, which must be 2"):
        cut = {name: x[name][..., :24] for name in ("qkv", "inputs")}
        gated_delta_net_step(**x | cut | {"weight": x["weight"][:24]})
    with pytest.raises(TypeError, match="`weight` has 3 taps and `inputs` 3 tokens"):
        gated_delta_net_step(**x | {"weight": x["weight"][:, 1:]})
    with pytest.raises(TypeError, match="gated_delta_net_step: dim `hv` is 3 in"):
        gated_delta_net_step(**x | {"norm": jnp.ones(4)})
