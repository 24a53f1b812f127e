"""The launches of sample on a machine without a GPU: which run, and that they fit."""

import jax
import jax.numpy as jnp
import pytest

from jaxkern import backend, explain, sample
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch import compiled

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
MAXIMA, STATS = "maxima_kernel", "stats_kernel"
BY_GROUPS, CUT, DRAW = "draw_by_groups_kernel", "cut_kernel", "draw_kernel"


def launches(v, options):
    def f(logits, key):
        return sample(logits, key, **options)

    logits = jax.ShapeDtypeStruct((2, v), jnp.float32)
    key = jax.eval_shape(jax.random.key, 0)
    with backend("triton"):
        [row] = explain(f, logits, key, platform="cuda").rows
    return row.launches


@pytest.mark.parametrize(
    "v, options, kernels",
    [
        (100, {"top_p": 0.9}, [STATS, CUT]),
        (8192, {"top_p": 0.9}, [STATS, CUT]),
        (128_256, {"top_k": 64, "top_p": 0.9, "min_p": 0.1}, [MAXIMA, BY_GROUPS]),
        (128_256, {}, [STATS, DRAW]),
        (128_256, {"min_p": 0.1}, [STATS, CUT]),
        (128_256, {"top_p": 0.9}, [STATS, CUT]),
        (262_144, {"top_p": 0.9, "min_p": 0.1}, [STATS, CUT]),
    ],
)
@pytest.mark.parametrize("capability", [80, 90])
def test_launches_by_options(v, options, kernels, capability):
    with compiling_for(capability):
        found = launches(v, options)
        assert [launch.name for launch in found] == kernels
        for launch in found:
            assert compiled(launch, capability).asm["cubin"]
            assert launch.shared_bytes <= bridge.max_shared_bytes()
            assert launch.stack_bytes <= 64, launch.describe()


def test_rows_that_are_too_long_are_refused_in_words():
    logits = jax.ShapeDtypeStruct((2, 300_000), jnp.float32)
    text = explain(sample, logits, jax.random.key(0), platform="cuda")
    assert "a row of `logits` has 300000 elements, above 262144" in str(text)
