"""The norm and the choice of experts against their formula in float64."""

import jax.numpy as jnp
import numpy as np

from jaxkern.primitives.moe.norm_route import norm_route_p
from jaxkern.testing.checks import bf16, case, f32

SOFTMAX = dict(
    eps=1e-5,
    shared=False,
    score="softmax",
    normalize=True,
    num_groups=1,
    top_groups=1,
    group_score="max",
    scaling_factor=1.0,
)
CASES = [
    case(
        "gpt_oss",
        full=True,
        **dict(x=f32(2, 8), norm=f32(8), router=f32(6, 8), router_bias=f32(6)),
        **dict(correction_bias=None, opening=None, k=2),
        **SOFTMAX,
    ),
    case(
        "qwen3_5",
        full=True,
        **dict(x=bf16(3, 8), norm=f32(8), router=f32(6, 8), router_bias=None),
        **dict(correction_bias=None, opening=f32(8), k=3),
        **SOFTMAX | dict(shared=True),
    ),
    case(
        "deepseek",
        full=True,
        **dict(x=f32(2, 8), norm=f32(8), router=f32(6, 8), router_bias=None),
        **dict(correction_bias=f32(6), opening=None, k=2),
        **SOFTMAX | dict(shared=True, score="sigmoid", scaling_factor=2.5),
    ),
]


def test_values_match_the_formula():
    rng = np.random.default_rng(0)
    x, norm, router = (rng.standard_normal(s) for s in ((2, 8), 8, (6, 8)))
    bias, opening = rng.standard_normal(6), rng.standard_normal(8)
    operands = (jnp.float32(a) for a in (x, norm, router, bias))
    options = SOFTMAX | dict(k=3, shared=True)
    given = (*operands, None, jnp.float32(opening))
    normal, weights, ids = norm_route_p(*given, **options)
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * norm
    logits = y @ router.T + bias
    best = np.argsort(-logits, axis=-1)[:, :3]
    powers = np.exp(np.take_along_axis(logits, best, -1))
    by_expert = powers / powers.sum(-1, keepdims=True)
    np.testing.assert_allclose(normal, y, atol=1e-5)
    np.testing.assert_array_equal(ids, np.c_[best, [6, 6]])
    last = 1 / (1 + np.exp(-(y @ opening)))
    np.testing.assert_allclose(weights, np.c_[by_expert, last], atol=1e-5)
    *_, weights, ids = norm_route_p(*given[:-1], None, **options)
    np.testing.assert_array_equal(weights[:, -1], 1.0)
