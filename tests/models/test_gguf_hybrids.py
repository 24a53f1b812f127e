"""GGUF files of hybrids and of latent attention, as llama.cpp's converter writes them.

The tensors of the golden folders under the names and in the forms that its source has:
rates for logarithms, convolutions without their dim of 1, norms as they are, keys and
values of a latent apart. tests/models/test_architectures.py writes the files of the
llama page, whose weights the converter does not change but for norms and rows.
"""

import json
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.gguf_keys import gguf_keys
from jaxkern.formats.gguf import GGUFError, read_gguf
from jaxkern.formats.safetensors import read_safetensors_folder
from jaxkern.models import load
from jaxkern.models.architecture import page_of
from jaxkern.models.loader import load_file as load_opened
from jaxkern.models.registry import described
from tests.models.test_architecture_keys import check_every_key
from tests.models.tiny_gguf import add_key

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = GOLDEN / "transformers_hybrids"


@jax.jit(static_argnums=0)
def forward(config, weights, tokens):
    page = page_of(config)
    x, _ = page.hidden_states(config, weights, tokens[None])
    return page.logits(config, weights, x)[0]


def golden_of(name):
    with np.load(FOLDERS / name / "golden.npz") as golden:
        return golden["tokens"][:16], golden["logits"][:16]


def tensors_of(folder):
    """The folder's tensors under GGUF's names; experts stacked, gate and up apart."""
    model = described(read_safetensors_folder(folder))
    found, experts = {}, defaultdict(dict)
    for name in model.file.tensors:
        w = np.asarray(model.file.view(name), np.float32)
        part, _, number = name.partition("_exps.")
        if "_exps." in name and number.split(".")[0].isdigit():
            experts[f"{part}_exps.weight"][int(number.split(".")[0])] = w
        elif "gate_up" in name:
            for at, half in zip(("gate", "up"), np.split(w, 2, axis=-2), strict=True):
                found[name.replace("gate_up", at)] = half
        else:
            found[name] = w
    for name, parts in experts.items():
        found[name] = np.stack([parts[i] for i in range(len(parts))])
    return found


def write(path, kind, keys, tensors, others=None, *, in_parts_of=0, packed=()):
    """Keys of the architecture, and others by their whole names; `packed` as Q8_0."""
    writer = gguf.GGUFWriter(path, kind, split_max_tensors=in_parts_of)
    whole = {f"{kind}.{key}": value for key, value in keys.items()}
    for key, value in (whole | (others or {})).items():
        add_key(writer, key, value)
    for name, w in tensors.items():
        w = np.ascontiguousarray(w, np.float32)
        if name in packed:
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(w, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, w)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def recurrent(tensors):
    """As converters write what recurrent layers have."""
    found = {}
    for name, w in tensors.items():
        if name.endswith(".ssm_a_log"):
            name, w = name.replace("_a_log", "_a"), -np.exp(w)
        elif name.endswith(".ssm_conv1d.weight"):
            w = w[:, 0]
        found[name] = w
    return found


def renamed(tensors, **names):
    """Parts of names in other words."""
    found = {}
    for name, w in tensors.items():
        for old, new in names.items():
            name = name.replace(f".{old}.", f".{new}.")
        found[name] = w
    return found


def rows_in_pairs(tensors):
    """Rows of q and k as converters of Llama's relatives sort them, of heads of 8."""
    found = dict(tensors)
    for name, w in tensors.items():
        if name.endswith((".attn_q.weight", ".attn_k.weight")):
            heads = w.reshape(-1, 2, 4, 32)
            found[name] = heads.swapaxes(1, 2).reshape(w.shape)
    return found


def of_mamba2(tensors, groups):
    """Recurrent layers with rates and skips by heads, norms by groups."""
    found = recurrent(tensors)
    for name, w in found.items():
        if name.endswith((".ssm_a", ".ssm_d")):
            found[name] = w[:, None]
        elif name.endswith(".ssm_norm.weight"):
            found[name] = w.reshape(groups, -1)
    return found


def check_file(path, name, but, atol=1e-4):
    """Logits of the golden folder, and no key that is overlooked."""
    tokens, truth = golden_of(name)
    found = forward(*load(path, "f32"), tokens)
    np.testing.assert_allclose(found, truth, rtol=0, atol=atol)
    file = read_gguf(path)
    check_every_key(file, but=but)
    return file


SIZES = {
    "block_count": 2,
    "context_length": 256,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "vocab_size": 96,
}
GROUPED_EXPERTS = {
    "leading_dense_block_count": 1,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 16,
    "expert_shared_count": 2,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
}
DEEPSEEK = {
    **SIZES,
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 24,
    "attention.q_lora_rank": 20,
    "attention.key_length": 32,
    "attention.value_length": 24,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 12,
    "rope.dimension_count": 8,
    "rope.freq_base": 1000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_beta_fast": 8.0,
    "rope.scaling.yarn_beta_slow": 2.0,
    "rope.scaling.yarn_log_multiplier": 0.1,
    **GROUPED_EXPERTS,
    "expert_weights_scale": 2.5,
}


def latent_apart(tensors):
    """kv_b of 4 heads of 16 keys and 12 values, the keys transposed."""
    found = {}
    for name, w in tensors.items():
        if name.endswith("attn_kv_b.weight"):
            keys, values = np.split(w.reshape(4, 28, 24), [16], axis=1)
            found[name.replace("kv_b", "k_b")] = keys.swapaxes(1, 2)
            found[name.replace("kv_b", "v_b")] = values
        else:
            found[name] = w
    return found


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    tensors = latent_apart(tensors_of(FOLDERS / "deepseek_v3"))
    return write(
        tmp_path_factory.mktemp("d") / "m.gguf", "deepseek2", DEEPSEEK, tensors
    )


def test_deepseek(deepseek, tmp_path):
    tokens, truth = golden_of("deepseek_v3")
    found = forward(*load(deepseek, "f32"), tokens)
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-4)
    # files from before the cache of latents have kv_b whole, and no lengths of its own
    old = {k: v for k, v in DEEPSEEK.items() if not k.endswith("_mla")}
    old |= {"attention.key_length": 24, "attention.value_length": 12}
    old |= {"attention.head_count_kv": 4}
    tensors = tensors_of(FOLDERS / "deepseek_v3")
    path = write(tmp_path / "old.gguf", "deepseek2", old, tensors)
    config, weights = load(path, "f32")
    assert not config.mixers[0].apart
    new = load(deepseek, "f32")[1]
    jax.tree.map(np.testing.assert_array_equal, weights, new)


def test_every_key_of_deepseek(deepseek):
    check_every_key(read_gguf(deepseek))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.key_length", 24, "expected that of the cache"),
        ("attention.head_count_kv", 4, "expected 1"),
        ("expert_gating_func", 3, "known are 1, softmax"),
        ("expert_gating_func", 1, "programs differ in how a softmax ranks"),
        ("expert_group_count", 3, "of 8 experts"),
        ("rope.scaling.yarn_log_multiplier", 0.0, "programs differ in what YaRN"),
        ("rope.dimension_count", 24, "expected that of the cache"),
        ("nextn_predict_layers", 1, "which the model of architecture deepseek2"),
    ],
)
def test_refusals_of_deepseek(deepseek, key, value, message):
    file = read_gguf(deepseek)
    metadata = {**file.metadata, f"deepseek2.{key}": value}
    with pytest.raises(GGUFError, match=message):
        described(replace(file, metadata=metadata))


QWEN = {
    **SIZES,
    "attention.layer_norm_rms_epsilon": 1e-3,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "rope.dimension_count": 4,
    "rope.freq_base": 10000.0,
    "full_attention_interval": 2,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
    "expert_count": 6,
    "expert_used_count": 3,
    "expert_feed_forward_length": 16,
    "expert_shared_feed_forward_length": 24,
    "expert_weights_norm": True,
}


def test_qwen3_next(tmp_path):
    folder = FOLDERS / "qwen3_next"
    assert json.loads((folder / "config.json").read_text())["norm_topk_prob"]
    tensors = {}
    for name, w in recurrent(tensors_of(folder)).items():
        name = name.replace(".ffn_norm.", ".post_attention_norm.")
        if name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
            w = w + 1
        tensors[name] = w
    tokens, truth = golden_of("qwen3_next")
    older = write(tmp_path / "older.gguf", "qwen3next", QWEN, tensors)
    found = forward(*load(older, "f32"), tokens)
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-4)
    # of a key head: q and k of 8, v and z of its two value heads of 16
    by_head = tensors.pop("blk.0.ssm_in.weight").reshape(2, 80, 32)
    q, k, v, z = np.split(by_head, [8, 16, 48], axis=1)
    tensors["blk.0.attn_qkv.weight"] = np.concatenate(
        [part.reshape(-1, 32) for part in (q, k, v)]
    )
    tensors["blk.0.attn_gate.weight"] = z.reshape(-1, 32)
    path = write(tmp_path / "m.gguf", "qwen3next", QWEN, tensors)
    found = forward(*load(path, "f32"), tokens)
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-4)
    check_every_key(read_gguf(path), but=("rope.scaling.", "feed_forward_length"))
    grows = {**tensors, "blk.0.ssm_a": -tensors["blk.0.ssm_a"]}
    path = write(tmp_path / "grows.gguf", "qwen3next", QWEN, grows)
    with pytest.raises(GGUFError, match=r"blk.0.ssm_a has a rate above 0"):
        load(path, "f32")


def in_turns(w, axis, size):
    """Value heads of 2 key heads: both first ones, then both second ones."""
    heads = np.moveaxis(w, axis, 0).reshape(2, 2, size, -1).swapaxes(0, 1)
    moved = heads.reshape(np.moveaxis(w, axis, 0).shape)
    return np.moveaxis(moved, 0, axis)


def qwen35_of(folder):
    """Tensors as the converter writes them; the first layer is a delta net."""
    found = {}
    for name, w in recurrent(tensors_of(folder)).items():
        part = name.removeprefix("blk.0.").removesuffix(".weight")
        name = name.replace(".ffn_norm.", ".post_attention_norm.")
        if name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
            w = w + 1
        if part in ("attn_qkv", "ssm_conv1d"):  # q and k of 2 heads of 8, then v
            w = np.concatenate([w[:32], in_turns(w[32:], 0, 16)])
        elif part in ("attn_gate", "ssm_out"):
            w = in_turns(w, 0 if part == "attn_gate" else 1, 16)
        elif part in ("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt.bias"):
            w = in_turns(w, 0, 1)
        found[name] = w
    return found


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_qwen35(name, tmp_path):
    """With a third layer that predicts a further token, which is left out."""
    kind = "qwen35moe" if "moe" in name else "qwen35"
    keys = {**QWEN, "rope.dimension_sections": [11, 11, 10, 0]}
    keys |= {"block_count": 3, "nextn_predict_layers": 1}
    keys = {k: v for k, v in keys.items() if "moe" in kind or "expert" not in k}
    tensors = qwen35_of(FOLDERS / name)
    tensors["blk.2.nextn.eh_proj.weight"] = np.zeros((32, 64))
    path = write(tmp_path / "m.gguf", kind, keys, tensors)
    but = ("rope.scaling.", "rope.dimension_sections", "expert_", "feed_forward_length")
    check_file(path, name, but)


GRANITE = {
    **SIZES,
    "context_length": 2**20,
    "feed_forward_length": 16,
    "attention.head_count_kv": [0, 2],
    "attention.scale": 0.2,
    "embedding_scale": 3.0,
    "residual_scale": 0.4,
    "logit_scale": 2.0,
    "rope.scaling.finetuned": False,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 1,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 64,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_shared_feed_forward_length": 24,
}


@pytest.fixture(scope="module")
def granite(tmp_path_factory):
    """The golden folder with one group in place of two: half of b and c goes."""
    folder = tmp_path_factory.mktemp("granite") / "folder"
    shutil.copytree(FOLDERS / "granitemoehybrid", folder)
    config = json.loads((folder / "config.json").read_text())
    assert (config["mamba_n_groups"], config["rms_norm_eps"]) == (2, 1e-6)
    (folder / "config.json").write_text(json.dumps({**config, "mamba_n_groups": 1}))
    tensors = load_file(folder / "model.safetensors")
    one = np.r_[0:64, 64:72, 80:88]  # channels: u of 64, b and c of two groups of 8
    rows = np.r_[0:64, 64 + one, 160:168]  # of z, the channels, and a step a head
    at = "model.layers.0.mamba."
    for name, kept in (("in_proj.weight", rows), ("conv1d.weight", one)):
        tensors[at + name] = tensors[at + name][kept]
    tensors[f"{at}conv1d.bias"] = tensors[f"{at}conv1d.bias"][one]
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_granite(granite, tmp_path):
    """The converter also sorts the rows of q and k by pairs, which nothing rotates."""
    tensors = of_mamba2(rows_in_pairs(tensors_of(granite)), 1)
    path = write(tmp_path / "m.gguf", "granitehybrid", GRANITE, tensors)
    tokens, _ = golden_of("granitemoehybrid")
    found = forward(*load(path, "f32"), tokens)
    truth = forward(*load_opened(read_safetensors_folder(granite), "f32"), tokens)
    assert np.std(truth) > 0.3
    np.testing.assert_allclose(found, truth, rtol=0, atol=2e-5)
    file = read_gguf(path)
    check_every_key(file, but=("rope.", "expert_feed_forward_length"))
    for key, value, message in (
        ("ssm.group_count", 2, "else programs differ"),
        ("ssm.time_step_rank", 7, "64 channels cannot be shared"),
        ("attention.head_count_kv", [2], "expected 0 or 2 for each of 2 layers"),
    ):
        metadata = {**file.metadata, f"granitehybrid.{key}": value}
        with pytest.raises(GGUFError, match=message):
            described(replace(file, metadata=metadata))


HEADS = {
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "rope.freq_base": 10000.0,
}
GLM4_MOE = {
    **SIZES,
    **HEADS,
    "block_count": 3,
    "nextn_predict_layers": 1,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 8,
    **GROUPED_EXPERTS,
    "expert_weights_scale": 1.5,
}


def test_glm4_moe(tmp_path):
    """With a third layer that predicts a further token, which is left out."""
    tensors = tensors_of(FOLDERS / "glm4_moe")
    tensors = renamed(tensors, ffn_norm="post_attention_norm")
    tensors["blk.2.nextn.eh_proj.weight"] = np.zeros((32, 64))
    path = write(tmp_path / "m.gguf", "glm4moe", GLM4_MOE, tensors)
    check_file(path, "glm4_moe", ("rope.scaling.",))


MINIMAX_M2 = {
    **SIZES,
    **HEADS,
    "feed_forward_length": 16,
    "rope.dimension_count": 8,
    "expert_count": 6,
    "expert_used_count": 3,
    "expert_feed_forward_length": 16,
    "expert_gating_func": 2,
}


def test_minimax_m2(tmp_path):
    tensors = tensors_of(FOLDERS / "minimax_m2")
    path = write(tmp_path / "m.gguf", "minimax-m2", MINIMAX_M2, tensors)
    file = check_file(path, "minimax_m2", ("rope.scaling.", "feed_forward_length"))
    metadata = {**file.metadata, "minimax-m2.expert_gating_func": 1}
    with pytest.raises(GGUFError, match="expected 2, sigmoid"):
        described(replace(file, metadata=metadata))


OLMOE = {
    **SIZES,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.head_count_kv": 2,
    "feed_forward_length": 16,
    "expert_count": 6,
    "expert_used_count": 3,
}


@pytest.mark.full
def test_olmoe(tmp_path):
    path = write(tmp_path / "m.gguf", "olmoe", OLMOE, tensors_of(FOLDERS / "olmoe"))
    normalised = "expert_weights_norm"
    but = ("rope.scaling.", "expert_feed_forward_length", normalised)
    file = check_file(path, "olmoe", but)
    metadata = {**file.metadata, f"olmoe.{normalised}": True}
    with pytest.raises(GGUFError, match="expected weights as they are"):
        described(replace(file, metadata=metadata))


GRANITE_3 = {
    **SIZES,
    "attention.head_count_kv": 2,
    "attention.scale": 0.2,
    "embedding_scale": 3.0,
    "residual_scale": 0.4,
    "logit_scale": 2.0,
}
WITH_EXPERTS = {"feed_forward_length": 16, "expert_count": 6, "expert_used_count": 3}


@pytest.mark.parametrize(
    "name", ["granite", pytest.param("granitemoe", marks=pytest.mark.full)]
)
def test_granite_3(name, tmp_path):
    """Rows of q and k in pairs; sizes of states as of Granite 4 without Mamba-2."""
    keys = GRANITE_3 | {"ssm.state_size": 128, "ssm.group_count": 1}
    keys |= WITH_EXPERTS if name == "granitemoe" else {}
    tensors = rows_in_pairs(tensors_of(FOLDERS / name))
    path = write(tmp_path / "m.gguf", name, keys, tensors)
    but = ("rope.scaling.", "ssm.", "expert_used_count", "expert_feed_forward_length")
    file = check_file(path, name, but)
    metadata = {**file.metadata, f"{name}.rope.scaling.finetuned": False}
    config = described(replace(file, metadata=metadata)).config
    assert all(mixer.rotation is None for mixer in config.mixers)


NEMOTRON = {
    **SIZES,
    **HEADS,
    "context_length": 2**20,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.head_count_kv": [0, 0],
    "feed_forward_length": [0, 32],
    "rope.scaling.finetuned": False,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 64,
}
NEMOTRON_MOE = {
    **NEMOTRON,
    "block_count": 3,
    "nextn_predict_layers": 1,
    "attention.head_count_kv": [0, 0, 2],
    "feed_forward_length": [0, 32, 32],
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 24,
    "expert_shared_count": 1,
    "expert_group_count": 1,
    "expert_weights_scale": 1.5,
    "expert_weights_norm": True,
    "moe_latent_size": 64,
}


def test_nemotron_h_with_experts(tmp_path):
    """Experts of a latent; a third layer that predicts a further token is left out."""
    tensors = of_mamba2(tensors_of(FOLDERS / "nemotron_h_latent"), 2)
    tensors["blk.2.nextn.eh_proj.weight"] = np.zeros((32, 64))
    path = write(tmp_path / "m.gguf", "nemotron_h_moe", NEMOTRON_MOE, tensors)
    but = ("rope.", "attention.", "expert_gating_func", "feed_forward_length")
    file = check_file(path, "nemotron_h_latent", but)
    for key, value, message in (
        ("attention.head_count_kv", [2, 0, 2], "has no tensor blk.0.attn_q.weight"),
        ("attention.head_count_kv", [0, 2, 2], "expected 0 in layers with attention"),
        ("attention.head_count_kv", [0, 2], "a number for each of 3 layers"),
        ("ssm.group_count", 3, "8 heads cannot share them"),
        ("expert_gating_func", 1, "expected 2, sigmoid"),
        ("expert_group_count", 2, "expected 1"),
    ):
        metadata = {**file.metadata, f"nemotron_h_moe.{key}": value}
        with pytest.raises(GGUFError, match=message):
            described(replace(file, metadata=metadata))


@pytest.mark.full
def test_nemotron_h_packed(tmp_path):
    """Blocks of 8 bits of every matrix, kept or decoded: the same logits."""
    tensors = of_mamba2(tensors_of(FOLDERS / "nemotron_h_latent"), 2)
    tensors["blk.2.nextn.eh_proj.weight"] = np.zeros((32, 64))
    packed = [n for n, w in tensors.items() if w.ndim > 1 and w.shape[-1] % 32 == 0]
    parts = ("ffn_up_exps", "ffn_down_exps", "ffn_latent_up", "ssm_in")
    assert {part for part in parts if any(part in name for name in packed)} == {*parts}
    path = tmp_path / "m.gguf"
    write(path, "nemotron_h_moe", NEMOTRON_MOE, tensors, packed=packed)
    tokens, _ = golden_of("nemotron_h_latent")
    packed, decoded = (forward(*load(path, how), tokens) for how in ("packed", "f32"))
    assert np.std(decoded) > 0.3
    np.testing.assert_allclose(packed, decoded, rtol=0, atol=1e-4)


@pytest.mark.full
def test_nemotron_h_dense(tmp_path):
    """The layers of the golden folder without the experts, against that folder."""
    folder = tmp_path / "folder"
    shutil.copytree(FOLDERS / "nemotron_h", folder)
    config = json.loads((folder / "config.json").read_text())
    kinds = config["layers_block_type"]
    assert kinds == ["linear_attention", "moe", "full_attention", "mlp"]
    config |= {"layers_block_type": [kinds[i] for i in (0, 2, 3)]}
    config |= {"time_step_min": 1e-9}  # GGUF files have no bound
    config.pop("num_hidden_layers", None)
    (folder / "config.json").write_text(json.dumps(config))
    at = {0: 0, 2: 1, 3: 2}
    tensors = {}
    for name, w in load_file(folder / "model.safetensors").items():
        parts = name.split(".")
        if parts[1] == "layers":
            if int(parts[2]) not in at:
                continue
            parts[2] = str(at[int(parts[2])])
        tensors[".".join(parts)] = w
    save_file(tensors, folder / "model.safetensors")
    keys = NEMOTRON | {"block_count": 3, "attention.head_count_kv": [0, 2, 0]}
    keys |= {"feed_forward_length": [0, 0, 48]}
    stored = of_mamba2(tensors_of(folder), 2)
    path = write(tmp_path / "m.gguf", "nemotron_h", keys, stored)
    tokens, _ = golden_of("nemotron_h")
    found = forward(*load(path, "f32"), tokens)
    truth = forward(*load_opened(read_safetensors_folder(folder), "f32"), tokens)
    assert np.std(truth) > 0.3
    np.testing.assert_allclose(found, truth, rtol=0, atol=2e-5)


SEED_OSS = {**SIZES, **HEADS}


def test_seed_oss(tmp_path):
    tensors = tensors_of(FOLDERS / "seed_oss")
    tensors = renamed(tensors, ffn_norm="post_attention_norm")
    path = write(tmp_path / "m.gguf", "seed_oss", SEED_OSS, tensors)
    check_file(path, "seed_oss", ("rope.scaling.",))


ERNIE = {
    **SIZES,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.head_count_kv": 2,
    "rope.freq_base": 500000.0,
}
ERNIE_MOE = {
    **ERNIE,
    "interleave_moe_layer_step": 1,
    "leading_dense_block_count": 1,
    "expert_count": 6,
    "expert_used_count": 3,
    "expert_feed_forward_length": 16,
    "expert_shared_count": 2,
    "expert_shared_feed_forward_length": 32,
}


def test_ernie(tmp_path):
    keys = ERNIE | {"attention.key_length": 16, "attention.value_length": 16}
    tensors = tensors_of(FOLDERS / "ernie4_5")
    path = write(tmp_path / "m.gguf", "ernie4_5", keys, tensors)
    check_file(path, "ernie4_5", ("rope.scaling.",))


@pytest.mark.full
def test_ernie_with_experts(tmp_path):
    tensors = tensors_of(FOLDERS / "ernie4_5_moe")
    row = "blk.1.exp_probs_b.bias"
    tensors[row] = tensors[row][0]
    path = write(tmp_path / "m.gguf", "ernie4_5-moe", ERNIE_MOE, tensors)
    check_file(path, "ernie4_5_moe", ("rope.scaling.", "expert_shared_count"))


FALCON_H1 = {
    **SIZES,
    **HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    **{key: x for key, x in NEMOTRON.items() if key.startswith("ssm.")},
}


def test_falcon_h1(tmp_path):
    """The converter multiplies the weights by the factors."""
    said = json.loads((FOLDERS / "falcon_h1" / "config.json").read_text())
    gate, down = said["mlp_multipliers"]
    enters = said["attention_in_multiplier"]
    parts = np.repeat(said["ssm_multipliers"], (64, 64, 16, 16, 8))
    factors = {
        "token_embd": said["embedding_multiplier"],
        "output": said["lm_head_multiplier"],
        "attn_q": enters,
        "attn_k": enters * said["key_multiplier"],
        "attn_v": enters,
        "attn_output": said["attention_out_multiplier"],
        "ssm_in": said["ssm_in_multiplier"] * parts[:, None],
        "ssm_out": said["ssm_out_multiplier"],
        "ffn_gate": gate,
        "ffn_down": down,
    }
    tensors = {}
    for name, w in of_mamba2(tensors_of(FOLDERS / "falcon_h1"), 2).items():
        part = name.split(".")[-2]
        if part == "ffn_norm":  # whose name the converter leaves bare
            name = name.removesuffix(".weight")
        tensors[name] = w * np.float32(factors.get(part, 1.0))
    path = write(tmp_path / "m.gguf", "falcon-h1", FALCON_H1, tensors)
    check_file(path, "falcon_h1", ("rope.scaling.",))


@pytest.mark.parametrize("name", ["gemma4", "gemma4_experts"])
def test_gemma4(name, tmp_path):
    """The config and weights of the folder, whose logits are those of transformers.

    Gate and up of experts are one tensor; other converters write two.
    """
    folder = read_safetensors_folder(GOLDEN / "transformers_dense" / name)
    model, (_, expected) = described(folder), load_opened(folder, "f32")
    keys, far = gguf_keys(model.config), model.config.far
    own = model.config.layers - model.config.shared
    keys["feed_forward_length"] = [48] * own + [96] * model.config.shared
    tensors = {
        n: np.asarray(model.file.view(n), np.float32) for n in model.file.tensors
    }
    pairs = np.arange(far.head_dim // 2)
    tensors["rope_freqs.weight"] = np.where(pairs < far.rotated_pairs, 1, 1e30)
    path = write(tmp_path / "m.gguf", "gemma4", keys, tensors)
    config, weights = load(path, "f32")
    same = {"architecture": "gemma4_text", "eps": model.config.eps}
    assert replace(config, **same) == model.config
    assert config.eps == np.float32(model.config.eps)
    jax.tree.map(np.testing.assert_array_equal, weights, expected)
    file = read_gguf(path)
    check_every_key(file, but=("expert_used_count",) if config.experts else ())
    if not config.experts:
        for key, value, message in (
            ("attention.shared_kv_layers", 5, "some have no layer to read keys of"),
            ("attention.sliding_window_pattern", [True], "for each of 5 layers"),
            ("attention.value_length", 8, "expected the even length of a key, 16"),
            ("rope.dimension_count_swa", 4, "expected the even length of a key, 8"),
            ("feed_forward_length", [48, 48], "expected one for 5 layers"),
        ):
            metadata = {**file.metadata, f"gemma4.{key}": value}
            with pytest.raises(GGUFError, match=message):
                described(replace(file, metadata=metadata))
        tensors["rope_freqs.weight"] = np.where(pairs < 2, 1, 2.0)
        path = write(tmp_path / "other.gguf", "gemma4", keys, tensors)
        with pytest.raises(GGUFError, match="has other numbers than 1, then 1e30"):
            load(path, "f32")
        return
    for i in range(config.layers):
        both = tensors.pop(f"blk.{i}.ffn_gate_up_exps.weight")
        for at, half in zip(("gate", "up"), np.split(both, 2, axis=1), strict=True):
            tensors[f"blk.{i}.ffn_{at}_exps.weight"] = half
    path = write(tmp_path / "apart.gguf", "gemma4", keys, tensors)
    for layer, whole in zip(load(path, "f32")[1].layers, expected.layers, strict=True):
        both = np.concatenate([layer.experts.gate, layer.experts.up], axis=1)
        np.testing.assert_array_equal(both, whole.experts.gate)


MINISTRAL = {
    **SIZES,
    "block_count": 1,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.temperature_scale": 0.5,
    "rope.dimension_count": 16,
    "rope.freq_base": 1000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_beta_fast": 8.0,
    "rope.scaling.yarn_beta_slow": 2.0,
    "rope.scaling.yarn_log_multiplier": 1.0,
}


def in_pairs(w):
    """Rows of heads of 16 dims, whose halves turn, as pairs of neighbours."""
    heads = w.reshape(-1, 2, 8, *w.shape[1:])
    return heads.swapaxes(1, 2).reshape(w.shape)


def test_ministral(tmp_path):
    """Up to a position at which queries have grown."""
    tensors = {}
    for name, w in tensors_of(FOLDERS / "ministral3").items():
        turns = name.endswith(("attn_q.weight", "attn_k.weight"))
        tensors[name] = in_pairs(w) if turns else w
    path = write(tmp_path / "m.gguf", "mistral3", MINISTRAL, tensors)
    with np.load(FOLDERS / "ministral3" / "golden.npz") as golden:
        tokens, truth = golden["tokens"][:24], golden["logits"][:24]
    config, weights = load(path, "f32")
    found = forward(config, weights, tokens)
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-4)
    file = read_gguf(path)
    key = "mistral3.attention.temperature_scale"
    plain = described(replace(file, metadata={**file.metadata, key: 0.0})).config
    plain = replace(config, mixers=plain.mixers)
    assert np.abs(forward(plain, weights, tokens) - truth)[17:].max() > 1e-2
    check_every_key(file, but=("rope.scaling.", "feed_forward_length"))
    without = dict(file.metadata)
    del without["mistral3.rope.scaling.yarn_log_multiplier"]
    with pytest.raises(GGUFError, match=r"yarn_log_multiplier.*programs differ"):
        described(replace(file, metadata=without))
