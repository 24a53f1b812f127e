"""Kernels of the gated delta rule: interpreted, compiled, and what they refuse."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain, gated_delta_rule
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch import compiled
from jaxkern.primitives.delta_rule.gated_delta_rule import (
    GatedDeltaOperands,
    gated_delta_rule_bwd_reference,
    gated_delta_rule_reference,
)
from jaxkern.triton.delta_rule.gated_delta_rule import (
    block_inverse,
    bwd,
    chunk_ends,
    chunk_matrices,
    fwd,
    warp_chunk_matrices,
    warp_chunks,
)
from tests.triton.gluon_on_host import gluon_on_host
from tests.triton.interpreted import (
    INTERPRETED,
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

OPTIONS: dict[str, Any] = dict(scale=0.25, chunk_size=64)


@starts_it
def test_interpreted_kernels():
    check_in_its_own_process(__file__, 5)


@alone
def test_values_and_gradients():
    """Two chunks, two value heads of a key head, a token that forgets everything."""
    rng = np.random.default_rng(0)
    b, t, k, n, h, hv = 1, 67, 1, 2, 16, 16

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float16)

    query, key = (draw(b, t, k, h) / 4 for _ in range(2))
    g = jnp.asarray(-rng.exponential(0.2, (b, t, n)), jnp.float32)
    beta = jnp.asarray(rng.uniform(0, 1, (b, t, n)), jnp.float32)
    g, beta = g.at[:, 40].set(-jnp.inf), beta.at[:, 30].set(0.0)
    state = jnp.asarray(rng.standard_normal((b, n, h, hv)), jnp.float32)
    operands = [query, key, draw(b, t, n, hv), g, beta, state]
    slopes = [draw(b, t, n, hv), state[:, ::-1]]
    found = check(operands, slopes)
    np.testing.assert_array_equal(found[-3][:, 40], 0.0)  # dg of the factor 0


@alone
def test_one_key_for_all_tokens_loses_no_digits():
    """Every token overwrites what the one before wrote: T^T cancels what it is given.

    Random keys are nearly orthogonal, T nearly one, and no sum cancels: with them the
    gradients lost nothing.
    """
    rng = np.random.default_rng(0)
    t, h, hv = 64, 16, 16
    query, key, value, dout = rng.standard_normal((4, 1, t, 1, h))
    key = np.broadcast_to(key[:, :1] / np.linalg.norm(key[:, :1]), key.shape)
    operands = [jnp.asarray(x, jnp.float16) for x in (query / 4, key, value)]
    g = jnp.asarray(-rng.exponential(0.002, (1, t, 1)), jnp.float32)
    state = jnp.asarray(rng.standard_normal((2, 1, 1, h, hv)), jnp.float32)
    slopes = [jnp.asarray(dout, jnp.float16), state[1]]
    check([*operands, g, jnp.ones((1, t, 1), jnp.float32), state[0]], slopes)


@alone
@pytest.mark.parametrize("k, n, sms", [(1, 2, 17), (2, 4, 17), (1, 4, 3)])
def test_kernels_of_compute_capability_90(monkeypatch, k, n, sms):
    """Triton's interpreter runs no Gluon. Chunks enough to take every stage again.

    With two key heads the forward pass is one launch; with three multiprocessors two
    walks are one program, and four warps of a key head make the matrices forward.
    """
    rng = np.random.default_rng(0)
    t, h, hv = 200, 16, 80
    query, key, value, dout = (
        jnp.asarray(rng.standard_normal((1, t, heads, d)) / d**0.5, jnp.float16)
        for heads, d in ((k, h), (k, h), (n, hv), (n, hv))
    )
    g = jnp.asarray(-rng.exponential(0.1, (1, t, n)), jnp.float32)
    beta = jnp.asarray(rng.uniform(0, 1, (1, t, n)), jnp.float32)
    g, beta = g.at[:, 40].set(-jnp.inf), beta.at[:, 30].set(0.0)
    state, dstate = rng.standard_normal((2, 1, n, h, hv)).astype(np.float32)
    monkeypatch.setattr(bwd, "num_sms", lambda: 3)  # each has more than one chunk
    monkeypatch.setattr(fwd, "num_sms", lambda: sms)
    walks = ("hopper_forward_kernel", "hopper_both_ways_kernel")
    kernel, tiles = "hopper_gradients_kernel", [fwd.hopper_tiles]
    by_warps, blocks = "warp_chunk_matrices_kernel", [block_inverse]
    blocks += [warp_chunks, chunk_ends]
    one = [*blocks, warp_chunk_matrices, *tiles, fwd.hopper_walk]
    in_one = "hopper_forward_in_one_kernel"
    with (
        gluon_on_host(fwd.hopper_forward, in_one, imports=one) as forward_on_host,
        gluon_on_host(fwd.hopper_walk, *walks, imports=tiles) as walks_on_host,
        gluon_on_host(bwd.hopper_gradients, kernel, imports=tiles) as gradients_on_host,
        gluon_on_host(warp_chunk_matrices, by_warps, imports=blocks) as chunks_on_host,
        compiling_for(90),
    ):
        monkeypatch.setattr(chunk_matrices, "warp_chunk_matrices", chunks_on_host)
        monkeypatch.setattr(fwd, "hopper_forward", forward_on_host)
        monkeypatch.setattr(fwd, "hopper_walk", walks_on_host)
        monkeypatch.setattr(bwd, "hopper_gradients", gradients_on_host)
        assert fwd.in_one(key, value) == (k == 2)
        check([query, key, value, g, beta, state], [dout, dstate])


def check(operands, slopes) -> list[Any]:
    """Values and gradients by the interpreter against the reference in float32."""

    @jax.jit
    def by_kernels(given, slopes):
        found = fwd.gated_delta_rule(*given, **OPTIONS)
        return *found, *bwd.gated_delta_rule_bwd(*given, *slopes, **OPTIONS)

    @jax.jit
    def by_reference(given, slopes):
        given = GatedDeltaOperands(*given)
        found = gated_delta_rule_reference(given, **OPTIONS)
        return *found, *gated_delta_rule_bwd_reference(given, *slopes, **OPTIONS)

    with interpreted():
        found: list[Any] = [*by_kernels(operands, slopes)]
    wide = [[np.float32(x) for x in given] for given in (operands, slopes)]
    truth = by_reference(*wide)
    for y, expected in zip(found, truth, strict=True):
        y, expected = (np.asarray(x, np.float64) for x in (y, expected))
        # the size of a dg that other terms cancel is not its own
        error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
        assert error < 2e-3, (y.shape, error)
    return found


def spec(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def operands(t=100, k=1, n=1, h=64, hv=64, dtype="bfloat16"):
    key, gates = spec(1, t, k, h, dtype=dtype), spec(1, t, n, dtype="float32")
    return key, key, spec(1, t, n, hv, dtype=dtype), gates, gates


def both(*operands):
    y, pull = jax.vjp(lambda *a: gated_delta_rule(*a), *operands)
    return y, pull(y)


def launches(f, *operands):
    rows = explain(f, *operands, platform="cuda").rows
    assert all(row.runs.startswith("triton: ") for row in rows), rows
    return [launch for row in rows for launch in row.launches]


@starts_it
@pytest.mark.full
@pytest.mark.skipif(bridge.missing() is not None, reason="triton is not installed")
@pytest.mark.parametrize(
    "capability, n, h, hv",
    [
        (86, 2, 128, 128),
        *((c, 2, h, h) for c in (80, 90) for h in (64, 128, 256)),
        (90, 1, 48, 80),
        (90, 4, 128, 128),  # the forward pass in one launch
    ],
)
def test_kernels_compile_and_fit(capability, n, h, hv):
    with compiling_for(capability):
        found = launches(both, *operands(100, 1, n, h, hv))
        in_one = capability == 90 and max(h, hv) <= 128
        assert len({launch.name for launch in found}) == (4 if in_one else 5)
        for launch in found:
            assert compiled(launch, capability).asm["cubin"]
            assert launch.shared_bytes <= bridge.max_shared_bytes()


@pytest.mark.skipif(INTERPRETED, reason="nothing to interpret")
def test_few_heads_go_forward_in_one_launch(monkeypatch):
    monkeypatch.setattr(fwd, "num_sms", lambda: 132)

    def in_one(k, n, b=1, t=100, h=128):
        return fwd.in_one(spec(b, t, k, h), spec(b, t, n, h))

    with compiling_for(80):
        assert not in_one(16, 32)
    with compiling_for(90):
        assert in_one(16, 32) and in_one(8, 32) and in_one(1, 4, b=8)
        assert not in_one(16, 32, b=2)  # no multiprocessor is idle
        assert not in_one(16, 16)  # rows of four key heads do not fit twice
        assert in_one(16, 16, h=64)
        assert not in_one(3, 6) and not in_one(16, 32, t=64)
        assert not in_one(4, 8, h=256)


def refusal(*, chunk_size=64, **given):
    names = ("query", "key", "value", "g", "beta")
    named = dict(zip(names, operands(**given), strict=True))
    return fwd.unsupported(
        **named, initial_state=None, scale=1.0, chunk_size=chunk_size
    )


@pytest.mark.skipif(INTERPRETED, reason="nothing to interpret")
def test_what_is_refused_in_words():
    assert refusal() is None
    assert refusal(dtype="float32") == "`key` is float32"
    heads = "heads of `{}` have {} dims, no multiple of 16 up to 256"
    assert refusal(h=40) == heads.format("key", 40)
    assert refusal(hv=272) == heads.format("value", 272)
    assert refusal(t=0) == "an operand is empty"
    assert refusal(t=4_194_241) == "4194241 tokens are more than 4194240"
    assert "chunk_size 1 asks for the recurrence" in str(refusal(chunk_size=1))
    with compiling_for(86):
        assert "need more than the GPU's shared memory" in str(refusal(h=256))
    key, _, _, g, beta = operands()
    value = spec(1, 100, 1, 64, dtype="float16")
    text = str(explain(gated_delta_rule, key, key, value, g, beta, platform="cuda"))
    assert "have the dtypes bfloat16, bfloat16, float16" in text
