"""Grouped products on a GPU, by both kinds of kernels, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, grouped_matmul, moe_ffn, route
from jaxkern.gpu.device import device_capability
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu
KINDS = [
    "triton",
    pytest.param(
        "mosaic_gpu",
        marks=pytest.mark.skipif(device_capability() != 90, reason="no Hopper GPU"),
    ),
]


def draw(*shape, dtype, seed=0):
    values = np.random.default_rng([*shape, seed]).standard_normal(shape)
    return jnp.asarray(values, dtype)


def random_sizes(r, e, seed=0):
    rng = np.random.default_rng([r, e, seed])
    return jnp.asarray(rng.multinomial(r, rng.dirichlet(np.full(e, 0.5))), jnp.int32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "r, f, d, sizes",
    [
        (300, 192, 128, [70, 0, 5, 130]),
        (1, 128, 128, [0, 1]),
        (1024, 512, 256, [128] * 8),
        (800, 1024, 320, [0, 0, 900]),
        (5003, 320, 704, random_sizes(5000, 40)),
        (9, 128, 128, [0] * 5),
    ],
)
def test_products_and_gradients(kind, dtype, r, f, d, sizes):
    x, w = draw(r, d, dtype=dtype), draw(len(sizes), f, d, dtype=dtype)
    sizes = jnp.asarray(sizes, jnp.int32)

    def f_(x, w):
        return grouped_matmul(x, w, sizes)

    check_against_float64(f_, x, w, kernels=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_many_groups_have_the_same_bits_every_time(kind):
    r, e, f, d = 16384, 256, 512, 2048
    x, w = draw(r, d, dtype="bfloat16"), draw(e, f, d, dtype="bfloat16")
    sizes = random_sizes(r, e)

    def products(x, w):
        with backend(kind, strict=True):
            y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
            return y, *pull(y)

    run = jax.jit(products)
    first, again = run(x, w), run(x, w)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_in_its_group(kind):
    x, w = draw(70, 128, dtype="bfloat16"), draw(3, 128, 128, dtype="bfloat16")
    sizes = jnp.asarray([21, 30, 13], jnp.int32)
    x = x.at[21:51].set(jnp.nan).at[64:].set(jnp.inf)
    dy = draw(70, 128, dtype="bfloat16", seed=1).at[64:].set(jnp.nan)

    @jax.jit
    def run(x, w):
        with backend(kind, strict=True):
            y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
            return y, *pull(dy)

    y, dx, dw = run(x, w)
    assert jnp.isfinite(y[:21]).all() and jnp.isfinite(y[51:]).all()
    assert not jnp.isfinite(y[21:51]).any() and jnp.isfinite(dx).all()
    assert jnp.isfinite(dw[0]).all() and jnp.isfinite(dw[2]).all()
    assert not jnp.isfinite(dw[1]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_under_vmap(kind):
    x, w = draw(3, 256, 128, dtype="bfloat16"), draw(4, 128, 128, dtype="bfloat16")
    sizes = jnp.asarray([[256, 0, 0, 0], [1, 2, 3, 4], [64, 64, 100, 28]], jnp.int32)

    def each(x, sizes):
        with backend(kind, strict=True):
            return grouped_matmul(x, w, sizes)

    together = jax.jit(jax.vmap(each))(x, sizes)
    alone = [jax.jit(each)(*one) for one in zip(x, sizes, strict=True)]
    np.testing.assert_array_equal(together, jnp.stack(alone))


@pytest.mark.parametrize(
    "tokens, d", [(1, 256), (1, 2048), (5, 256), (5, 2048), (33, 256), (700, 256)]
)
def test_layer(tokens, d):
    x = draw(tokens, d, dtype="bfloat16")
    gate, up = (draw(16, 128, d, dtype="bfloat16", seed=s) / d**0.5 for s in (1, 2))
    down = draw(16, d, 128, dtype="bfloat16", seed=3) / 11
    rng = np.random.default_rng(tokens)
    ids = jnp.asarray(np.argsort(rng.random((tokens, 16)), 1)[:, :4], jnp.int32)
    weights = jnp.asarray(rng.random((tokens, 4)), jnp.bfloat16)

    def layer(x, weights, gate, up, down):
        return moe_ffn(x, ids, weights, gate, up, down)

    check_against_float64(
        layer, x, weights, gate, up, down, kernels="auto", strict=False, slack=3.0
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(score="sigmoid", normalize=False),
        dict(
            score="sigmoid",
            num_groups=8,
            top_groups=4,
            group_score="top2",
            scaling_factor=2.5,
        ),
    ],
)
@pytest.mark.parametrize("tokens", [7, 1001, 4097])
def test_routing(tokens, options):
    logits, bias = 3 * draw(tokens, 256, dtype="float32"), draw(256, dtype="float32")
    bias = bias if "num_groups" in options else None

    def run(name):
        with backend(name, strict=True):
            return jax.jit(lambda x: route(x, 8, correction_bias=bias, **options))(
                logits
            )

    (weights, ids), (same_weights, same_ids) = run("triton"), run("xla")
    # scores that differ by a rounding may change places
    assert np.mean(np.asarray(ids) != np.asarray(same_ids)) < 1e-3
    a, b = (np.sort(np.asarray(w), 1) for w in (weights, same_weights))
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
