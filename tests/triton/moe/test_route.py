"""Triton's routing, in the interpreter against the reference, and compiled.

And the order of the slots that it gives to experts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain, route
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch import compiled
from jaxkern.primitives.moe.expert_order import expert_order
from jaxkern.primitives.moe.route import route_reference
from jaxkern.testing.interpreter import evaluated
from jaxkern.triton.index import few_largest
from jaxkern.triton.moe import route as kernels
from jaxkern.triton.moe import route_by_warps, slot_order
from tests.triton.interpreted import (
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
    without_layouts,
)

OPTIONS = dict(
    score="softmax",
    normalize=True,
    scale_then_renorm=False,
    num_groups=1,
    top_groups=1,
    group_score="max",
    scaling_factor=1.0,
)
GROUPS = dict(score="sigmoid", num_groups=4, top_groups=2, group_score="top2")
CASES = {
    "softmax": (5, 40, 3, {}),
    "not normalised": (3, 33, 2, dict(normalize=False)),
    "sigmoid": (3, 64, 4, dict(score="sigmoid", scaling_factor=2.5)),
    "scaled": (4, 16, 4, dict(scale_then_renorm=True)),
    "groups": (6, 64, 5, GROUPS),
    "largest of groups": (6, 32, 3, GROUPS | dict(group_score="max")),
}
BY_WARPS = {  # two programs, in the second of which warps have the last token again
    "each of top2": (5, 128, 3, GROUPS | dict(num_groups=32, top_groups=7)),
    "largest": (5, 128, 3, GROUPS | dict(group_score="max")),
    "padded": (5, 132, 4, dict(score="sigmoid", scaling_factor=2.5)),
}
SLOTS = [(37, 4, 6), (3, 5, 20)]  # tokens, chosen, experts


@starts_it
def test_interpreted_kernels():
    count = len(CASES) + len(BY_WARPS) + len(SLOTS)
    check_in_its_own_process(__file__, count)


def check(rows, e, k, options):
    options = OPTIONS | options
    rng = np.random.default_rng([rows, e])
    logits = (3 * rng.standard_normal((rows, e))).astype(np.float32)
    logits[0, 3:7] = logits[0, 1] = 4.0  # equals: the first of them
    logits[1, 2:] = -np.inf
    logits[-1] = -np.inf
    scale = jnp.asarray(rng.uniform(0.5, 2, e), jnp.float32)
    bias = jnp.asarray(rng.standard_normal(e), jnp.float32) if k != 3 else None
    scale = scale if options["scale_then_renorm"] else None
    operands = jnp.asarray(logits), scale, bias
    with interpreted():
        found: Any = kernels.route(*operands, k=k, **options)
    weights, ids = found
    expected = evaluated(functools.partial(route_reference, k=k, **options), *operands)
    np.testing.assert_array_equal(ids, expected[1])
    np.testing.assert_allclose(weights, expected[0], rtol=1e-5, atol=1e-7)


@alone
@pytest.mark.parametrize("name", CASES)
def test_weights_and_ids(name):
    check(*CASES[name])


@alone
@pytest.mark.parametrize("name", BY_WARPS)
def test_a_warp_for_each_token(name, monkeypatch):
    monkeypatch.setattr(few_largest, "MANY_ROWS", 1)
    with without_layouts(route_by_warps, few_largest):
        check(*BY_WARPS[name])


@alone
@pytest.mark.parametrize("tokens, k, experts", SLOTS)
def test_slots_in_order(tokens, k, experts, monkeypatch):
    """Several experts of none, ids outside, and more slots than are read at once."""
    monkeypatch.setattr(slot_order, "MOST", 64)
    ids = np.random.default_rng(k).integers(-2, experts + 2, (tokens, k))
    ids[ids == 1] = 0
    with interpreted():
        order, sizes = slot_order.slot_order(jnp.asarray(ids), experts)
    expected = expert_order(jnp.asarray(ids), experts)
    np.testing.assert_array_equal(order, expected[0])
    np.testing.assert_array_equal(sizes, expected[1])


@starts_it
@pytest.mark.skipif(bridge.missing() is not None, reason="triton is not installed")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    "rows, options, name",
    [
        (8192, {}, "route_kernel"),
        (8192, dict(score="sigmoid"), "route_by_warps_kernel"),
        (1024, dict(score="sigmoid"), "route_kernel"),
        (256, GROUPS | dict(num_groups=8, top_groups=4), "route_by_warps_kernel"),
    ],
)
def test_kernels_compile_and_fit(capability, rows, options, name):
    logits = jax.ShapeDtypeStruct((rows, 256), jnp.float32)
    bias = jax.ShapeDtypeStruct((256,), jnp.float32)
    with compiling_for(capability):

        def f(logits, bias):
            return route(logits, 8, correction_bias=bias, **options)

        found: Any = explain(f, logits, bias, platform="cuda").rows
        [launch] = found[0].launches
        assert launch.name == name
        assert compiled(launch, capability).asm["cubin"]
        assert launch.stack_bytes == 0


@starts_it
def test_what_it_does_not_take():
    def why(e, k, **options):
        logits = jax.ShapeDtypeStruct((64, e), jnp.float32)
        return str(explain(lambda x: route(x, k, **options), logits, platform="cuda"))

    assert "more than 2048" in why(4096, 8)
    assert "not from 1 to 16" in why(64, 17)
    assert "no powers of 2" in why(96, 2, num_groups=3)


@starts_it
def test_given_scores_are_refused_in_words():
    """Its cases have the two scores that the kernel computes, and no third one."""
    [row] = explain(
        lambda s: route(s, 2, score="given"), jnp.ones((3, 16)), platform="cuda"
    ).rows
    assert row.runs.startswith("xla")
    assert "scores that are given" in " ".join(row.refused)
