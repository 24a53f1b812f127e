"""Folders of Hugging Face against `transformers`' logits; hostile ones are refused."""

import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from jaxkern.formats.safetensors import SafetensorsError, read_safetensors_folder
from jaxkern.models import load
from jaxkern.models.hugging_face import HARMLESS, WITHOUT
from jaxkern.models.registry import BY_MODEL_TYPE, described
from tests.models.test_llama import all_logits
from tests.models.tiny_gguf import write_tiny_gguf

GOLDEN = Path(__file__).parent.parent / "golden"
FOLDERS = GOLDEN / "transformers"
MODELS = sorted(path.name for path in FOLDERS.iterdir())
INDEX = "model.safetensors.index.json"
VALUES = [3, 0.37, True, False, "foreign", ["a", "b"], {"a": 1}]


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN / "transformers_logits.npz")


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name, golden):
    config, weights = load(FOLDERS / name, "f32")
    ours = all_logits(config, weights, golden["tokens"], slots=40)
    assert np.std(golden[name]) > 0.5
    np.testing.assert_allclose(ours, golden[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("policy", ["packed", "bf16"])
def test_other_policies(policy, golden):
    config, weights = load(FOLDERS / "qwen2_yarn", policy)
    ours = all_logits(config, weights, golden["tokens"], slots=40)
    atol = 1e-4 if policy == "packed" else 0.3
    np.testing.assert_allclose(ours, golden["qwen2_yarn"], rtol=0, atol=atol)


def test_a_gguf_file_loads_the_same_way(tmp_path):
    config, _ = load(write_tiny_gguf(tmp_path / "m.gguf", "llama"), "f32")
    assert (config.architecture, config.pairing) == ("llama", "interleaved")


def copied(tmp_path, name, config=None, **files):
    """A folder with other keys in its config.json and other contents of files."""
    folder = tmp_path / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FOLDERS / name, folder)
    content = json.loads((folder / "config.json").read_text()) | (config or {})
    kept = {key: value for key, value in content.items() if value != "drop"}
    (folder / "config.json").write_text(json.dumps(kept))
    for file, text in files.items():
        (folder / file).write_bytes(text)
    return folder


def config_of(folder):
    return described(read_safetensors_folder(folder)).config


def model_of(folder):
    """The configuration, and which tensors it takes (not a tied output)."""
    model = described(read_safetensors_folder(folder))
    return model.config, sorted(model.file.tensors)


@pytest.mark.parametrize("name", MODELS)
def test_every_key_is_used_harmless_or_refused(name, tmp_path):
    plain = model_of(FOLDERS / name)
    original = json.loads((FOLDERS / name / "config.json").read_text())
    harmless = {*HARMLESS, *BY_MODEL_TYPE[original["model_type"]].harmless}
    folder = copied(tmp_path, name)
    for key in (*original, "of_nobody", "logit_scale", "quantization_config"):
        for value in VALUES:
            if any(type(value) is type(w) and value == w for w in WITHOUT.get(key, ())):
                continue
            (folder / "config.json").write_text(json.dumps(original | {key: value}))
            try:
                model = model_of(folder)
            except SafetensorsError as error:
                assert str(error).startswith(f"{folder}: ")
            else:
                same = original.get(key, False) == value
                assert model != plain or key in harmless or same, (key, value)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        (
            "llama_linear",
            {"model_type": "gpt2"},
            "model_type is 'gpt2', known are llama",
        ),
        ("llama_linear", {"model_type": "../x"}, "model_type .* is '../x', expected a"),
        (
            "llama_linear",
            {"logit_scale": 0.5},
            "key llama.logit_scale is 0.5, which the",
        ),
        ("llama_linear", {"hidden_act": "gelu"}, "is 'gelu'.*may be 'silu'"),
        ("llama_linear", {"rms_norm_eps": "drop"}, "has no key llama.rms_norm_eps"),
        ("llama_linear", {"rms_norm_eps": 10**400}, "a number that float32 holds"),
        ("llama_linear", {"rms_norm_eps": 1e300}, "a number that float32 holds"),
        ("llama_linear", {"num_hidden_layers": 2**30}, "the files have 21 tensors"),
        ("llama_linear", {"num_hidden_layers": 1}, "layers.1.* no place in a model"),
        ("llama_linear", {"num_key_value_heads": 3}, "4 heads cannot share them"),
        ("llama_linear", {"hidden_size": 64}, r"embed_tokens.weight is \(96, 32\)"),
        (
            "llama_linear",
            {"intermediate_size": 47},
            r"is \(48, 32\), expected \(47, 32\)",
        ),
        ("llama_linear", {"attention_bias": True}, "has no tensor .*q_proj.bias"),
        ("llama3_biases", {"mlp_bias": False}, "mlp.*_proj.bias has no place in"),
        ("qwen3_tied", {"tie_word_embeddings": False}, "has no tensor lm_head.weight"),
        ("qwen3_tied", {"head_dim": "drop"}, "has no key qwen3.head_dim"),
        ("qwen3_tied", {"use_sliding_window": True}, "use_sliding_window is True"),
        (
            "qwen3_tied",
            {"layer_types": ["sliding_attention"]},
            "full_attention in every",
        ),
        (
            "qwen3_tied",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "known are default, linear, yarn, llama3 and longrope",
        ),
        (
            "qwen3_tied",
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config.quant_method is 'gptq'",
        ),
    ],
)
def test_refusals(name, config, message, tmp_path):
    with pytest.raises(SafetensorsError, match=message):
        load(copied(tmp_path, name, config), "f32")


def test_older_config_files(tmp_path, golden):
    """rope_theta beside rope_scaling, `type` for `rope_type`, no tie, no head_dim."""
    older = {"rope_parameters": "drop", "head_dim": "drop", "rope_theta": 1000.0}
    older |= {"rope_scaling": {"type": "linear", "factor": 3.0}}
    older |= {"tie_word_embeddings": "drop", "attention_bias": "drop"}
    folder = copied(tmp_path, "llama_linear", older)
    assert config_of(folder) == config_of(FOLDERS / "llama_linear")


def header(tensors, weights):
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + bytes(weights)


def entry(shape, *offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE = {
    "overlap": header({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12),
    "gap": header({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, 20),
    "truncated": header({"a": entry([20], 0, 80)}, 12),
    "wrong size": header({"a": entry([3], 0, 8)}, 8),
    "absurd shape": header({"a": entry([2**62, 2**62], 0, 8)}, 8),
    "negative": header({"a": entry([-2], 0, 8)}, 8),
    "other dtype": header({"a": entry([8], 0, 8, dtype="F8_E4M3")}, 8),
    "stranger": header({"model.layers.0.mlp.router.weight": entry([2], 0, 8)}, 8),
    "leading zero": header({"model.layers.00.mlp.up_proj.weight": entry([2], 0, 8)}, 8),
    "long header": struct.pack("<Q", 2**62) + b"{}",
    "no header": b"\0\0",
    "empty": b"",
    "no json": struct.pack("<Q", 2) + b"{]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_weights(name, tmp_path):
    files = {"model.safetensors": HOSTILE[name]}
    with pytest.raises(SafetensorsError):
        load(copied(tmp_path, "qwen2_yarn", **files), "f32")


@pytest.mark.parametrize("cut", [1, 8, 100, 2000, 46287])
def test_truncated_weights(cut, tmp_path):
    whole = (FOLDERS / "qwen2_yarn" / "model.safetensors").read_bytes()
    with pytest.raises(SafetensorsError, match=r"model.safetensors: Error while"):
        load(copied(tmp_path, "qwen2_yarn", **{"model.safetensors": whole[:cut]}))


@pytest.mark.parametrize(
    "shard",
    [
        *("../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x.bin"),
        *(".hid.safetensors", 3, None, "", "a\x00.safetensors", "C:\\x.safetensors"),
    ],
)
def test_an_index_names_files_of_its_folder(shard, tmp_path):
    listed = json.loads((FOLDERS / "llama_linear" / INDEX).read_text())
    listed["weight_map"]["lm_head.weight"] = shard
    folder = copied(tmp_path, "llama_linear", **{INDEX: json.dumps(listed).encode()})
    with pytest.raises(SafetensorsError, match="expected the name of a file of this"):
        read_safetensors_folder(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head.weight": "model-00001-of-00002.safetensors"}, "the index does not"),
        ({"lm_head.weight": "gone.safetensors"}, "has no file gone.safetensors"),
        ({"x": "model-00001-of-00002.safetensors"}, "'x' is in the index and in no"),
    ],
)
def test_an_index_says_what_is_there(change, message, tmp_path):
    listed = json.loads((FOLDERS / "llama_linear" / INDEX).read_text())
    listed["weight_map"] |= change
    folder = copied(tmp_path, "llama_linear", **{INDEX: json.dumps(listed).encode()})
    with pytest.raises(SafetensorsError, match=message):
        read_safetensors_folder(folder)


def test_weights_twice(tmp_path):
    """Whole and in shards: programs differ in which they take."""
    whole = (FOLDERS / "qwen2_yarn" / "model.safetensors").read_bytes()
    folder = copied(tmp_path, "llama_linear", **{"model.safetensors": whole})
    with pytest.raises(SafetensorsError, match="Remove the one that is not meant"):
        load(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "config.json is not JSON"),
        (b"[" * 10**6, "config.json is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b"{}", "key model_type of config.json is None"),
        (b'{"model_type": ["llama"]}', "expected a name"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "config.json is not JSON"),
    ],
)
def test_hostile_configs(content, message, tmp_path):
    folder = copied(tmp_path, "qwen2_yarn", **{"config.json": content})
    with pytest.raises(SafetensorsError, match=message):
        load(folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes")
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_pipe_is_no_file_of_a_model(file, tmp_path):
    folder = copied(tmp_path, "qwen2_yarn")
    (folder / file).unlink()
    with pytest.raises(SafetensorsError, match=f"has no file {file}"):
        load(folder)
    os.mkfifo(folder / file)
    with pytest.raises(SafetensorsError, match=f"{file} is not a regular file"):
        load(folder)
