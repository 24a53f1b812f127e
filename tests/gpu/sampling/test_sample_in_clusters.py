"""Sampling by top_p from rows that clusters hold: tokens, odd rows, the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, explain, sample
from tests.gpu.truth import on_a_gpu
from tests.sampled import INF, check_rows, drawn, special_rows

pytestmark = on_a_gpu
HOPPER = "mosaic_gpu"
CUTS = [dict(top_p=0.9), dict(top_p=0.3, min_p=0.02)]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize(
    "rows, v, dtype",
    [
        (100, 32_000, "float32"),  # clusters of two
        (100, 32_000, "bfloat16"),
        (70, 65_536, "float32"),  # of four
        (5, 50_304, "float16"),  # of eight; lines of 128
        (32, 128_256, "float32"),
        (32, 128_256, "bfloat16"),
        (8, 151_936, "float32"),
        (3, 262_144, "float32"),
    ],
)
def test_tokens_are_those_of_their_uniforms(rows, v, dtype, cuts):
    rng = np.random.default_rng(v)
    logits = jnp.asarray(3 * rng.standard_normal((rows, v)), dtype)
    u = rng.random(rows).astype(np.float32)
    u[:3] = 0, 0.3, 1 - 2**-24
    check_rows(logits, u, HOPPER, **cuts)
    temperature = np.resize([0.3, 1, 2, 0, INF], rows)
    check_rows(logits, u, HOPPER, temperature=temperature, **cuts)


@pytest.mark.parametrize("scale", [1e-9, 0.01, 1.0, 10.0])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.99, 1.0])
def test_flat_and_peaked_rows(p, scale):
    rng = np.random.default_rng(1)
    logits = jnp.asarray(scale * rng.standard_normal((32, 128_256)), jnp.float32)
    check_rows(logits, rng.random(32), HOPPER, top_p=p)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_distributions(p, dtype):
    rng = np.random.default_rng(6)
    v = 128_256
    falling = -1.1 * np.log(np.arange(v) + 3.7)
    rows = [
        rng.random(v),
        10 * rng.random(v),
        rng.gumbel(size=v),
        rng.laplace(size=v),
        rng.permutation(falling),
        falling,
        np.where(np.arange(v) == 777, 10, rng.standard_normal(v)),
        2 * np.sort(rng.standard_normal(v)),
        30 + 1e-5 * rng.standard_normal(v),
    ]
    logits = jnp.asarray(np.stack(rows), dtype)
    for u in (0.02, 0.6, 0.999):
        check_rows(logits, np.full(9, u), HOPPER, top_p=p)
    check_rows(logits, np.full(9, 0.5), HOPPER, top_p=p, temperature=1e-6)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("v", [32_064, 128_256])
def test_special_rows(v, cuts):
    x = jnp.asarray(special_rows(v))
    for u in (0.0, 0.4, 1 - 2**-24):
        numbers = np.full(8, u, np.float32)
        check_rows(x, numbers, HOPPER, **cuts)
        check_rows(x, numbers, HOPPER, temperature=0.0, **cuts)


def test_rows_with_options_of_their_own():
    rng = np.random.default_rng(2)
    logits = jnp.asarray(2 * rng.standard_normal((8, 128_256)), jnp.float32)
    top_p = np.array([0.9, 1, 0.5, 0, 0.8, 1, 0.6, 0.2])
    options = dict(top_p=top_p, min_p=np.linspace(0, 1.2, 8))
    check_rows(logits, rng.random(8), HOPPER, **options)


def test_the_kept_set_is_complete():
    rng = np.random.default_rng(4)
    row = rng.standard_normal(32_000).astype(np.float32)
    logits = jnp.broadcast_to(jnp.asarray(row), (4096, 32_000))
    u = (np.arange(4096) + 0.5) / 4096
    weight = np.exp(np.float64(row) - row.max())
    order = np.argsort(-row)
    share = (np.cumsum(weight[order])[29] - 0.5 * weight[order[29]]) / weight.sum()
    assert set(drawn(logits, u, HOPPER, top_p=share)) == set(order[:30])


def test_the_same_bits_under_vmap_and_in_each_run():
    logits = 2 * jax.random.normal(jax.random.key(0), (2, 16, 128_256))
    keys = jax.random.split(jax.random.key(1), 2)

    def f(logits, key):
        return sample(logits, key, top_p=0.8, temperature=0.9)

    with backend(HOPPER):
        assert "mosaic_gpu: pallas.sampling" in str(explain(f, logits[0], keys[0]))
        together = jax.jit(jax.vmap(f))
        first = together(logits, keys)
        for _ in range(20):
            np.testing.assert_array_equal(together(logits, keys), first)
        apart = [f(x, key) for x, key in zip(logits, keys, strict=True)]
    np.testing.assert_array_equal(first, jnp.stack(apart))
