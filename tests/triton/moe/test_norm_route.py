"""The norm and the choice of experts: interpreted against the reference, compiled."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.primitives.moe.norm_route import norm_route_p, norm_route_reference
from jaxkern.testing.interpreter import evaluated
from jaxkern.triton.moe import norm_route as kernels
from tests.triton.interpreted import (
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

OPTIONS = dict(
    eps=1e-5,
    score="softmax",
    normalize=True,
    num_groups=1,
    top_groups=1,
    group_score="max",
    scaling_factor=1.0,
)
CASES: dict[str, tuple] = {  # tokens, dims, experts, chosen, shared, opening, options
    "gpt-oss": (1, 72, 32, 4, False, False, {}),
    "qwen3.5": (3, 1100, 40, 8, True, True, {}),
    "deepseek": (2, 64, 16, 3, True, False, dict(score="sigmoid", scaling_factor=2.5)),
}


@starts_it
@pytest.mark.full
def test_interpreted_kernels():
    check_in_its_own_process(__file__, len(CASES))


@alone
@pytest.mark.parametrize("name", CASES)
def test_values(name):
    tokens, d, e, k, shared, opens, options = CASES[name]
    rng = np.random.default_rng(d)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    correction = draw(e) if name == "deepseek" else None
    opening = draw(d) / d**0.5 if opens else None
    operands = draw(tokens, d), draw(d), draw(e, d), draw(e), correction, opening
    options = OPTIONS | options | dict(k=k, shared=shared)
    with interpreted():
        found = kernels.norm_route(*operands, **options)
    expected = evaluated(functools.partial(norm_route_reference, **options), *operands)
    np.testing.assert_array_equal(found[2], expected[2])
    for y, truth in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_allclose(y, truth, rtol=2e-5, atol=1e-5)


@starts_it
@pytest.mark.full
@pytest.mark.skipif(bridge.missing() is not None, reason="triton is not installed")
def test_kernels_compile_and_fit():
    spec = jax.ShapeDtypeStruct
    x = spec((1, 2880), jnp.bfloat16)
    vector, router = spec((2880,), jnp.float32), spec((256, 2880), jnp.float32)
    options = OPTIONS | dict(k=8, shared=True)

    def f(x, norm, router):
        return norm_route_p(x, norm, router, None, None, norm, **options)

    with compiling_for(90):
        rows: Any = explain(f, x, vector, router, platform="cuda").rows
        [row] = rows
        names = [launch.name for launch in row.launches]
        assert names == ["few_products_kernel", "choice_kernel"]
        assert all(launch.stack_bytes == 0 for launch in row.launches)
