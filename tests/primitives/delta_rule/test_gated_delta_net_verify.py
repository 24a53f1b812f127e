"""gated_delta_net_verify: what it accepts is what single steps would have done."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import gated_delta_net_step, gated_delta_net_verify
from jaxkern.testing.checks import bf16, case, f32, i32, uniform

PER_TOKEN = ("qkv", "gate", "write", "rate")
WEIGHTS = ("weight", "a_log", "dt_bias", "norm")


def sizes(b, t, k, group, h, hv, w=4):
    """Shapes by name, in the order of the operands."""
    n = k * group
    c = 2 * k * h + n * hv
    return dict(
        qkv=(b, t, c),
        gate=(b, t, n, hv),
        write=(b, t, n),
        rate=(b, t, n),
        weight=(c, w),
        a_log=(n,),
        dt_bias=(n,),
        norm=(hv,),
        inputs=(b, w - 1 + t, c),
        state=(b, n, h, hv),
        keys=(b, t, n, h),
        corrections=(b, t, n, hv),
        g=(b, t, n),
    )


def shapes(b, t, k, group, h, hv, w=3, spec=f32):
    shape = sizes(b, t, k, group, h, hv, w)
    kinds = {name: spec for name in PER_TOKEN} | {"weight": spec, "a_log": uniform}
    kinds["g"] = functools.partial(uniform, low=-2.0)
    specs = {name: kinds.get(name, f32)(*s) for name, s in shape.items()}
    return specs | {"accepted": i32(b, high=t + 1), "eps": 1e-3}


CASES = [
    case("plain", **shapes(2, 2, 1, 2, 3, 2)),
    case("no_window", full=True, **shapes(1, 3, 2, 1, 2, 3, w=1)),
    case("no_sequences", full=True, **shapes(0, 2, 2, 1, 2, 2)),
    case("qwen3_next_drafts", full=True, **shapes(2, 4, 16, 2, 128, 128, 4, bf16)),
]


def draw(b, t, k, group, h, hv, w=4, seed=0):
    rng = np.random.default_rng([b, t, k, group, h, hv, w, seed])
    shape = sizes(b, t, k, group, h, hv, w)
    x = {
        name: jnp.asarray(rng.standard_normal(s), jnp.float32)
        for name, s in shape.items()
    }
    return x | {"g": -abs(x["g"])}


def nothing_pending(x):
    """The operands of a first call: what the last one left is empty."""
    empty = {name: 0 * x[name] for name in ("keys", "corrections", "g")}
    return x | empty | {"accepted": jnp.zeros(len(x["state"]), jnp.int32)}


def one_by_one(x, eps):
    """Results of single steps over the tokens, and what is left after each of them."""
    inputs, state = x["inputs"], x["state"]
    outs, left = [], [(inputs, state)]
    for i in range(x["qkv"].shape[1]):
        token = {name: x[name][:, i] for name in PER_TOKEN}
        weights = {name: x[name] for name in WEIGHTS}
        out, inputs, state = gated_delta_net_step(
            **token, **weights, inputs=inputs, state=state, eps=eps
        )
        outs.append(out)
        left.append((inputs, state))
    return jnp.stack(outs, axis=1), left


def chosen(left, accepted):
    """Of each row what was left after so many tokens."""
    return tuple(
        jnp.stack([x[n][row] for row, n in enumerate(accepted)])
        for x in zip(*left, strict=True)
    )


@pytest.mark.parametrize(
    "shape",
    [
        (3, 2, 1, 2, 4, 3),
        *(
            pytest.param(shape, marks=pytest.mark.full)
            for shape in ((2, 2, 1, 1, 2, 5, 1), (4, 5, 2, 2, 3, 2))
        ),
    ],
    ids=str,
)
def test_calls_are_single_steps_in_float64(shape):
    """Each row keeps another number of tokens of each call, none and all among them."""
    b, t = shape[:2]
    past = (*shape, 4)[6] - 1
    verify = jax.jit(functools.partial(gated_delta_net_verify, eps=1e-3))
    steps = jax.jit(functools.partial(one_by_one, eps=1e-3))
    with jax.enable_x64(True):
        calls = [draw(*shape, seed=i) for i in range(4)]
        calls = [jax.tree.map(lambda y: y.astype(jnp.float64), x) for x in calls]
        x = nothing_pending(calls[0])
        left = [(x["inputs"][:, :past], x["state"])]
        accepted = np.zeros(b, np.int32)
        for i, tokens in enumerate(calls):
            x |= {name: tokens[name] for name in PER_TOKEN}
            x["accepted"] = jnp.asarray(accepted)
            inputs, state = chosen(left, accepted)
            expected, left = steps(x | {"inputs": inputs, "state": state})
            found = verify(**x)
            np.testing.assert_allclose(found.out, expected, rtol=0, atol=1e-12)
            np.testing.assert_allclose(found.state, state, rtol=0, atol=1e-12)
            np.testing.assert_array_equal(found.inputs[:, :past], inputs)
            x |= {n: y for n, y in found._asdict().items() if n != "out"}
            accepted = (np.arange(b) + i) % (t + 1)


@pytest.fixture
def x():
    """Two rows of two tokens, one shape for all that follows: it compiles once."""
    return draw(2, 2, 1, 2, 4, 3)


def test_a_row_that_rests_stays_bit_by_bit(x):
    """Whatever its last call left, NaN or infinite."""
    x["keys"] = x["keys"].at[0].set(jnp.nan)
    x["g"] = x["g"].at[0].set(-jnp.inf)
    found = gated_delta_net_verify(**x, accepted=jnp.array([0, 2]))
    np.testing.assert_array_equal(found.state[0], x["state"][0])
    np.testing.assert_array_equal(found.inputs[0, :3], x["inputs"][0, :3])
    assert np.isfinite(found.out[0]).all()


def test_a_decay_to_nothing_forgets_what_was_before(x):
    x["g"] = x["g"].at[0, 1].set(-jnp.inf)
    found = gated_delta_net_verify(**x, accepted=jnp.array([2, 0]))
    last = np.einsum("nh,nv->nhv", x["keys"][0, 1], x["corrections"][0, 1])
    np.testing.assert_allclose(found.state[0], last, atol=1e-6)


def test_more_than_all_are_all(x):
    found = gated_delta_net_verify(**x, accepted=jnp.array([-1, 9]))
    expected = gated_delta_net_verify(**x, accepted=jnp.array([0, 2]))
    for y, e in zip(found, expected, strict=True):
        np.testing.assert_array_equal(y, e)


def test_what_is_refused(x):
    x["accepted"] = jnp.array([1, 0])
    with pytest.raises(ValueError, match="`inputs` has 4 rows for 4 taps and 2 tokens"):
        gated_delta_net_verify(**x | {"inputs": x["inputs"][:, 1:]})
    with pytest.raises(ValueError, match="`qkv` has 13 channels, which must be 2"):
        cut = {name: x[name][..., :13] for name in ("qkv", "inputs")}
        gated_delta_net_verify(**x | cut | {"weight": x["weight"][:13]})
    with pytest.raises(TypeError, match="gated_delta_net_verify: dim `t` is 2 in"):
        gated_delta_net_verify(**x | {"g": x["g"][:, 1:]})
