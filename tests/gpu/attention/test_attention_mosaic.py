"""The Hopper attention kernels on a GPU, against the reference in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxkern import backend
from jaxkern.lowering.lower import lower
from jaxkern.pallas.attention.attention import bwd as hopper_bwd
from jaxkern.pallas.attention.attention import fwd as hopper
from jaxkern.pallas.attention.attention import joint_bwd
from jaxkern.primitives.attention.attention import attention_p
from jaxkern.testing import checks
from jaxkern.triton.attention.attention import bwd as triton_bwd
from tests.gpu.attention.test_attention import (
    IDS,
    KV_IDS,
    as_jax,
    attend,
    check_64k_tokens,
    check_on_two_gpus,
    draw,
    operands,
)
from tests.gpu.attention.test_attention import OPTIONS as of_triton
from tests.gpu.attention.test_attention import check as check_attention
from tests.gpu.truth import EPSILON, on_hopper, relative_errors
from tests.primitives.attention.one_key import ON_A_CARD, slopes_of

pytestmark = on_hopper


BACKWARD: dict[str, Any] = {
    "joint": ("mosaic_gpu", joint_bwd.attention_bwd, joint_bwd.unsupported),
    "two": ("mosaic_gpu", hopper_bwd.attention_bwd, hopper_bwd.unsupported),
    "triton": ("triton", triton_bwd.attention_bwd, triton_bwd.unsupported),
}


@pytest.fixture(scope="module", autouse=True, params=["two", "joint"])
def hopper_rows(request):
    """Asked first at every head dim; the next gradients where they refuse."""
    with checks.own_rows(attention_p):
        lower(
            attention_p,
            "cuda",
            "mosaic_gpu",
            fwd=hopper.attention_fwd,
            primal=hopper.attention,
            unsupported=hopper.unsupported,
        )
        names = list(BACKWARD)
        for name in names[names.index(request.param) :]:
            kind, gradients, refuses = BACKWARD[name]
            lower(
                attention_p, "cuda", kind, fwd=None, bwd=gradients, unsupported=refuses
            )
        jax.clear_caches()
        yield
    jax.clear_caches()


check = functools.partial(check_attention, kind="auto")
BITS = np.random.default_rng(8).random((2, 6, 300, 413)) < 0.6
BIAS = 2 * np.random.default_rng(9).standard_normal((2, 6, 300, 413)).astype("float32")
BITS[0, :, 70:200] = False  # rows that see nothing
BITS[1, 1:, :, :140] = False  # a block that one head alone sees
AS_OF_TRITON = (
    "causal causal_offsets window window_alone softcap negative_scale sinks lengths "
    "lengths_causal segments segments_causal unordered_segments everything"
)
OPTIONS: dict[str, Any] = {
    "all": {},
    "mask": dict(mask=BITS),
    "bias": dict(bias=np.where(BITS, BIAS, -np.inf), causal=True),
    "bias_of_keys": dict(bias=BIAS[:1, :, :1], softcap=2.0),
    "bias_of_queries": dict(bias=BIAS[..., :1], scale=-0.2),
    "bias_of_heads": dict(bias=BIAS[:1, :, :1, :1], causal=True),
    "bias_and_mask": dict(
        bias=BIAS[:, :1].astype("bfloat16"), mask=BITS, kv_lengths=np.array([0, 130])
    ),
    "mask_of_keys": dict(mask=BITS[:, :1, 2:3], causal=True),
    "mask_of_queries": dict(mask=BITS[:1, :, :, 200:201], window=90),
    "mask_that_shows_all": dict(mask=np.ones((1, 1, 300, 413), bool), causal=True),
    "mask_and_segments": dict(mask=BITS[:1, :1], segment_ids=(IDS, KV_IDS)),
    "sinks_unseen": dict(kv_lengths=np.array([0, 9]), sinks=draw(6, dtype="float32")),
    **{name: of_triton[name] for name in AS_OF_TRITON.split()},
}


@pytest.mark.parametrize("h, hv", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name, h, hv):
    check(*operands(2, 300, 413, 2, 3, h, hv), **as_jax(OPTIONS[name]))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("h", [64, 96, 128, 256, 320, 512])
def test_a_mask_alone_over_whole_blocks(h, softcap):
    mask = jnp.asarray(BITS[:, :, :256, :384])
    q, k, v = operands(2, 256, 384, 2, 3, h)
    check(q, k, v, mask=mask, softcap=softcap, gradients=h <= 256)
    check(q, k, v, mask=mask[:1, :1], softcap=softcap, gradients=False)


@pytest.mark.parametrize("h", [320, 384, 512])
@pytest.mark.parametrize("name", OPTIONS)
def test_wide_heads(name, h):
    """The forward kernel alone."""
    check(*operands(2, 300, 413, 2, 3, h), gradients=False, **as_jax(OPTIONS[name]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "h, hv",
    [
        (64, 64),
        (96, 96),
        (128, 128),
        (192, 128),
        (192, 192),
        (256, 256),
        (256, 64),
        (80, 32),
        (16, 16),
    ],
)
def test_head_dims(h, hv, dtype):
    check(*operands(1, 257, 257, 2, 2, h, hv, dtype), causal=True)


@pytest.mark.parametrize("h", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_many_tiles_a_program(h, causal):
    check(*operands(2, 1536, 1536, 4, 4, h), causal=causal, gradients=False)


@pytest.mark.parametrize(
    "t, s", [(9, 1), (9, 1000), (63, 64), (128, 128), (129, 4000), (1000, 10)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(t, s, causal):
    check(*operands(2, t, s, 1, 5, 128), causal=causal)


def test_long_sequences():
    q, k, v = operands(1, 16384, 16384, 1, 1, 128)
    check(q, k, v, causal=True)
    check(q, k, v, causal=True, window=1000)


def test_one_group_of_heads():
    """Every other head from its last queries on, in one kernel."""
    check(*operands(1, 1500, 1500, 1, 4, 128), causal=True)
    lengths = jnp.array([1601])
    options: Any = dict(kv_lengths=lengths, q_offset=lengths - 1500)
    check(*operands(1, 1500, 1700, 1, 4, 128), causal=True, **options)


@pytest.mark.parametrize("h", [64, 128])
def test_windows_of_many_programs(h):
    """More blocks of keys than multiprocessors, the last of them in halves."""
    check(*operands(10, 300, 900, 2, 4, h), causal=True, window=200)


def test_64k_tokens():
    check_64k_tokens("auto")


@pytest.mark.parametrize("h, hv", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_lse_far_below_zero(h, hv):
    """At lengths divisible by 128, where cuDNN's backward pass gives NaN."""
    q, k, v = operands(1, 256, 256, 2, 2, h, hv)
    check(40 * q, 40 * k, v, causal=True, slack=20.0)  # weights of 0 and 1
    far = jnp.full((1, 1, 1, 256), -1000.0)
    check(q, k, v, bias=far, causal=True)
    check(q, k, v, bias=far, mask=jnp.asarray(BITS[:1, :1, :256, :256]))


def test_what_lies_behind_the_lengths_has_no_influence():
    q, k, v = operands(2, 200, 300, 2, 2, 64)
    lengths = jnp.array([100, 290])
    rest = jnp.arange(300)[:, None, None] >= lengths[:, None, None, None]
    run = jax.jit(lambda k, v: attend(q, k, v, kv_lengths=lengths))
    clean = run(k, v)
    dirty = run(jnp.where(rest, jnp.nan, k), jnp.where(rest, jnp.inf, v))
    np.testing.assert_array_equal(np.float32(dirty), np.float32(clean))
    assert np.isfinite(np.float32(dirty)).all()


def test_a_nan_stays_visible():
    q, k, v = operands(1, 200, 200, 1, 1, 64)
    by_query = attend(q.at[0, 7].set(jnp.nan), k, v, causal=True)
    by_key = attend(q, k.at[0, 150].set(jnp.nan), v, causal=True)
    assert jnp.isnan(by_query[0, 7]).all() and jnp.isfinite(by_query[0, 8:]).all()
    assert jnp.isnan(by_key[0, 150:]).all() and jnp.isfinite(by_key[0, :150]).all()


def test_a_nan_stays_visible_in_gradients():
    q, k, v = operands(1, 200, 200, 1, 1, 128)

    def loss(q):
        return attend(q, k, v, causal=True).astype(jnp.float32).sum()

    dq = jax.jit(jax.grad(loss))(q.at[0, 7].set(jnp.nan))
    assert jnp.isnan(dq[0, 7]).all() and jnp.isfinite(dq[0, 8:]).all()


def test_the_same_gradients_of_a_window_every_time():
    q, k, v = operands(10, 300, 900, 2, 4, 128)

    def loss(*x):
        return attend(*x, causal=True, window=200).astype(jnp.float32).sum()

    run = jax.jit(jax.grad(loss, (0, 1, 2)))
    first = run(q, k, v)
    for _ in range(20):
        assert all((x == y).all() for x, y in zip(run(q, k, v), first, strict=True))


def test_the_same_bits_every_time():
    q, k, v = operands(2, 1000, 1000, 2, 4, 128)
    run = jax.jit(lambda *x: attend(*x, causal=True))
    first = run(q, k, v)
    for _ in range(20):
        assert (run(q, k, v) == first).all()


def test_vmap():
    q, k, v = operands(3, 100, 100, 2, 2, 64)
    batched: Any = tuple(x.reshape(3, 1, *x.shape[1:]) for x in (q, k, v))
    found = jax.jit(jax.vmap(lambda *x: attend(*x, causal=True)))(*batched)
    whole = attend(q, k, v, causal=True)
    np.testing.assert_array_equal(np.float32(found[:, 0]), np.float32(whole))

    def loss(*x):
        return jnp.sin(attend(*x, causal=True).astype(jnp.float32)).sum()

    slopes = jax.grad(loss, (0, 1, 2))
    found, whole = jax.jit(jax.vmap(slopes))(*batched), jax.jit(slopes)(q, k, v)
    whole = jax.tree.map(lambda x: x[:, None], whole)
    assert max(relative_errors(found, whole, 1e-2)) < EPSILON["bfloat16"]


@pytest.mark.parametrize("h, hv", [(64, 64), (128, 128), (192, 128)])
def test_forward_mode_and_second_derivatives(h, hv):
    q, k, v = operands(1, 130, 130, 2, 2, h, hv)

    def every(q, k, v):
        def f(q, k, v):
            return attend(q, k, v, causal=True)

        def loss(q):
            return jnp.sin(f(q, k, v).astype(jnp.float32)).sum()

        def steepness(q):
            return jnp.sum(jax.grad(loss)(q).astype(jnp.float32) ** 2)

        tangents = q[:, ::-1], k[:, ::-1], v[:, ::-1]
        return *jax.jvp(f, (q, k, v), tangents), jax.grad(steepness)(q)

    exact = jax.default_matmul_precision("highest")  # of what has no kernel
    with backend("auto", strict=True), exact:
        compiled = jax.jit(every).lower(q, k, v).compile()
    assert compiled.as_text().count("mosaic_gpu_v2") >= 2
    with jax.enable_x64(True), backend("xla"):
        wide = (x.astype(jnp.float64) for x in (q, k, v))
        truth = jax.jit(every)(*wide)
    errors = relative_errors(compiled(q, k, v), truth, 1e-2)
    assert max(errors) < 3 * EPSILON["bfloat16"], errors


@pytest.mark.parametrize("h, hv", [(128, 128), (192, 128), (256, 256)])
def test_the_same_gradients_every_time(h, hv):
    q, k, v = operands(2, 1000, 1000, 2, 4, h, hv)
    bias = draw(1, 8, 1000, 1000)

    def loss(q, k, v, bias):
        out = attend(q, k, v, bias=bias, causal=True)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    run = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    first = run(q, k, v, bias)
    for _ in range(20):
        again = run(q, k, v, bias)
        assert all((x == y).all() for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("h, hv", [(128, 128), (192, 128), (256, 256)])
def test_gradients_of_many_blocks(h, hv):
    q, k, v = operands(1, 2048, 2048, 2, 4, h, hv)
    check(q, k, v, causal=True)
    check(q, k, v, segment_ids=jnp.arange(2048)[None] // 300, causal=True)
    check(q, k, v, bias=draw(1, 8, 2048, 2048))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("spec", [P("m"), P(None, None, "m")])
def test_two_gpus_share_sequences_or_heads(spec):
    check_on_two_gpus(spec, "auto", "mosaic_gpu_v2")


@pytest.mark.parametrize("check, dtype, sinks", ON_A_CARD)
@pytest.mark.parametrize("h", [64, 128, 256])
def test_one_key_with_nearly_all_weight(h, check, dtype, sinks):
    with jax.default_matmul_precision("highest"):
        check(jax.jit(slopes_of), h, dtype, sinks)
