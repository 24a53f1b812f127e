"""Weights that are not finite are refused when a model is loaded, by name."""

import json
import shutil
import struct
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern import GGUFTensor, dequantize
from jaxkern.formats.finite_weights import AT_ONCE, BROKEN, FiniteCheck, all_finite
from jaxkern.formats.gguf import GGUFError, read_gguf
from jaxkern.formats.safetensors import SafetensorsError, read_safetensors_folder
from jaxkern.models.adapter import AdapterError
from jaxkern.models.loader import load
from jaxkern.primitives.quant.block_formats import FORMATS
from jaxkern.primitives.quant.gguf_blocks import FLOAT_TYPES
from tests.formats.test_quantized_folder import scheme, write_folder
from tests.models.tiny_gguf import write_tiny_gguf

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = GOLDEN / "transformers_hybrids"


@pytest.mark.parametrize("qtype", FORMATS)
def test_a_block_is_finite_where_its_weights_are(qtype):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (400, FORMATS[qtype].bytes), np.uint8)
    blocks[1::2] |= rng.choice([0, 1, 64, 124, 127, 255], blocks[1::2].shape).astype(
        np.uint8
    )
    if qtype == "MXFP4":  # where 2**127 times a code is no number of float32
        blocks[:, 0] = np.where(blocks[:, 0] < 255, blocks[:, 0] % 250, 255)
        blocks[:, 1:] |= 15
    if qtype == "Q8_K":  # likewise
        high = blocks[:, 3] & 127
        blocks[:, 2] |= np.where(high == 127, 128, 0).astype(np.uint8)
        blocks[:, 3] = np.where(high == 127, 127, high % 120)
    weights = np.asarray(dequantize(GGUFTensor(jnp.asarray(blocks), qtype)))
    expected = np.isfinite(weights).all(-1)
    assert qtype in ("NVFP4",) or 0 < expected.sum() < 400
    found = [all_finite(block[None], qtype) for block in blocks]
    np.testing.assert_array_equal(found, expected)
    assert all_finite(blocks[expected], qtype)
    assert all_finite(blocks[:0], qtype)


@pytest.mark.parametrize("qtype", BROKEN)
@pytest.mark.parametrize("at", [0, 7, AT_ONCE, AT_ONCE + 6])
def test_one_number_among_many_is_found(qtype, at):
    bits, broken = BROKEN[qtype]
    numbers = np.full(AT_ONCE + 7, broken - 1, bits)  # large, and finite
    assert all_finite(numbers.view(np.uint8), qtype)
    numbers[at] = broken
    assert not all_finite(numbers.view(np.uint8), qtype)


@pytest.mark.parametrize("policy", ["packed_int8", "packed", "f32", "bf16", "train"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize(
    "tensor", ["token_embd.weight", "blk.1.ffn_down.weight", "output_norm.weight"]
)
def test_a_gguf_file_is_refused(tmp_path, tensor, value, policy):
    file = read_gguf(write_tiny_gguf(tmp_path / "m.gguf", "llama"))
    info, data = file.tensors[tensor], bytearray((tmp_path / "m.gguf").read_bytes())
    block = info.offset + info.nbytes - FORMATS[info.qtype].bytes  # the last
    number = np.array(value, FLOAT_TYPES.get(info.qtype, np.float16)).tobytes()
    data[block : block + len(number)] = number
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(GGUFError, match=rf"broken.gguf: tensor {tensor} has weights t"):
        load(path, policy)
    assert not np.isfinite(dequantized(read_gguf(path).load(tensor))).all()


def dequantized(w):
    return np.asarray(dequantize(w) if isinstance(w, GGUFTensor) else w)


@pytest.mark.parametrize("policy", ["packed", "f32"])
@pytest.mark.parametrize(
    "folder, tensor",
    [
        ("transformers/qwen3_tied", "model.layers.0.mlp.down_proj.weight"),
        ("quantized_folders/gptq", "model.layers.0.mlp.experts.0.down_proj.scales"),
        ("quantized_folders/fp8", "model.layers.0.mlp.experts.0.down_proj.weight"),
    ],
)
def test_a_folder_is_refused(tmp_path, folder, tensor, policy):
    shutil.copytree(GOLDEN / folder, tmp_path / "model")
    change(tmp_path / "model/model.safetensors", tensor)
    with pytest.raises(SafetensorsError, match=rf"tensor {tensor} has weights that"):
        load(tmp_path / "model", policy)


@pytest.mark.parametrize("policy", ["packed", "bf16"])
def test_scales_of_mxfp4_are_looked_at_as_powers_of_two(tmp_path, policy):
    shutil.copytree(FOLDERS / "gpt_oss_mxfp4", tmp_path / "model")
    tensor = "model.layers.1.mlp.experts.down_proj_scales"
    change(tmp_path / "model/model.safetensors", tensor)  # U8 in the file
    with pytest.raises(SafetensorsError, match=rf"tensor {tensor} has weights that"):
        load(tmp_path / "model", policy)


@pytest.mark.parametrize("bits, name", [(8, "weight"), (4, "weight_packed")])
def test_scales_of_packed_matrices_are_looked_at_as_powers_of_two(tmp_path, bits, name):
    codes = np.zeros((4, 64), ml_dtypes.float8_e4m3fn)
    codes = codes if bits == 8 else np.zeros((4, 32), np.uint8)
    scales = np.full((4, 2), 254, np.uint8)
    weights = dict(num_bits=bits, type="float", strategy="group", group_size=32)
    tensors = {name: codes, "weight_scale": scales}

    def loaded():
        file = read_safetensors_folder(
            write_folder(tmp_path, scheme(**weights), tensors)
        )
        file.checked(check := FiniteCheck()).load("m.weight")
        check.finish()

    loaded()
    scales[3, 0] = 255
    with pytest.raises(
        SafetensorsError, match=r"tensor m\.weight_scale has weights th"
    ):
        loaded()


def change(path: Path, tensor: str):
    """Writes NaN over the last number of a tensor of a safetensors file."""
    data = bytearray(path.read_bytes())
    (size,) = struct.unpack("<Q", data[:8])
    at = json.loads(data[8 : 8 + size])[tensor]
    bits, broken = BROKEN[at["dtype"].replace("U8", "F8_E8M0")]
    number = np.array(broken | 1, bits).tobytes()
    end = 8 + size + at["data_offsets"][1]
    data[end - len(number) : end] = number
    path.write_bytes(data)


def test_an_adapter_is_refused(tmp_path):
    shutil.copytree(GOLDEN / "peft_lora/llama", tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_model.safetensors"
    tensor = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    change(path, tensor)
    with pytest.raises(AdapterError, match=f"tensor {tensor} has weights that are not"):
        load(GOLDEN / "transformers/qwen3_tied", adapter=tmp_path / "adapter")
