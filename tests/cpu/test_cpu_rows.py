"""The C++ kernels of losses, convolutions, softmax and rotations, with gradients.

Everything is compared with the float64 reference; the error of an array, in its norm,
is a few units of its dtype.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import backend, causal_conv1d, explain, linear_cross_entropy, softmax
from jaxkern.lowering.lower import rows_on
from jaxkern.primitives.delta_rule.causal_conv1d import causal_conv1d_p
from jaxkern.primitives.loss.linear_cross_entropy import linear_cross_entropy_p
from jaxkern.primitives.rope.rope import apply_rope

COLLECTIVE = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute")
HALVES = [jnp.bfloat16, jnp.float16]


pytestmark = pytest.mark.usefixtures("kernels")


def normal(*shape, dtype=jnp.float32, scale=1.0):
    rng = np.random.default_rng(sum(shape))
    return jnp.asarray(scale * rng.normal(size=shape), dtype)


def assert_exact(f, *operands, units=8):
    """Results and gradients against those of the reference in float64."""
    out, pull = jax.vjp(f, *operands)
    cotangents = jax.tree.map(lambda y: normal(*y.shape, dtype=y.dtype), out)
    actual = out, pull(cotangents)
    with jax.enable_x64(True), backend("xla"):
        out, pull = jax.vjp(f, *map(in_float64, operands))
        expected = out, pull(jax.tree.map(in_float64, cotangents))
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        eps = float(jnp.finfo(a.dtype).eps)
        a, e = np.asarray(a).astype(np.float64), np.asarray(e)
        assert np.linalg.norm(a - e) <= units * eps * np.linalg.norm(e)


def in_float64(x):
    return jnp.asarray(np.asarray(x).astype(np.float64))


def loss_case(n, d, v, dtype, **options):
    labels = np.random.default_rng(n).integers(0, v, n)
    labels[: n // 3] = -100

    def loss(x, weight):
        return linear_cross_entropy(
            x, weight, jnp.asarray(labels), return_lse=True, **options
        )

    operands = normal(n, d, dtype=dtype), normal(v, d, dtype=dtype, scale=d**-0.5)
    return loss, *operands


SMOOTHED = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0}


def test_linear_cross_entropy():
    assert_exact(*loss_case(5, 7, 37, jnp.float32, **SMOOTHED), units=16)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, *HALVES])
def test_linear_cross_entropy_of_any_size(dtype):
    # one block of classes, several, and a last one that is not whole
    for n, d, v in ((1, 1, 3), (49, 100, 33), (97, 576, 1100), (130, 40, 2049)):
        for options in ({}, SMOOTHED):
            assert_exact(*loss_case(n, d, v, dtype, **options), units=32)


@pytest.mark.full
def test_losses_of_logits_that_are_not_finite():
    """As the reference: a loss of NaN, of infinity, of a label that is no class."""
    w = jnp.asarray([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    x = jnp.asarray([[jnp.inf, 1], [jnp.nan, 1], [-jnp.inf, 1], [1e30, 1], [90, 100]])
    labels = jnp.asarray([0, 1, 1, 2, 7])

    def loss(x):
        return linear_cross_entropy(x, w, labels, return_lse=True)

    actual = loss(x)
    with backend("xla"):
        expected = loss(x)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-6)


def conv_case(b, t, d, w, dtype, *, bias=True, state=True, packed=False, silu=True):
    ids = np.random.default_rng(t).integers(0, 2, (b, t)) if packed else None
    shapes = [(b, t, d), (d, w), *([(d,)] if bias else [])]
    shapes += [(b, w - 1, d)] if state else []

    def conv(x, weight, *rest):
        rest = list(rest)
        return causal_conv1d_p(
            x,
            weight,
            rest.pop(0) if bias else None,
            rest.pop(0) if state else None,
            None if ids is None else jnp.asarray(ids, jnp.int32),
            activation="silu" if silu else None,
        )

    return conv, *(normal(*s, dtype=dtype) for s in shapes)


def test_causal_conv1d():
    """Whole vectors and the rest of them, with all operands."""
    assert_exact(*conv_case(2, 6, 37, 4, jnp.float32, packed=True))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, *HALVES])
def test_causal_conv1d_of_any_size(dtype):
    for b, t, d, w in ((1, 1, 1, 1), (3, 2, 33, 4), (2, 40, 600, 4), (1, 9, 20, 7)):
        for present in (False, True):
            case = {"bias": present, "state": present and w > 1, "silu": present}
            assert_exact(*conv_case(b, t, d, w, dtype, **case))


@pytest.mark.full
def test_a_tap_does_not_see_what_lies_in_another_segment():
    x = normal(1, 5, 20).at[0, :2].set(jnp.nan)
    ids = jnp.asarray([[0, 0, 1, 1, 1]])
    y, _ = causal_conv1d(x, normal(20, 4), segment_ids=ids)
    assert np.isnan(y[:, :2]).all() and np.isfinite(y[:, 2:]).all()


def softmax_case(rows, s, dtype, *, masked, scale=0.7):
    mask = np.random.default_rng(s).random((rows, s)) < 0.6
    mask[0] = False  # a row of nothing

    def f(x):
        return softmax(x, jnp.asarray(mask) if masked else None, scale=scale)

    return f, normal(rows, s, dtype=dtype, scale=3.0)


def test_softmax():
    assert_exact(*softmax_case(3, 37, jnp.float32, masked=True))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, *HALVES])
def test_softmax_of_any_size(dtype):
    for rows, s in ((1, 1), (3, 16), (200, 130), (2, 5003)):
        for masked in (False, True):
            assert_exact(*softmax_case(rows, s, dtype, masked=masked))


@pytest.mark.full
def test_softmax_of_rows_that_are_not_finite():
    """As the reference, in masked elements too."""
    x = np.zeros((5, 21), np.float32)
    x[0] = -np.inf
    x[1, 3], x[2, 20], x[3, 5], x[4, 5] = np.nan, np.inf, -np.inf, np.nan
    mask = np.ones_like(x, bool)
    mask[4, 5] = False
    for m in (None, jnp.asarray(mask)):
        actual = softmax(jnp.asarray(x), m)
        with backend("xla"):
            np.testing.assert_allclose(actual, softmax(jnp.asarray(x), m), rtol=1e-6)


def rope_case(t, n, h, r, dtype, pairing, pair_offset=None):
    angle = np.random.default_rng(t).normal(size=(t, r))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def f(x):
        return apply_rope(
            x,
            jnp.asarray(cos),
            jnp.asarray(sin),
            pairing=pairing,
            pair_offset=pair_offset,
        )

    return f, normal(t, n, h, dtype=dtype)


@pytest.mark.parametrize("pairing", ["neox", "interleaved"])
def test_rope(pairing):
    assert_exact(*rope_case(3, 2, 46, 19, jnp.float32, pairing), units=2)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, *HALVES])
def test_rope_of_any_size(dtype):
    for t, n, h, r in ((1, 1, 2, 1), (70, 9, 64, 32), (5, 3, 128, 24)):
        for pairing in ("neox", "interleaved"):
            assert_exact(*rope_case(t, n, h, r, dtype, pairing), units=2)
        assert_exact(*rope_case(t, n, h, r, dtype, "neox", h // 2), units=2)


CALLS = {
    "linear_cross_entropy": (
        lambda x: linear_cross_entropy(x, normal(11, 8), jnp.arange(4)),
        (3, 4, 8),
    ),
    "causal_conv": (lambda x: causal_conv1d(x, normal(8, 4))[0], (3, 2, 5, 8)),
    "softmax": (lambda x: softmax(x, jnp.arange(9) < 7), (3, 4, 9)),
    "rope": (
        lambda x: apply_rope(x, *jnp.ones((2, 4, 3)), pairing="interleaved"),
        (3, 4, 2, 8),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_both_passes_under_vmap_are_a_call_each(name):
    f, shape = CALLS[name]

    def both(x):
        y, pull = jax.vjp(f, x)
        return y, pull(jnp.sin(y))[0]

    x = normal(*shape)
    compiled = jax.jit(jax.vmap(both)).lower(x).compile()
    text = compiled.as_text()
    calls = re.findall(r'custom_call_target="jaxkern_(\w+)"', text)
    gradient = name if name == "rope" else f"{name}_gradient"
    assert sorted(calls) == sorted([name, gradient])
    for i in range(3):
        for a, e in zip(compiled(x), both(x[i]), strict=True):
            np.testing.assert_allclose(a[i], e, atol=2e-6)


def test_tokens_over_devices_are_not_gathered():
    mesh = jax.make_mesh((4,), ("tokens",))
    by_token = NamedSharding(mesh, P("tokens"))
    x, w = normal(8, 6), normal(13, 6)
    labels = jnp.arange(8)
    cut = jax.device_put((x, labels), by_token)

    def loss(x, labels):
        return linear_cross_entropy(x, w, labels, return_lse=True)

    compiled = jax.jit(loss).lower(*cut).compile()
    assert not COLLECTIVE.search(compiled.as_text())
    for a, e in zip(compiled(*cut), loss(x, labels), strict=True):
        assert a.sharding.is_equivalent_to(by_token, 1)
        np.testing.assert_allclose(a, e, atol=1e-6)


@pytest.mark.full
def test_gradients_over_devices():
    """The gradient of the weights is summed over the devices, that of x stays cut."""
    mesh = jax.make_mesh((4,), ("tokens",), axis_types=(AxisType.Auto,))
    x, w, labels = normal(8, 6), normal(13, 6), jnp.arange(8)

    def loss(x, w):
        return linear_cross_entropy(x, w, labels, reduction="mean")

    gradients = jax.jit(jax.grad(loss, (0, 1)))
    expected = gradients(x, w)
    cut = jax.device_put(x, NamedSharding(mesh, P("tokens")))
    compiled = gradients.lower(cut, w).compile()
    assert "all-gather" not in compiled.as_text()
    for a, e in zip(compiled(cut, w), expected, strict=True):
        np.testing.assert_allclose(a, e, atol=1e-6)


def test_losses_run_where_they_are_faster():
    def of(n, d, v, dtype=jnp.float32):
        shapes = ((n, d), dtype), ((v, d), dtype), ((n,), jnp.int32)
        operands = (jax.ShapeDtypeStruct(*s) for s in shapes)
        with backend("auto"):
            [row] = explain(linear_cross_entropy, *operands).rows
        return row

    assert of(4096, 2048, 49152).runs.endswith("linear_cross_entropy")
    for kept in (of(512, 576, 49152), of(4096, 2048, 49152, jnp.bfloat16)):
        assert kept.runs.startswith("xla")
        assert "XLA is faster" in " ".join(kept.refused)


def test_rotations_and_softmax_run_where_they_are_faster():
    def runs(f, *shapes):
        with backend("auto"):
            [row] = explain(f, *(jnp.ones(s) for s in shapes)).rows
        return row.runs

    assert runs(softmax, (4, 64)).endswith("softmax.softmax")
    assert runs(lambda x: softmax(x, x > 0), (4, 64)).startswith("xla")
    assert runs(apply_rope, (512, 32, 128), *[(512, 64)] * 2).endswith("apply_rope")
    assert runs(apply_rope, (1, 32, 128), *[(1, 64)] * 2).startswith("xla")


def test_options_that_the_kernels_lack_are_refused_in_words():
    with backend("auto"):
        [row] = explain(causal_conv1d, jnp.ones((1, 70, 2)), jnp.ones((2, 65))).rows
        assert "65 taps" in " ".join(row.refused)
        f = functools.partial(apply_rope, at_end=True)
        [row] = explain(f, jnp.ones((512, 32, 128)), *jnp.ones((2, 512, 32))).rows
        assert row.runs.startswith("xla") and "not the last" in " ".join(row.refused)
    assert rows_on(linear_cross_entropy_p, "cpu")
