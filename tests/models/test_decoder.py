"""Decoders of mixed layers: states, packed texts, and files with something unknown.

Whole architectures are compared with `transformers` in test_architectures.py, whose
texts are read in one piece; here one model has every kind of layer and reads in pieces.
"""

import functools
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gguf_keys import gguf_keys
from jaxkern import GGUFTensor, MicroscaledTensor
from jaxkern.formats.gguf import GGUFError, GGUFTensorInfo, read_gguf
from jaxkern.formats.safetensors import SafetensorsError, read_safetensors_folder
from jaxkern.models import load
from jaxkern.models.decoder import (
    DecoderConfig,
    decode,
    empty_cache,
    hidden_states,
    logits,
    prefill,
)
from jaxkern.models.decoder_files import Folder, tensors_of, weights_of
from jaxkern.models.feed_forward import Dense, Mixture
from jaxkern.models.loader import load_file
from jaxkern.models.mixers.delta_net import DeltaNet
from jaxkern.models.mixers.full_attention import FullAttention
from jaxkern.models.mixers.latent import LatentAttention
from jaxkern.models.mixers.layout import Layout
from jaxkern.models.mixers.mamba2 import Mamba2
from jaxkern.models.mixers.mixing import Rotation
from jaxkern.models.mixers.parallel import Parallel
from jaxkern.models.mixers.short_conv import ShortConv
from jaxkern.models.registry import described
from jaxkern.models.weight_reader import expand
from tests.models.test_architecture_keys import check_every_key
from tests.models.tiny_gguf import add_key

FOLDERS = Path(__file__).parents[1] / "golden" / "transformers_hybrids"
NAMES = sorted(path.name for path in FOLDERS.iterdir())
TURNS = Rotation(4, 10000.0)
MIXERS = (
    FullAttention(4, 2, 4, TURNS, window=3, output_gate=True, sinks=True, bias=True),
    LatentAttention(2, 8, 0, 4, 4, 4, 0.3, TURNS),
    DeltaNet(1, 2, 4, 4, taps=4),
    ShortConv(16, taps=3, bias=True),
    Parallel(
        FullAttention(2, 1, 4, TURNS, wide_norms=True),
        Mamba2(2, 4, 1, 4, 2, gate="behind", factors=(0.9, 1.1, 0.8, 1.2, 0.7)),
        (0.8, 1.2),
    ),
    None,
)
EXPERTS = Mixture(4, 8, 2, score="sigmoid", correction=True, router_bias=True)
WITHOUT_A_GATE = Mixture(
    4, 8, 2, gated=False, latent=6, shared=Dense(8, "_shexp", gated=False)
)
CONFIG = DecoderConfig(
    architecture="test",
    context=64,
    d_model=16,
    vocabulary=20,
    eps=1e-3,
    mixers=MIXERS,
    feed_forwards=(
        Dense(12, alpha=1.5, scale=0.8),
        EXPERTS,
        *(None, Dense(12), None, WITHOUT_A_GATE),
    ),
    residual_scale=0.7,
)


class RandomReader:
    """Random weights in the place of a file's."""

    from_folder = True

    def __init__(self, tensors, dtype="float32"):
        self.file = SimpleNamespace(tensors=tensors)
        self.dtype = jnp.dtype(dtype)  # of matrices
        self.random = np.random.default_rng(0)

    def vector(self, name, plus=0.0):
        shape = self.file.tensors[name].shape
        spread = 1 / math.sqrt(shape[-1]) if len(shape) > 1 else 0.5
        x = self.random.normal(size=shape) * spread + plus + ("norm" in name)
        return jnp.asarray(x, jnp.float32)

    array = experts = vector

    def kept_experts(self, w):
        return w

    def vectors(self, *names, plus=0.0):
        if names[0] not in self.file.tensors:
            return None
        return jnp.concatenate([self.vector(name, plus) for name in names])

    def matrices(self, *names):
        rows = [self.vector(name) for name in names]
        return (expand(rows, self.dtype),)

    def table_and_output(self):
        table = self.vector("token_embd.weight") * 4
        return table, self.matrices("output.weight")


def random_weights(dtype, config=CONFIG):
    tensors = tensors_of(config, Layout(), tied=False)
    folder = Folder(lambda keys: config, {})
    reader: Any = RandomReader(tensors, dtype)
    return weights_of(folder, None, config, reader)


@pytest.fixture(scope="module")
def weights():
    return random_weights("float32")


@pytest.fixture(scope="module")
def rows():
    """Two texts in a row, and each of them with something else behind it."""
    tokens = np.random.default_rng(1).integers(0, 20, (3, 17), np.int32)
    tokens[1, :11], tokens[2, :6] = tokens[0, :11], tokens[0, 11:]
    return tokens


@pytest.fixture(scope="module")
def whole(weights, rows):
    """Logits of the rows without a cache."""

    @jax.jit
    def forward(weights, tokens, ids):
        x, cache = hidden_states(CONFIG, weights, tokens, segment_ids=ids)
        assert cache is None
        return logits(CONFIG, weights, x)

    ids = np.zeros((3, 17), np.int32)
    ids[0, 11:] = 1
    return np.asarray(forward(weights, rows, ids))


def test_texts_packed_in_a_row_do_not_see_each_other(whole):
    assert np.std(whole) > 0.3
    np.testing.assert_allclose(whole[0, :11], whole[1, :11], atol=2e-5)
    np.testing.assert_allclose(whole[0, 11:], whole[2, :6], atol=2e-5)
    assert np.abs(whole[0, 11:] - whole[1, 11:]).max() > 0.1


def test_texts_in_pieces(weights, rows, whole):
    """Rows of other lengths, a row that reads nothing, and one token more."""
    read, add = (jax.jit(f, static_argnums=0) for f in (prefill, decode))
    texts = rows[1:, :12]
    cache = empty_cache(CONFIG, 2, 16)
    found, first = read(CONFIG, weights, texts[:, :6], jnp.array([6, 4]), cache)
    np.testing.assert_allclose(found[0], whole[1, 5], atol=2e-5)
    np.testing.assert_allclose(found[1], whole[2, 3], atol=2e-5)
    found, second = read(CONFIG, weights, texts[:, 6:], jnp.array([5, 0]), first)
    np.testing.assert_allclose(found[0], whole[1, 10], atol=2e-5)
    for before, after in zip(*map(jax.tree.leaves, (first, second)), strict=True):
        np.testing.assert_array_equal(before[1], after[1])
    found, third = add(CONFIG, weights, texts[:, 11], second, jnp.array([1, 0]))
    np.testing.assert_allclose(found[0], whole[1, 11], atol=2e-5)
    for before, after in zip(*map(jax.tree.leaves, (second, third)), strict=True):
        np.testing.assert_array_equal(before[1], after[1])
        assert not np.array_equal(before[0], after[0])


def test_products_that_take_in_what_stands_around_them(rows):
    """Norms and additions in the products, heads and cache by one op: the same model.

    So it is where a GPU is, of weights of 16 bits; here in float32.
    """
    weights = random_weights("bfloat16")

    @functools.partial(jax.jit, static_argnums=0)
    def in_two(config, weights, tokens):
        read = functools.partial(prefill, config, weights)
        cache = empty_cache(config, 2, 16)
        first, cache = read(tokens[:, :8], jnp.array([8, 5]), cache)
        return first, *decode(config, weights, tokens[:, 8], cache)

    def primitives(config):
        return str(jax.make_jaxpr(in_two, static_argnums=0)(config, weights, rows[1:]))

    plain = replace(CONFIG, residual_scale=1.0)
    fused = replace(plain, fused=True)
    names = ("dense_rms_norm_matmul", "dense_matmul_add", "qk_norm_rope_cache")
    names += ("gated_delta_net_step",)
    assert all(name in primitives(fused) for name in names)
    assert not any(name in primitives(plain) for name in names)
    truth, found = (
        jax.tree.leaves(in_two(config, weights, rows[1:])) for config in (plain, fused)
    )
    for one, other in zip(found, truth, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-5)


@pytest.mark.parametrize("policy", ["packed", "packed_int8", "bf16"])
def test_experts_in_mxfp4(policy):
    """Packed experts stay so, and give what `transformers` computes from them."""
    config, weights = load(FOLDERS / "gpt_oss_mxfp4", policy)
    golden = np.load(FOLDERS / "gpt_oss" / "golden.npz")
    experts, packed = weights.layers[0].feed_forward, policy != "bf16"
    for w in (experts.gate, experts.up, experts.down):
        assert isinstance(w, MicroscaledTensor) == packed
    error = np.abs(all_logits(config, weights, golden) - golden["logits"][:16])
    assert error.max() < 1e-4 if packed else np.median(error) < 0.1


def changed(folder, key, value):
    """The folder with one other value in its config.json, which is not read again."""
    kind = folder.architecture
    kept = {
        name: old
        for name, old in folder.metadata.items()
        if name != f"{kind}.{key}" and not name.startswith(f"{kind}.{key}.")
    }
    new = {f"{kind}.{key}": value}
    if isinstance(value, dict):
        new = {f"{kind}.{key}.{inner}": leaf for inner, leaf in value.items()}
    return replace(folder, metadata=kept | new)


OF_IMAGES = ("model.visual.", "vision_tower.", "multi_modal_projector.")
OUTPUT = "lm_head.weight"
STRANGERS = [
    "model.layers.0.mlp.extra.weight",
    "model.layers.0.self_attn.q_proj.scales",
    "model.layers.00.input_layernorm.weight",
    "model.layers.9.input_layernorm.weight",
    "visual.patch_embed.weight",
]


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_tensor_is_refused(name):
    folder = read_safetensors_folder(FOLDERS / name)
    info = GGUFTensorInfo((32,), "F32", 0, 128)
    for stranger in STRANGERS:
        more = replace(folder, tensors={**folder.tensors, stranger: info})
        with pytest.raises(SafetensorsError, match="has no place in a model"):
            described(more)
    for lost in folder.tensors:
        if lost.startswith(OF_IMAGES):
            continue
        rest = {n: at for n, at in folder.tensors.items() if n != lost}
        with pytest.raises(SafetensorsError):
            described(replace(folder, tensors=rest))
    codes = GGUFTensorInfo((96, 32), "U8", 0, 96 * 32)
    if name != "gpt_oss" and name != "gpt_oss_mxfp4":
        output = next((n for n in folder.tensors if n.endswith(OUTPUT)), OUTPUT)
        others = {**folder.tensors, output: codes}
        with pytest.raises(SafetensorsError, match="is U8, expected numbers"):
            described(replace(folder, tensors=others))


@pytest.mark.parametrize(
    ("name", "further"),
    [
        ("qwen3_next", "mtp.layers.0.mlp.gate.weight"),
        ("qwen3_5", "mtp.fc.weight"),
        ("qwen3_5", "model.visual.blocks.7.norm1.bias"),
        ("deepseek_v3", "model.layers.2.eh_proj.weight"),
        ("deepseek_v3", "model.layers.2.self_attn.o_proj.weight"),
    ],
)
def test_what_predicts_further_tokens_is_left_out(name, further):
    folder = read_safetensors_folder(FOLDERS / name)
    info = GGUFTensorInfo((5, 7), "BF16", 0, 70)
    more = replace(folder, tensors={**folder.tensors, further: info})
    found = described(more)
    assert sorted(found.file.tensors) == sorted(described(folder).file.tensors)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("qwen3_moe", "num_experts_per_tok", 7, "there are 6 experts"),
        ("qwen3_moe", "mlp_only_layers", ["a"], "expected a list of layers"),
        (
            "gpt_oss",
            "layer_types",
            ["chunked_attention"] * 2,
            "expected full_attention",
        ),
        (
            "gpt_oss_mxfp4",
            "quantization_config",
            {"quant_method": "fp8"},
            "but the experts are in",
        ),
        (
            "gpt_oss",
            "quantization_config",
            {"quant_method": "mxfp4"},
            "are not in groups",
        ),
        ("qwen3_next", "partial_rotary_factor", 1.5, "of 16 dims cannot rotate"),
        ("qwen3_next", "linear_num_key_heads", 3, "do not divide them"),
        ("qwen3_next", "attention_bias", True, "attention_bias is True"),
        ("deepseek_v2", "topk_method", "noaux_tc", "expected greedy or"),
        ("deepseek_v2", "norm_topk_prob", True, "expected false for deepseek_v2"),
        ("deepseek_v3", "scoring_func", "softmax", "expected sigmoid"),
        ("deepseek_v3", "n_group", 3, "8 experts, of which 2 groups count"),
        ("granitemoehybrid", "position_embedding_type", "alibi", "known are nope and"),
        ("granitemoehybrid", "time_step_limit", [1.0, 0.5], "the smaller one first"),
        ("granitemoehybrid", "mamba_n_heads", 7, "2 groups, 64 channels"),
        ("kimi_linear", "num_expert_group", 3, "8 experts, of which 2 groups count"),
        ("kimi_linear", "first_k_dense_replace", 2, "mlp_layer_types contradicts"),
        ("kimi_linear", "linear_attn_config.num_heads", 3, "linear_attn_config contra"),
        (
            "kimi_linear",
            "linear_attn_config.kda_layers",
            [1],
            "expected each of 1 to 2",
        ),
        ("lfm2", "use_pos_enc", False, "use_pos_enc is False"),
        ("mistral4", "num_key_value_heads", 2, "each of 4 has its own"),
        ("mistral4", "head_dim", 16, "expected the sum of its parts, 24"),
        ("mistral4", "n_group", 3, "8 experts, of which 2 groups count"),
        (
            "mistral4",
            "rope_parameters.partial_rotary_factor",
            0.5,
            "8 of 24 dims rotate",
        ),
        ("mistral3", "text_config.model_type", "mistral", "known are ministral3 and"),
        ("glm4_moe", "n_group", 3, "8 experts, of which 2 groups count"),
        ("minimax_m2", "attn_type_list", [0, 1], "expected 1 for each of 2 layers"),
        ("minimax_m2", "rotary_dim", 4, "but 8 of 16 dims rotate"),
        ("minimax_m2", "qk_norm_type", "per_head", "qk_norm_type is 'per_head'"),
        ("olmoe", "clip_qkv", 8.0, "clip_qkv is 8.0"),
        ("granite", "mlp_bias", True, "mlp_bias is True"),
        ("nemotron_h", "time_step_limit", [0.0, 0.5], "programs differ in it"),
        ("nemotron_h", "mlp_hidden_act", "silu", "mlp_hidden_act is 'silu'"),
        ("nemotron_h", "norm_eps", 1e-6, "but layer_norm_epsilon is 1e-05"),
        ("nemotron_h", "hybrid_override_pattern", "ME*x", "expected letters of"),
        ("nemotron_h", "hybrid_override_pattern", "MM*-", "override_pattern contra"),
        ("nemotron_h", "attention_head_dim", 8, "but head_dim is 16"),
        ("nemotron_h", "n_groups", 3, "8 heads cannot share them"),
        ("nemotron_h", "n_shared_experts", 2, "n_shared_experts is 2"),
        ("falcon_h1", "mlp_multipliers", [1.0], "expected 2 positive numbers"),
        ("falcon_h1", "projectors_bias", True, "projectors_bias is True"),
        ("falcon_h1", "mamba_n_heads", 7, "2 groups, 64 channels"),
        ("seed_oss", "attention_out_bias", True, "has no tensor .*o_proj.bias"),
        ("ernie4_5", "use_bias", True, "use_bias is True"),
        ("ernie4_5_moe", "moe_norm_min", 0.1, "expected 1e-09 or less"),
        ("ernie4_5_moe", "moe_layer_end_index", 2, "expected the number of one of 2"),
    ],
)
def test_refusals(name, key, value, message):
    folder = changed(read_safetensors_folder(FOLDERS / name), key, value)
    if key == "partial_rotary_factor":
        folder = changed(folder, "rope_parameters", {"rope_theta": 10000.0})
    with pytest.raises(SafetensorsError, match=message):
        described(folder)


def test_older_config_files():
    """rope_theta beside rope_scaling, layers by their numbers, names of the makers."""
    folder = read_safetensors_folder(FOLDERS / "lfm2")
    older = changed(folder, "rope_parameters", {})
    older = changed(older, "layer_types", [])
    for key, value in (
        ("rope_theta", 1000000.0),
        ("full_attn_idxs", [1]),
        ("tie_embedding", False),
        ("block_ff_dim", 60),
    ):
        older = changed(older, key, value)
    assert described(older).config == described(folder).config
    folder = read_safetensors_folder(FOLDERS / "granitemoehybrid")
    older = changed(folder, "layer_types", ["mamba", "attention"])
    older = changed(older, "time_step_limit", [0.0, math.inf])
    assert described(older).config == described(folder).config


def test_kimi_linear_as_it_is_published():
    """Layers by numbers from 1, sizes of delta layers apart, dense blocks in mlp."""
    folder = read_safetensors_folder(FOLDERS / "kimi_linear")
    left_out = ("layer_types", "mlp_layer_types", "linear_head_dim")
    left_out += ("linear_num_heads", "linear_conv_kernel_dim")
    keys = {f"kimi_linear.{key}" for key in left_out}
    metadata = {key: x for key, x in folder.metadata.items() if key not in keys}
    published = replace(folder, metadata=metadata)
    published = published.renamed(
        {
            name.replace("block_sparse_moe.down_proj", "mlp.down_proj"): name
            for name in folder.tensors
        }
    )
    for key, value in {
        "linear_attn_config.full_attn_layers": [2],
        "linear_attn_config.kda_layers": [1],
        "linear_attn_config.head_dim": 16,
        "linear_attn_config.num_heads": 2,
        "linear_attn_config.short_conv_kernel_size": 4,
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "rope_theta": 10000.0,
        "use_grouped_topk": True,
    }.items():
        published = changed(published, key, value)
    found, expected = described(published), described(folder)
    assert found.config == expected.config
    assert sorted(found.file.tensors) == sorted(expected.file.tensors)


NO_DENSE = "feed_forward_length"  # of dense layers, in files that have none


def write_gguf(folder, path, keys, *, expert_type, norm="ffn_norm"):
    """The folder's tensors as llama.cpp's converter writes them."""
    model = described(folder)
    kind, config = model.architecture.gguf, model.config
    writer = gguf.GGUFWriter(path, str(kind))
    for key, value in (gguf_keys(config) | keys).items():
        add_key(writer, f"{kind}.{key}", value)
    experts = defaultdict(list)
    for stored in model.file.tensors:
        w = np.asarray(model.file.view(stored), np.float32)
        part, _, number = stored.partition("_exps.")
        if "_exps." in stored and number.split(".")[0].isdigit():
            experts[f"{part}_exps.weight"].append((int(number.split(".")[0]), w))
        elif "_gate_up_exps" in stored:  # columns of gate and up by turns
            w = w if w.ndim == 2 else w.swapaxes(1, 2)
            for i, half in enumerate(("gate", "up")):
                experts[stored.replace("gate_up", half)] = [(0, w[:, i::2])]
        elif "_exps" in stored:
            experts[stored] = [(0, w if w.ndim == 2 else w.swapaxes(1, 2))]
        else:
            w = w[:, 0] if "shortconv.conv." in stored else w
            writer.add_tensor(stored.replace(".ffn_norm.", f".{norm}."), w)
    for stored, parts in experts.items():
        w = np.stack([w for _, w in sorted(parts, key=lambda part: part[0])])
        w = w[0] if len(parts) == 1 else w
        qtype = expert_type if w.ndim == 3 else gguf.GGMLQuantizationType.F32
        blocks = gguf.quants.quantize(w, qtype)
        writer.add_tensor(stored, blocks, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@functools.partial(jax.jit, static_argnums=0)
def forward(config, weights, tokens):
    x, _ = hidden_states(config, weights, tokens[None])
    return logits(config, weights, x)[0]


def all_logits(config, weights, golden):
    return forward(config, weights, golden["tokens"][:16])


def test_gpt_oss_of_a_gguf_file(tmp_path):
    """Its experts in blocks of MXFP4 are those of the folder, packed and decoded."""
    yarn = {
        "attention.sliding_window": 6,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 8.0,
        "rope.scaling.yarn_beta_slow": 2.0,
    }
    mxfp4 = gguf.GGMLQuantizationType.MXFP4
    path = write_gguf(
        read_safetensors_folder(FOLDERS / "gpt_oss"),
        tmp_path / "m.gguf",
        yarn,
        expert_type=mxfp4,
        norm="post_attention_norm",
    )
    golden = np.load(FOLDERS / "gpt_oss" / "golden.npz")
    for policy in ("packed", "f32"):
        config, weights = load(path, policy)
        packed = isinstance(weights.layers[0].feed_forward.gate, GGUFTensor)
        assert packed == (policy == "packed")
        blocks = config.feed_forwards
        assert {(block.alpha, block.limit) for block in blocks} == {(1.702, 7.0)}
        config = replace(  # the tiny model clamps earlier
            config, feed_forwards=tuple(replace(block, limit=1.5) for block in blocks)
        )
        found = all_logits(config, weights, golden)
        np.testing.assert_allclose(found, golden["logits"][:16], rtol=0, atol=1e-4)
    file = read_gguf(path)
    check_every_key(file, but=(NO_DENSE,))
    for key, value in (("expert_used_count", 5), ("attention.sliding_window", 0)):
        with pytest.raises(GGUFError, match=f"key gpt-oss.{key} is {value}, "):
            described(
                replace(file, metadata={**file.metadata, f"gpt-oss.{key}": value})
            )


def test_qwen3_moe_of_a_gguf_file(tmp_path):
    """The layer with experts; a dense one these files cannot have."""
    folder = read_safetensors_folder(FOLDERS / "qwen3_moe")
    folder = changed(folder, "num_hidden_layers", 1)
    kept = {n: at for n, at in folder.tensors.items() if ".layers.1." not in n}
    folder = replace(folder, tensors=kept)
    golden = np.load(FOLDERS / "qwen3_moe" / "golden.npz")
    truth = all_logits(*load_file(folder, "f32"), golden)
    f32 = gguf.GGMLQuantizationType.F32
    path = write_gguf(folder, tmp_path / "m.gguf", {}, expert_type=f32)
    found = all_logits(*load(path, "f32"), golden)
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-5)
    check_every_key(read_gguf(path), but=("rope.scaling.", NO_DENSE))


def test_lfm2_of_a_gguf_file(tmp_path):
    """Layers without key heads are convolutions, whose taps lie flat."""
    keys = {
        "attention.head_count_kv": [0, 2],
        "shortconv.l_cache": 3,
        "feed_forward_length": 48,
    }
    folder = read_safetensors_folder(FOLDERS / "lfm2")
    f32 = gguf.GGMLQuantizationType.F32
    path = write_gguf(folder, tmp_path / "m.gguf", keys, expert_type=f32)
    golden = np.load(FOLDERS / "lfm2" / "golden.npz")
    found = all_logits(*load(path, "f32"), golden)
    np.testing.assert_allclose(found, golden["logits"][:16], rtol=0, atol=1e-4)
    check_every_key(read_gguf(path), but=("rope.scaling.",))
    file = read_gguf(path)
    for heads in ([2], [0, 0], [1, 2]):
        name = "lfm2.attention.head_count_kv"
        with pytest.raises(GGUFError):
            described(replace(file, metadata={**file.metadata, name: heads}))
