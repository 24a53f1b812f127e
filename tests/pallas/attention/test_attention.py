"""The Hopper attention kernel on a machine without a GPU.

The interpreter runs its loader, its consumers and all of their barriers; lowering for
CUDA gives its products the layouts of WGMMA. What ptxas makes of it needs a GPU.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import attention, backend, explain
from jaxkern.gpu.device import compiling_for
from jaxkern.pallas.attention.attention import blocks, problem
from jaxkern.pallas.attention.attention import fwd as hopper
from jaxkern.primitives.attention.attention import attention_p
from jaxkern.primitives.call import Call

RNG = np.random.default_rng(0)
ABSENT = dict.fromkeys(
    (
        "bias",
        "mask",
        "q_segment_ids",
        "kv_segment_ids",
        "kv_lengths",
        "q_offset",
        "sinks",
    )
)


def operands(b, t, s, k, g, h, hv=None, dtype="bfloat16") -> Any:
    shapes = (b, t, k * g, h), (b, s, k, h), (b, s, k, hv or h)
    return tuple(jnp.asarray(RNG.standard_normal(x), dtype) for x in shapes)


def check(
    q,
    k,
    v,
    *,
    fwd=hopper.attention_fwd,
    primal=hopper.attention,
    causal=False,
    window=None,
    softcap=None,
    scale=None,
    **arrays,
):
    """Results in the interpreter against those of the reference in float64."""
    options: dict[str, Any] = dict(
        causal=causal,
        window=window,
        softcap=softcap,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
    )
    rest = list((ABSENT | arrays).values())
    found = fwd(q, k, v, *rest, **options, interpret=True)
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda x: (
                jnp.asarray(np.asarray(x, np.float64))
                if jnp.issubdtype(x.dtype, jnp.floating)
                else x
            ),
            (q, k, v, *rest),
        )
        out, lse = attention_p.reference(*wide, **options)
    hidden = np.isneginf(np.asarray(lse))
    np.testing.assert_array_equal(np.isneginf(np.asarray(found[1])), hidden)
    y, e = np.asarray(found[0], np.float64), np.asarray(out)
    assert y.shape == e.shape and not y[hidden].any()
    assert np.linalg.norm(y - e) <= 4e-3 * max(np.linalg.norm(e), 1e-2 * e.size**0.5)
    seen = ~hidden
    np.testing.assert_allclose(
        np.asarray(found[1], np.float64)[seen], np.asarray(lse)[seen], atol=1e-5
    )


def test_tiles_of_ragged_sequences_taken_in_turn(monkeypatch):
    monkeypatch.setattr(problem, "num_sms", lambda: 1)
    monkeypatch.setitem(problem.TRIED, "PERSISTENT", 1)
    check(*operands(1, 150, 270, 1, 1, 64), causal=True)


@pytest.mark.parametrize("b, t, n, programs", [(2, 1000, 3, 5), (1, 100, 4, 4)])
def test_every_tile_is_taken_once_the_longest_first(b, t, n, programs):
    q, k, v = (jax.ShapeDtypeStruct((b, t, n, 64), "bfloat16") for _ in range(3))
    c = problem.problem(q, k, v, None, 1.0, True, None, None)
    c = dataclasses.replace(c, programs=programs)
    taken = np.array(
        [
            [int(blocks.nth_tile(i, p, c)) for p in range(programs)]
            for i in range(-(-c.tiles // programs))
        ]
    )
    assert sorted(taken.ravel())[: c.tiles] == list(range(c.tiles))
    places = [tuple(map(int, blocks.place(i, c))) for i in range(c.tiles)]
    assert len(set(places)) == c.tiles == b * n * c.blocks
    assert [block for _, _, block in places] == sorted(
        (block for _, _, block in places), reverse=True
    )


IDS = jnp.asarray(np.sort(RNG.integers(0, 4, (2, 140)), 1), jnp.int32)
KV_IDS = jnp.asarray(np.sort(RNG.integers(0, 5, (2, 300)), 1), jnp.int32)
BIAS = 2 * RNG.standard_normal((2, 2, 140, 300)).astype("float32")
BITS = RNG.random((2, 2, 140, 300)) < 0.6
BITS[0, :, 70:100] = False  # rows that see nothing
BITS[1, 1, :, :130] = False  # a block that one head alone sees
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "mask": dict(mask=jnp.asarray(BITS)),
    "bias": dict(bias=jnp.asarray(np.where(BITS, BIAS, -np.inf)), causal=True),
    "bias_of_keys": dict(bias=jnp.asarray(BIAS[:1, :, :1]), softcap=2.0),
    "bias_of_queries": dict(bias=jnp.asarray(BIAS[..., :1]), scale=-0.2),
    "bias_of_heads": dict(bias=jnp.asarray(BIAS[:1, :, :1, :1])),
    "bias_and_mask": dict(
        bias=jnp.asarray(BIAS[:, :1], jnp.bfloat16),
        mask=jnp.asarray(BITS),
        kv_lengths=jnp.array([0, 130]),
    ),
    "mask_of_keys": dict(mask=jnp.asarray(BITS[:, :1, :1]), causal=True),
    "mask_of_queries": dict(mask=jnp.asarray(BITS[:1, :, :, 140:141]), window=90),
    "mask_that_shows_all": dict(mask=jnp.ones((1, 1, 140, 300), bool)),
    "mask_and_segments": dict(
        mask=jnp.asarray(BITS[:1, :1]), q_segment_ids=IDS, kv_segment_ids=KV_IDS
    ),
    "offsets": dict(causal=True, q_offset=jnp.array([-50, 200])),
    "window": dict(causal=True, window=70),
    "window_alone": dict(window=100),
    "softcap": dict(causal=True, softcap=2.0),
    "negative_scale": dict(causal=True, scale=-0.2),
    "sinks": dict(causal=True, sinks=jnp.array([0.5, -2.0])),
    "lengths": dict(kv_lengths=jnp.array([0, 130]), sinks=jnp.array([0.5, -2.0])),
    "lengths_causal": dict(
        causal=True, kv_lengths=jnp.array([290, 170]), q_offset=jnp.array([150, 1])
    ),
    "segments": dict(q_segment_ids=IDS, kv_segment_ids=KV_IDS),
    "segments_causal": dict(
        q_segment_ids=IDS, kv_segment_ids=KV_IDS, causal=True, window=120
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name):
    check(*operands(2, 140, 300, 1, 2, 32), **OPTIONS[name])


@pytest.mark.full
@pytest.mark.parametrize(
    "h, hv",
    [(96, 96), (128, 128), (192, 128), (256, 256), (512, 512), (320, 288), (512, 64)],
)
def test_head_dims(h, hv):
    check(*operands(1, 130, 130, 1, 1, h, hv, "float16"), causal=True)


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes",
    [
        dict(CONSUMERS=3, BLOCK_K=64, STAGES=3),
        dict(BLOCK_K=96, STAGES=2),
        dict(OVERLAP=0),
        dict(TURNS=0),
        dict(PERSISTENT=1),
    ],
)
def test_every_size(sizes, monkeypatch):
    monkeypatch.setattr(problem, "TRIED", sizes)
    check(*operands(1, 200, 260, 1, 2, 64), causal=True)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{}, dict(EARLY=32, LATE=64), dict(LAZY=0)])
def test_maxima_that_grow_from_block_to_block(sizes, monkeypatch):
    monkeypatch.setattr(problem, "TRIED", sizes)
    q, k, v = operands(1, 140, 400, 1, 2, 64, dtype="float16")
    growing = jnp.linspace(8, 0.01, 400)[:, None, None].astype(k.dtype)
    check(q, k * growing, v)
    check(q, k * growing, v, causal=True, q_offset=jnp.array([-50]))


@pytest.mark.full
@pytest.mark.parametrize("t, s", [(9, 1), (9, 200), (63, 64), (200, 10)])
def test_few_rows(t, s):
    check(*operands(1, t, s, 1, 1, 64), causal=True)


@pytest.mark.full
def test_a_mask_alone_over_whole_blocks():
    check(*operands(2, 140, 256, 1, 2, 32), mask=jnp.asarray(BITS[..., :256]))


@pytest.mark.full
def test_what_lies_behind_the_lengths_has_no_influence():
    q, k, v = operands(1, 16, 140, 1, 1, 64)
    run = functools.partial(
        hopper.attention,
        **ABSENT | dict(kv_lengths=jnp.array([100])),
        scale=0.1,
        causal=False,
        window=None,
        softcap=None,
        interpret=True,
    )
    clean = run(q, k, v)
    dirty = run(q, k.at[:, 100:].set(jnp.nan), v.at[:, 100:].set(jnp.inf))
    for y, e in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(np.float32(y), np.float32(e))


@pytest.mark.full
def test_recorded_vmap():
    q, k, v = operands(1, 20, 20, 1, 1, 64)
    call = Call(absent=tuple(range(3, 10)), vmaps=((0, None, None),))
    kernel = functools.partial(hopper.attention, interpret=True)
    out, lse = attention_p.evaluate_with(
        kernel,
        jnp.stack([q, 2 * q]),
        k,
        v,
        call=call,
        scale=0.1,
        causal=True,
        window=None,
        softcap=None,
    )
    assert out.shape == (2, *q.shape) and lse.shape == (2, *q.shape[:3])
    twice = kernel(
        2 * q, k, v, *ABSENT.values(), scale=0.1, causal=True, window=None, softcap=None
    )
    np.testing.assert_array_equal(np.float32(out[1]), np.float32(twice[0]))


def cuda_text(f, *args):
    with compiling_for(90), backend("mosaic_gpu", strict=True):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_is_exported_without_a_gpu():
    pytest.importorskip("flatbuffers")  # jax.export needs it to serialise
    q, k, v = operands(1, 300, 300, 2, 2, 128)
    f = jax.jit(lambda *x: attention(*x, causal=True))
    with compiling_for(90), backend("mosaic_gpu", strict=True):
        exported = jax.export.export(f, platforms=("cuda",))(q, k, v)
    again = jax.export.deserialize(exported.serialize())
    assert again.mlir_module().count("@mosaic_gpu_v2") == 1


def test_explain_names_block_sizes_registers_and_shared_memory():
    q, k, v = operands(1, 300, 300, 2, 2, 128)
    with compiling_for(90), backend("mosaic_gpu", strict=True):
        [row] = explain(lambda *x: attention(*x), q, k, v, platform="cuda").rows
        launch: Any
        [launch] = row.launches
    assert launch.describe().startswith(
        "attention_fwd_128queries_128keys_2stages: 12 programs of 3 warpgroups, "
        "232 or 40 registers, 199"
    )
    assert 196_608 < launch.shared_bytes <= problem.SHARED_BYTES + 3072
    assert "wgmma" in launch.mlir


@pytest.mark.full
@pytest.mark.parametrize(
    "h, hv", [(64, 64), (96, 96), (192, 128), (256, 256), (512, 512)]
)
def test_every_head_dim_lowers_with_every_option(h, hv):
    q, k, v = operands(2, 140, 300, 1, 2, h, hv)
    text = cuda_text(
        lambda *x: attention(
            *x,
            causal=True,
            window=50,
            softcap=3.0,
            segment_ids=(IDS, KV_IDS),
            mask=jnp.asarray(BITS),
            bias=jnp.asarray(BIAS),
            kv_lengths=jnp.array([290, 170]),
            q_offset=jnp.array([150, 1]),
            sinks=jnp.zeros(2),
        ),
        q,
        k,
        v,
    )
    assert text.count("@mosaic_gpu_v2") == 1


def choices(f, *args):
    """What `explain` says without what kernels use, for which they are lowered."""
    rows = explain(f, *args, platform="cuda").rows
    return "\n".join(f"runs {row.runs}, not {row.refused}" for row in rows)


def refusals(*args, capability=90, **options):
    with compiling_for(capability), backend("mosaic_gpu"):
        return choices(lambda *x: attention(*x, **options), *args)


def test_refuses_in_words():
    q, k, v = operands(1, 16, 16, 1, 1, 64)
    assert "runs mosaic_gpu: pallas.attention" in refusals(q, k, v)
    assert "compute capability is 80, not 90" in refusals(q, k, v, capability=80)
    assert "8 queries are no more than 8" in refusals(q[:, :8], k, v)
    assert "multiples of 16" in refusals(q[..., :40], k[..., :40], v)
    assert "is float32" in refusals(*(x.astype(jnp.float32) for x in (q, k, v)))
    q, k, v = operands(1, 16, 16, 1, 1, 528)
    assert "of 32 to 512" in refusals(q, k, v)
    assert "do not fit shared memory" in refusals(
        q[..., :512], k[..., :512], v[..., :192]
    )


def test_runs_by_default_where_it_was_measured():
    def chosen(h, t=4096, gradient=False, bias=None):
        q, k = (jax.ShapeDtypeStruct((1, t, n, h), "bfloat16") for n in (8, 2))
        pairs = None if bias is None else jax.ShapeDtypeStruct((1, 1, t, t), bias)

        def f(q, k, v, bias):
            out: Any = attention(q, k, v, bias=bias, causal=True)
            return out.sum()

        with compiling_for(90):
            f = jax.grad(f) if gradient else f
            return choices(f, q, k, k, pairs)

    backward = "runs mosaic_gpu: pallas.attention.attention.bwd"
    assert "runs mosaic_gpu: pallas.attention" in chosen(128)
    for h in (64, 320, 384, 512):
        assert "runs mosaic_gpu" in chosen(h)
    assert "runs triton" in chosen(80) and "no gain was measured" in chosen(80)
    assert "no gain was measured at 64 dims" in chosen(64, bias="bfloat16")
    assert "runs mosaic_gpu: pallas.attention.attention.joint_bwd" in chosen(
        128, gradient=True
    )
    assert backward in chosen(128, 4088, gradient=True)
    assert backward in chosen(128, 1024, gradient=True)
    assert backward in chosen(256, 256, gradient=True)
    few = chosen(128, 120, gradient=True)
    assert backward not in few
    assert "fewer than 128 queries were not measured" in few
    assert backward not in chosen(512, gradient=True)
    assert "above 256" in chosen(512, gradient=True)
    assert "runs mosaic_gpu: pallas.attention" in chosen(128, bias="float32")
    assert backward in chosen(128, bias="bfloat16", gradient=True)
