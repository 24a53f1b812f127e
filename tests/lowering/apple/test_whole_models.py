"""Prefill, the decode loop and a training step: nothing to refuse, the same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import adamw_update, cross_entropy, dequantize
from jaxkern.formats.gguf import read_gguf
from jaxkern.lowering.apple import assume_jax_mps, check, portable
from jaxkern.lowering.apple.wire import export
from jaxkern.models.apple_check import model_calls
from jaxkern.models.command_line.main import main
from jaxkern.models.llama import empty_cache, hidden_states, logits
from jaxkern.models.loader import load_file
from tests.models.tiny_gguf import VOCABULARY, write_tiny_gguf

TINY = {"slots": 12, "steps": 4}


def tiny(path, architecture="llama", policy="packed"):
    return load_file(read_gguf(write_tiny_gguf(path / "m.gguf", architecture)), policy)


def train_step(config, weights, tokens):
    """Loss and weights after one step of AdamW on the next tokens."""

    def loss(weights):
        cache = empty_cache(config, *tokens.shape)
        x, _ = hidden_states(config, weights, tokens, cache)
        each = cross_entropy(logits(config, weights, x)[:, :-1], tokens[:, 1:])
        return each.mean()

    value, grads = jax.value_and_grad(loss)(weights)
    zeros = jax.tree.map(jnp.zeros_like, weights)
    return value, adamw_update(weights, grads, zeros, zeros, 1, learning_rate=0.1)[0]


def draw(specs):
    """Numbers in the place of shapes: small integers, cached rows, a key."""
    rng = np.random.default_rng(0)

    def one(spec):
        if not isinstance(spec, jax.ShapeDtypeStruct):
            return spec
        if jax.dtypes.issubdtype(spec.dtype, jax.dtypes.prng_key):
            return jax.random.key(7)
        if jnp.issubdtype(spec.dtype, jnp.integer):
            return jnp.asarray(rng.integers(1, 5, spec.shape), spec.dtype)
        return jnp.asarray(rng.standard_normal(spec.shape) > 2, spec.dtype)

    return jax.tree.map(one, specs)


def assert_clean(calls, platform):
    for name, (f, args) in calls.items():
        report = check(f, *args, platform=platform)
        assert report.findings == (), f"{name}: {report}"


def check_calls(calls, platform, weights):
    assert_clean(calls, platform)
    for name, (f, args) in calls.items():
        exported = export(f, *args, platform=platform)
        given = (weights, *draw(args[1:]))
        actual = jax.tree.leaves(exported.call(*given))
        expected = jax.tree.leaves(jax.jit(f)(*given))
        for a, e in zip(actual, expected, strict=True):
            if jax.dtypes.issubdtype(e.dtype, jax.dtypes.prng_key):
                a, e = map(jax.random.key_data, (a, e))
            np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4, err_msg=name)


def test_models_are_clean_for_mps(tmp_path):
    config, weights = tiny(tmp_path)
    assert_clean(model_calls(config, weights, **TINY), "mps")
    assert_clean(training(tmp_path), "mps")


@pytest.mark.full
@pytest.mark.parametrize("platform", ["mps", "metal"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_whole_models(platform, architecture, tmp_path):
    config, weights = tiny(tmp_path, architecture)
    check_calls(model_calls(config, weights, **TINY), platform, weights)


def training(path):
    config, weights = tiny(path, policy="f32")
    weights = weights._replace(embedding=dequantize(weights.embedding))
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 6))
    step = functools.partial(train_step, config)
    return {"training step": (step, (weights, jnp.asarray(tokens, jnp.int32)))}


@pytest.mark.full
@pytest.mark.parametrize("platform", ["mps", "metal"])
def test_training_step(platform, tmp_path):
    calls = training(tmp_path)
    assert_clean(calls, platform)
    step, args = calls["training step"]
    actual = export(step, *args, platform=platform).call(*args)
    expected = jax.jit(step)(*args)
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        # the first step of AdamW moves each weight by the sign of its gradient
        near = np.isclose(a, e, rtol=1e-3, atol=1e-4)
        assert near.mean() > 0.999


@pytest.mark.full
@pytest.mark.parametrize("platform", ["mtl", "METAL"])
def test_whole_models_are_reported(platform, tmp_path):
    """Clean, but for the dense products of training, which jax-metal takes merged."""
    config, weights = tiny(tmp_path)
    assert_clean(model_calls(config, weights, **TINY), platform)
    step, args = training(tmp_path)["training step"]
    found = {f.what for f in check(step, *args, platform=platform).findings}
    assert found == ({"product over 2 dims"} if platform == "METAL" else set())
    assert check(portable(step, platform), *args, platform=platform).findings == ()


def test_fused_calls_of_one_token(tmp_path):
    """Two norms and one attention a layer, and the norm in front of the first."""
    config, weights = tiny(tmp_path)
    f, args = model_calls(config, weights, **TINY)["one token"]
    with assume_jax_mps():
        report = check(f, *args)
    assert report.findings == ()
    assert report.fused_kinds == {
        "mps.rms_norm": 2 * config.layers + 1,
        "mps.sdpa": config.layers,
    }
    assert report.fused == 3 * config.layers + 1


def test_affine_weights_multiply_in_fused_calls(tmp_path):
    """Per layer query and key in one, the output, gate and down; the rest is dense."""
    config, weights = tiny(tmp_path, policy="affine")
    f, args = model_calls(config, weights, **TINY)["one token"]
    with assume_jax_mps():
        report = check(f, *args)
    assert report.findings == ()
    assert report.fused_kinds == {
        "mps.dequantize": 1,  # a row of the table
        "mps.quantized_matmul": 4 * config.layers + 1,
        "mps.rms_norm": 2 * config.layers + 1,
        "mps.sdpa": config.layers,
    }
    assert check(f, *args).findings == ()  # without jax-mps


@pytest.mark.full
def test_the_command_counts_them(tmp_path, capsys):
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama")
    assert main(["apple", "check", str(path), "--fused", "--weights", "affine"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("nothing found") == 3
    assert printed.count(" mps.quantized_matmul") == 3


@pytest.mark.full
@pytest.mark.parametrize("platform", ["mps", "metal"])
def test_whole_affine_models(platform, tmp_path):
    config, weights = tiny(tmp_path, policy="affine")
    check_calls(model_calls(config, weights, **TINY), platform, weights)
