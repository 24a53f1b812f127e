"""Whole models in folders with packed weights, against `transformers`.

The folders of the other tests have weights of 16 or 32 bits, and gpt-oss's experts,
which its own entry reads: of a `quantization_config` they show that it is refused.
"""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkern import FP8Tensor, IntTensor, MicroscaledTensor, NF4Tensor
from jaxkern.formats.safetensors import SafetensorsError, read_safetensors_folder
from jaxkern.models import load, weight_reader
from jaxkern.models.decoder import hidden_states, logits
from jaxkern.models.packed_parts import side_by_side
from jaxkern.models.registry import described
from jaxkern.models.weight_reader import choose_policy

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = GOLDEN / "quantized_folders"
NAMES = sorted(path.name for path in FOLDERS.iterdir())
KINDS = {  # of attention, of experts, of a dense block
    "fp8": (FP8Tensor, FP8Tensor, FP8Tensor),
    "compressed_mixed": (IntTensor, MicroscaledTensor, FP8Tensor),
    "bitsandbytes": (NF4Tensor, NF4Tensor, NF4Tensor),
}


@jax.jit(static_argnums=0)
def forward(config, weights, tokens):
    x, _ = hidden_states(config, weights, tokens[None])
    return logits(config, weights, x)[0]


@pytest.mark.parametrize("policy", ["packed", "f32"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_decoded_weights(name, policy):
    with np.load(FOLDERS / name / "golden.npz") as golden:
        tokens, truth = golden["tokens"], golden["logits"]
    config, weights = load(FOLDERS / name, policy)
    found = forward(config, weights, tokens)
    assert np.std(truth) > 1
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-4)
    sparse, dense = weights.layers
    kept = sparse.mixer.qkv[0], sparse.feed_forward.gate, dense.feed_forward.gate_up[0]
    expected = KINDS.get(name, (IntTensor,) * 3)
    if policy == "f32":
        expected = (jax.Array,) * 3
    assert all(map(isinstance, kept, expected))
    assert isinstance(weights.layers[0].feed_forward.router, jax.Array)


@pytest.mark.parametrize(
    ("name", "qkv", "gate_up"),
    [("awq", 1, 1), ("compressed_mixed", 1, 1), ("fp8", 3, 2)],
)
def test_matrices_with_one_input_are_one(name, qkv, gate_up):
    """Where no block of rows would be cut: 64 + 32 + 32 rows are no blocks of 128."""
    _, weights = load(FOLDERS / name, "packed")
    assert len(weights.layers[0].mixer.qkv) == qkv
    assert len(weights.layers[1].feed_forward.gate_up) == gate_up


def test_what_lies_otherwise_stays_apart():
    rng = np.random.default_rng(0)

    def integers(rows, order=None, group_size=16):
        codes = rng.integers(0, 255, (rows, 16)).astype(np.uint8)
        scales = np.ones((rows, 32 // group_size), np.float32)
        return IntTensor(
            *map(jax.numpy.asarray, (codes, scales)),
            order=order,
            bits=4,
            group_size=group_size,
            signed=False,
        )

    def floats(rows, block):
        shape = [-(-n // b) if b else 1 for n, b in zip((rows, 8), block, strict=True)]
        codes = jax.numpy.zeros((rows, 8), jax.numpy.uint8)
        return FP8Tensor(codes, jax.numpy.ones(shape), block, "e4m3fn")

    order = jax.numpy.arange(32)[::-1]
    parts = side_by_side([integers(4), integers(6), integers(4, group_size=32)])
    assert [w.shape for w in parts] == [(10, 32), (4, 32)]
    assert len(side_by_side([integers(4, order), integers(4, order)])) == 2
    assert len(side_by_side([floats(4, (0, 0)), floats(4, (0, 0))])) == 2
    blocks = side_by_side([floats(n, (2, 4)) for n in (4, 3, 2)])
    assert [w.shape for w in blocks] == [(7, 8), (2, 8)]


def test_training_takes_the_decoded_weights():
    """`train` keeps no container: what it makes is the plain policy's."""
    _, plain = load(FOLDERS / "awq", "f32")
    _, trained = load(FOLDERS / "awq", "train")
    (gate_up,) = trained.layers[1].feed_forward.gate_up
    (expected,) = plain.layers[1].feed_forward.gate_up
    np.testing.assert_array_equal(gate_up, expected.T)
    experts = trained.layers[0].feed_forward.gate, plain.layers[0].feed_forward.gate
    np.testing.assert_array_equal(*experts)


def test_what_auto_chooses(monkeypatch):
    """No C++ kernel reads these containers; Triton's do."""
    folder = described(read_safetensors_folder(FOLDERS / "awq")).file
    assert choose_policy(folder)[0] == "f32"
    monkeypatch.setattr(weight_reader, "available_memory", lambda: 1000)
    assert choose_policy(folder)[0] == "packed"
    monkeypatch.setattr(weight_reader, "gpu_formats", lambda: {"Q4_K"})
    assert choose_policy(folder)[0] == "packed"
    plain = described(read_safetensors_folder(GOLDEN / "transformers/qwen3_tied")).file
    assert choose_policy(plain)[0] != "packed"


@pytest.fixture
def deepseek(tmp_path):
    """DeepSeek V3 in blocks of 16 x 16, and the same decoded."""
    source = GOLDEN / "transformers_hybrids" / "deepseek_v3"
    folders = tmp_path / "fp8", tmp_path / "plain"
    for folder in folders:
        shutil.copytree(source, folder)
    stored, plain = {}, {}
    for name, w in load_file(source / "model.safetensors").items():
        stored[name] = plain[name] = w
        if not name.endswith("_proj.weight") or ".layers." not in name:
            continue
        f, d = w.shape
        blocks = np.pad(np.float32(w), ((0, -f % 16), (0, -d % 16)))
        blocks = blocks.reshape(-(-f // 16), 16, -(-d // 16), 16)
        scales = np.abs(blocks).max((1, 3)) / 448
        each = scales[:, None, :, None]
        codes = (blocks / each).astype(ml_dtypes.float8_e4m3fn)
        whole = [x.reshape(16 * len(x), -1) for x in (codes, np.float32(codes) * each)]
        cut = [np.ascontiguousarray(x[:f, :d]) for x in whole]
        stored[name], plain[name] = cut[0].view(np.uint8), cut[1]
        stored[f"{name}_scale_inv"] = scales
    save_file(plain, folders[1] / "model.safetensors")
    save_file(stored, folders[0] / "model.safetensors")
    as_float8(folders[0] / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [16, 16],
    }
    (folders[0] / "config.json").write_text(json.dumps(config))
    return folders


def as_float8(path):
    """Bytes in the header become 8-bit floats, of which NumPy has none to save."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].replace(b'"U8"', b'"F8_E4M3"')
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])


def test_latent_attention_and_shared_experts_of_float8(deepseek):
    """`kv_b_proj` is taken apart by heads, so it is decoded; all others stay packed."""
    tokens = np.arange(3, 15, dtype=np.int32)
    found, expected = (
        forward(*load(folder, policy), tokens)
        for folder, policy in zip(deepseek, ("packed", "f32"), strict=True)
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    _, weights = load(deepseek[0], "packed")
    shared = weights.layers[1].feed_forward.shared
    assert isinstance(shared.gate_up[0], FP8Tensor)


@pytest.mark.full
def test_experts_of_blocks_become_rows_beside_a_shared_one(deepseek):
    tokens = np.arange(3, 15, dtype=np.int32)
    config, weights = load(deepseek[0], "fp8_experts")
    sparse = weights.layers[1].feed_forward
    assert isinstance(sparse.gate, FP8Tensor) and sparse.gate.block == (1, 0)
    found = np.float64(forward(config, weights, tokens))
    truth = np.float64(forward(*load(deepseek[1], "f32"), tokens))
    assert np.linalg.norm(found - truth) < 0.1 * np.linalg.norm(truth)


def test_scales_of_a_layer_that_predicts_further_tokens(deepseek):
    """They are left out with their weights; a scale without one is refused."""
    tensors = load_file(GOLDEN / "transformers_hybrids/deepseek_v3/model.safetensors")
    assert "model.layers.1.self_attn.o_proj.weight" in tensors
    folder = read_safetensors_folder(deepseek[0])
    assert not [name for name in folder.tensors if name.endswith("_scale_inv")]
    path = deepseek[0] / "model.safetensors"
    content = path.read_bytes()
    lost = content.replace(b'0.self_attn.o_proj.weight"', b'0.self_attn.o_prij.weight"')
    assert lost != content
    path.write_bytes(lost)
    with pytest.raises(SafetensorsError, match=r"o_prij.weight is F8_E4M3 with 0 of"):
        read_safetensors_folder(deepseek[0])
