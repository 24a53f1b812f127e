"""The model against a float64 evaluation of the same file; batches against rows."""

import dataclasses
import re

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import InterleavedTensor
from jaxkern.formats.gguf import GGUFError, read_gguf
from jaxkern.models.llama import (
    decode,
    empty_cache,
    hidden_states,
    logits,
    prefill,
)
from jaxkern.models.loader import load_file
from jaxkern.models.registry import config_of
from jaxkern.models.weight_reader import choose_policy
from tests.golden.float64_llama import Float64Llama
from tests.models.tiny_gguf import VOCABULARY, write_tiny_gguf

TOKENS = np.random.default_rng(7).integers(0, VOCABULARY, 24)
MODELS = {
    "llama": {"architecture": "llama"},
    "llama_tied": {"architecture": "llama", "tied": True},
    "llama3_factors": {"architecture": "llama", "factors": True},
    "mistral_window": {"architecture": "llama", "window": 5},
    "linear_scaling": {"architecture": "llama", "linear_scaling": 4.0},
    "qwen2": {"architecture": "qwen2"},
    "qwen3_tied": {"architecture": "qwen3", "tied": True},
}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
YARN_TURNS = {"yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0, "attn_factor": 1.3}
YARN_TURNS |= {"yarn_log_multiplier": 0.7, "original_context_length": 128}
CAPS = {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5}
# What these keys do was not in any file above, so nothing compared it: the file of the
# tests wrote a type with each factor, and no scale, cap or bias.
KEYS = {
    "factor_without_type": {"keys": {"rope.scaling.factor": 4.0}},
    "old_factor": {"keys": {"rope.scale_linear": 3.0}},
    "no_scaling": {"keys": {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}},
    "yarn": {"keys": YARN | {"rope.scaling.original_context_length": 128}},
    "yarn_of_the_whole_context": {"keys": YARN},
    "yarn_turns": {
        "keys": YARN | {f"rope.scaling.{key}": v for key, v in YARN_TURNS.items()}
    },
    "yarn_without_ramp": {"keys": YARN | {"rope.scaling.yarn_ext_factor": 0.0}},
    "ramp_without_type": {
        "keys": {"rope.scaling.factor": 4.0, "rope.scaling.yarn_ext_factor": 1.0}
    },
    "scale_and_caps": {"keys": CAPS | {"attention.scale": 0.6}},
    "biases": {"biases": True},
}
MODELS |= {name: {"architecture": "llama", **what} for name, what in KEYS.items()}


def all_logits(config, weights, tokens, slots=32):
    cache = empty_cache(config, 1, slots)
    x, _ = jax.jit(hidden_states, static_argnums=0)(
        config, weights, jnp.array(tokens, jnp.int32)[None], cache
    )
    return np.asarray(logits(config, weights, x))[0]


@pytest.mark.parametrize(
    ("name", "policy"),
    [(name, "f32") for name in MODELS]
    + [(name, "packed") for name in MODELS if name not in KEYS or name == "biases"],
)
def test_float64(name, policy, tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf", **MODELS[name])
    config, weights = load_file(read_gguf(path), policy)
    truth = Float64Llama(path).forward(TOKENS)
    assert np.std(truth) > 0.3  # random weights still say something
    np.testing.assert_allclose(
        all_logits(config, weights, TOKENS), truth, rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("name", KEYS)
def test_a_key_matters(name, tmp_path):
    """The truth of each file above is not that of the file without its keys."""
    plain = Float64Llama(write_tiny_gguf(tmp_path / "a.gguf", "llama")).forward(TOKENS)
    path = write_tiny_gguf(tmp_path / "b.gguf", **MODELS[name])
    far = np.abs(Float64Llama(path).forward(TOKENS) - plain).max()
    assert (far == 0) if name == "no_scaling" else (far > 1e-2)


@pytest.mark.parametrize("policy", ["f32", "packed_int8"])
def test_a_split_file_is_the_same_model(policy, tmp_path):
    """Parts as the `gguf` package writes them."""
    write_tiny_gguf(tmp_path / "m.gguf", "llama", tensors_per_part=9)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3 and not (tmp_path / "m.gguf").exists()
    split = load_file(read_gguf(parts[0]), policy)
    whole = load_file(read_gguf(write_tiny_gguf(tmp_path / "w.gguf", "llama")), policy)
    assert split[0] == whole[0]
    jax.tree.map(np.testing.assert_array_equal, split[1], whole[1])


def test_bf16_is_close(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama")
    config, weights = load_file(read_gguf(path), "bf16")
    assert weights.layers[0].gate_up[0].dtype == jnp.bfloat16
    truth = Float64Llama(path).forward(TOKENS)
    np.testing.assert_allclose(
        all_logits(config, weights, TOKENS), truth, rtol=0, atol=0.1
    )


@pytest.mark.smoke
@pytest.mark.parametrize(
    "name",
    ["llama", "mistral_window", pytest.param("qwen3_tied", marks=pytest.mark.full)],
)
def test_ragged_batch_equals_rows(name, tmp_path):
    """Prefill in two parts and decode, three rows of different length."""
    path = write_tiny_gguf(tmp_path / "m.gguf", **MODELS[name])
    config, weights = load_file(read_gguf(path), "f32")
    lengths, more = np.array([9, 3, 6]), np.array([2, 5, 1])
    rng = np.random.default_rng(1)
    first, second = rng.integers(0, VOCABULARY, (2, 3, 9)).astype(np.int32)
    cache = empty_cache(config, 3, 24)
    _, cache = prefill(config, weights, first, lengths, cache)
    _, cache = prefill(config, weights, second[:, :5], more, cache)
    third = np.array([4, 200, 77], np.int32)
    after, cache = decode(config, weights, jnp.array(third), cache)
    np.testing.assert_array_equal(cache[0].lengths, lengths + more + 1)
    for i in range(3):
        row = [*first[i, : lengths[i]], *second[i, : more[i]], third[i]]
        np.testing.assert_allclose(
            after[i], all_logits(config, weights, row)[-1], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("name", MODELS)
def test_fused_float64(name, tmp_path):
    """Norms, rotation and the cache by one op: the same model.

    The tests above have it only where a GPU is: `fused` is set there.
    """
    path = write_tiny_gguf(tmp_path / "m.gguf", **MODELS[name])
    config, weights = load_file(read_gguf(path), "packed")
    fused = dataclasses.replace(config, fused=True)
    np.testing.assert_allclose(
        all_logits(fused, weights, TOKENS),
        Float64Llama(path).forward(TOKENS),
        rtol=0,
        atol=2e-5,
    )


def test_fused_products_with_weights_of_16_bits(tmp_path):
    """Fused or not, bfloat16 is as far from float64."""
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama")
    config, weights = load_file(read_gguf(path), "bf16")
    truth = Float64Llama(path).forward(TOKENS)
    plain, fused = (
        np.linalg.norm(
            all_logits(dataclasses.replace(config, fused=f), weights, TOKENS) - truth
        )
        for f in (False, True)
    )
    assert 0 < fused <= 1.2 * plain


def test_weights_that_a_gpu_keeps_packed(tmp_path, monkeypatch):
    """What its kernels read stays as it is, the rest is decoded to bfloat16."""
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama")
    file = read_gguf(path)
    monkeypatch.setattr("jaxkern.models.weight_reader.gpu_formats", lambda: {"Q8_0"})
    assert choose_policy(file) == (
        "packed",
        "Triton kernels read it as it is; the fewest bytes",
    )
    config, weights = load_file(file)
    assert (config.dtype, config.product_dtype) == ("bfloat16", None)
    matrices = [
        w
        for layer in weights.layers
        for part in (layer.qkv, layer.attention_output, layer.gate_up, layer.down)
        for w in part
    ]
    packed = [w for w in matrices if isinstance(w, InterleavedTensor)]
    plain = [w for w in matrices if isinstance(w, jax.Array)]
    assert packed and len(packed) + len(plain) == len(matrices)
    assert {w.qtype for w in packed} == {"Q8_0"}
    assert {str(w.dtype) for w in plain} == {"bfloat16"}
    truth = Float64Llama(path).forward(TOKENS)
    error = np.linalg.norm(all_logits(config, weights, TOKENS) - truth)
    assert error < 0.05 * np.linalg.norm(truth)


def test_config(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf", "qwen3", window=7)
    config = config_of(read_gguf(path))
    assert (config.head_dim, config.rotary_dim, config.window) == (32, 32, 7)
    assert config.pairing == "neox"
    assert config.scaling is None
    assert hash(config) == hash(dataclasses.replace(config))


def test_policy(tmp_path, monkeypatch):
    file = read_gguf(write_tiny_gguf(tmp_path / "m.gguf", "llama"))
    monkeypatch.setattr("jaxkern.models.weight_reader.missing", lambda: None)
    assert choose_policy(file)[0] == "packed_int8"
    monkeypatch.setattr("jaxkern.models.weight_reader.missing", lambda: "not built")
    assert choose_policy(file)[0] == "f32"
    monkeypatch.setattr("jaxkern.models.weight_reader.available_memory", lambda: 1000)
    policy, reason = choose_policy(file)
    assert policy == "packed"
    assert "available" in reason
    with pytest.raises(
        ValueError, match="must be one of auto, packed, packed_int8, f32"
    ):
        choose_policy(file, "int3")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("architecture", "missing"),
    [
        ("llama", "blk.1.attn_output.weight"),
        ("qwen2", "blk.1.attn_k.bias"),
        ("qwen3", "blk.0.attn_q_norm.weight"),
    ],
)
def test_a_tensor_that_makes_the_architecture(architecture, missing, tmp_path):
    """What one may lack another must have; every file of the tests had it."""
    file = read_gguf(write_tiny_gguf(tmp_path / "m.gguf", architecture))
    tensors = {name: info for name, info in file.tensors.items() if name != missing}
    with pytest.raises(GGUFError, match=re.escape(f"has no tensor {missing}.")):
        load_file(dataclasses.replace(file, tensors=tensors), "f32")


def rewrite(path, *, keys=(), tensors=(), drop=None, architecture="llama"):
    """A file with some keys and tensors added, and one tensor left out."""
    source = gguf.GGUFReader(write_tiny_gguf(path.with_suffix(".source"), "llama"))
    writer = gguf.GGUFWriter(path, architecture)
    added = dict(keys)
    for key, field in source.fields.items():
        if key.startswith("llama.") and key not in added:
            writer.add_key_value(key, field.contents(), field.types[0])
    for key, value in added.items():
        kind = {int: "UINT32", float: "FLOAT32", str: "STRING"}[type(value)]
        writer.add_key_value(key, value, gguf.GGUFValueType[kind])
    for t in source.tensors:
        if t.name != drop:
            writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    for name in tensors:
        writer.add_tensor(name, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gpt2"}, "general.architecture is 'gpt2', known are llama"),
        ({"keys": {"llama.expert_count": 8}}, "mixture of experts"),
        ({"keys": {"llama.attention.head_count": 3}}, "3 heads cannot share 2"),
        ({"keys": {"llama.attention.head_count": "4"}}, "'4', expected an integer"),
        ({"keys": {"llama.attention.key_length": 8}}, "differ|attn_q|dims of a head"),
        ({"keys": {"llama.block_count": 3}}, "has no tensor blk.2."),
        ({"keys": {"llama.block_count": 1}}, "blk.1.* has no place in a model"),
        (
            {
                "keys": {
                    "llama.rope.scaling.type": "longrope",
                    "llama.rope.scaling.factor": 4.0,
                }
            },
            "scaling.type is 'longrope'",
        ),
        ({"keys": {"llama.block_count": 2**31 - 1}}, "the file has .* tensors"),
        ({"keys": {"llama.attention.sliding_window": 2**31}}, "expected 0 to 2147"),
        ({"keys": {"llama.rope.dimension_count": 32}}, "even number of the 16 dims"),
        ({"keys": {"llama.rope.freq_base": 0.0}}, "expected a positive number"),
        ({"keys": {"llama.rope.freq_base": float("nan")}}, "a positive number"),
        ({"drop": "blk.1.ffn_up.weight"}, "has no tensor blk.1.ffn_up.weight"),
        ({"drop": "token_embd.weight"}, "has no tensor token_embd.weight"),
        ({"tensors": ["blk.0.attn_sub_norm.weight"]}, "attn_sub_norm.* no place"),
    ],
)
def test_refusals(change, message, tmp_path):
    file = rewrite(tmp_path / "m.gguf", **change)
    with pytest.raises(GGUFError, match=message):
        load_file(file, "f32")
