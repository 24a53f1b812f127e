"""rope_from: what rope gives at offset, offset + 1, ..."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import rope, rope_from
from jaxkern.testing.checks import bf16, case, f32, i32

CASES = [
    case("plain", x=f32(2, 3, 2, 8), offset=i32(), rotary_dim=8),
    case(
        "part",
        x=bf16(5, 3, 11),
        offset=i32(),
        rotary_dim=6,
        pairing="interleaved",
        at_end=True,
    ),
    case("empty", x=f32(2, 0, 3, 8), offset=i32(), rotary_dim=4),
    case(
        "llama3_8b_decode",
        full=True,
        x=bf16(4, 1, 32, 128),
        offset=i32(),
        rotary_dim=128,
        theta=5e5,
    ),
]


@pytest.mark.parametrize("pairing", ["neox", "interleaved"])
@pytest.mark.parametrize("rotary_dim, at_end", [(None, False), (6, False), (6, True)])
def test_rows_follow_each_other(pairing, rotary_dim, at_end):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 3, 8)), jnp.float32)
    options = dict(theta=500.0, rotary_dim=rotary_dim, pairing=pairing)
    options["at_end"] = at_end
    expected = rope(x, 7 + jnp.arange(5), **options)
    np.testing.assert_array_equal(rope_from(x, 7, **options), expected)
    traced = jax.jit(lambda x, offset: rope_from(x, offset, **options))
    np.testing.assert_allclose(traced(x, jnp.int32(7)), expected, atol=1e-6)
    assert np.abs(np.asarray(rope_from(x, 8, **options) - expected)).max() > 0.1


@pytest.mark.parametrize(
    "error, options",
    [
        (ValueError, dict(rotary_dim=5)),
        (ValueError, dict(rotary_dim=10)),
        (ValueError, dict(pairing="pairs")),
        (TypeError, dict(offset=jnp.arange(3))),
    ],
)
def test_errors(error, options):
    with pytest.raises(error, match="rope_from"):
        rope_from(jnp.ones((2, 3, 2, 8)), **options)
    with pytest.raises(TypeError, match="rope_from"):
        rope_from(jnp.ones((2, 8)))
