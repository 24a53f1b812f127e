"""The norm and the choice of experts on a GPU, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend
from jaxkern.primitives.moe.norm_route import norm_route_p, norm_route_reference
from tests.gpu.truth import on_a_gpu, poison, relative_error

pytestmark = on_a_gpu


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize(
    "d, e, k, options",
    [
        (2880, 32, 4, {}),
        (2048, 256, 8, dict(shared=True)),
        (520, 64, 6, dict(shared=True, score="sigmoid", num_groups=8, top_groups=4)),
    ],
)
def test_norm_and_choice(tokens, d, e, k, options):
    rng = np.random.default_rng([tokens, d])

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    x = draw(tokens, d).astype(jnp.bfloat16)
    sigmoid = "score" in options
    correction, opening = (draw(e) / 8, None) if sigmoid else (None, draw(d) / d**0.5)
    opening = opening if "shared" in options else None
    operands = x, draw(d), draw(e, d) / d**0.5, draw(e), correction, opening
    options = (
        dict(
            eps=1e-6,
            shared=False,
            k=k,
            score="softmax",
            normalize=True,
            num_groups=1,
            top_groups=1,
            group_score="top2" if sigmoid else "max",
            scaling_factor=2.5 if sigmoid else 1.0,
        )
        | options
    )
    poison(x, operands[3])
    with backend("triton", strict=True):
        found = jax.jit(functools.partial(norm_route_p, **options))(*operands)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [None if a is None else np.asarray(a, np.float64) for a in operands]
        wide = [None if a is None else jnp.asarray(a) for a in wide]
        truth = [np.asarray(a) for a in norm_route_reference(*wide, **options)]
    np.testing.assert_array_equal(found[2], truth[2])
    assert relative_error(found[0], truth[0]) < 4e-3
    assert relative_error(found[1], truth[1]) < 1e-5
