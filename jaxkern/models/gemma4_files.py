"""Which files the Gemma 4 page computes: folders, and GGUF files.

Folders are of text alone (`gemma4_text`) or with images and sound (`gemma4`), of which
the text model alone runs; texts are read causally there too, whatever images are.
"""

from typing import Any

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.formats.safetensors import SafetensorsFolder
from jaxkern.models import hugging_face
from jaxkern.models.architecture import Architecture, Described, Tensor
from jaxkern.models.folder_keys import positive
from jaxkern.models.gemma4 import Gemma4Config
from jaxkern.models.gemma4_experts import read_experts
from jaxkern.models.gemma4_gguf import described_gguf
from jaxkern.models.gemma4_tensors import model_tensors
from jaxkern.models.gemma4_weights import Gemma4Layer, Gemma4Weights, Heads
from jaxkern.models.weight_reader import WeightReader

FULL, SLIDING = "full_attention", "sliding_attention"
GELU = "gelu_pytorch_tanh"
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
}
MODEL_NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
INSIDE = "text_config"
OTHER_SENSES = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
HARMLESS = {
    "vision_config.*": "of images",
    "audio_config.*": "of sound",
    "image_token_id": "of images",
    "video_token_id": "of images",
    "audio_token_id": "of sound",
    "boi_token_id": "of images",
    "eoi_token_id": "of images",
    "boa_token_id": "of sound",
    "eoa_token_id": "of sound",
    "eoa_token_index": "of sound",
    "vision_soft_tokens_per_image": "of images",
}
WITHOUT = {"use_bidirectional_attention": (False, "vision")}


def names_at(at: str) -> dict[str, str]:
    """Names of a folder's tensors, with the text model there."""
    return {
        "lm_head.weight": "output.weight",
        **{f"{at}.{a}": b for a, b in MODEL_NAMES.items()},
        **{f"{at}.layers.{{i}}.{a}": f"blk.{{i}}.{b}" for a, b in LAYER_NAMES.items()},
    }


def described_whole(keys: ArchitectureKeys) -> Described:
    """`described_folder` of the text model in a folder with images."""
    config, tensors = described_folder(keys.within(INSIDE))
    tied = "output.weight" not in tensors or not tensors["output.weight"].used
    if keys.flag("tie_word_embeddings", tied) != tied:
        raise keys.error("tie_word_embeddings", f"which {INSIDE} contradicts")
    unused = (name for name in keys.file.tensors if name.startswith("ignored."))
    return config, {**tensors, **dict.fromkeys(unused, Tensor(used=False))}


def described_folder(keys: ArchitectureKeys) -> Described:
    """The config, and exactly the tensors that config.json says.

    Raises:
      SafetensorsError: attention to later tokens, or keys that are missing or
        contradict the weights.
    """
    assert isinstance(keys.file, SafetensorsFolder)
    config = config_of_keys(keys, len(keys.file.tensors))
    tied = keys.flag("tie_word_embeddings", True)
    width = keys.integer("intermediate_size")
    wide = keys.flag("use_double_wide_mlp", False)
    widths = [
        2 * width if wide and config.keys_of(i) != i else width
        for i in range(config.layers)
    ]
    rows = keys.integer("vocab_size_per_layer_input", 0)
    if config.per_layer and rows < config.vocabulary:
        raise keys.error(
            "vocab_size_per_layer_input", f"there are {config.vocabulary} tokens"
        )
    tensors = model_tensors(config, widths, tied=tied, rows=rows)
    if tied:
        vocabulary = (config.vocabulary, config.d_model)
        tensors["output.weight"] = Tensor(vocabulary, used=False)
    return config, tensors


def config_of_keys(keys: ArchitectureKeys, num_tensors: int) -> Gemma4Config:
    """What the keys say, checked against each other; an error names the key."""
    layers, heads = (
        keys.integer("num_hidden_layers"),
        keys.integer("num_attention_heads"),
    )
    if not 1 <= layers <= num_tensors:
        raise keys.error("num_hidden_layers", f"the files have {num_tensors} tensors")
    kinds = keys.strings("layer_types")
    if {*kinds} - {FULL, SLIDING} or len(kinds) != layers:
        raise keys.error("layer_types", f"expected {FULL} or {SLIDING} for each layer")
    if keys.string("hidden_activation", GELU) != GELU:
        raise keys.error("hidden_activation", f"expected {GELU}")
    windowed = tuple(kind == SLIDING for kind in kinds)
    kv_heads, head_dim = keys.integer("num_key_value_heads"), keys.integer("head_dim")
    same = keys.flag("attention_k_eq_v", False)
    far_kv, far_dim = far_heads(keys, kv_heads if not same else None, windowed)
    shared = keys.integer("num_kv_shared_layers", 0)
    if {*windowed} - {*windowed[: layers - shared]} or shared >= layers:
        raise keys.error("num_kv_shared_layers", "some have no layer to read keys of")
    for n, h in ((kv_heads, head_dim), (far_kv, far_dim)):
        if n < 1 or heads < 1 or heads % n or h < 2 or h % 2:
            raise keys.error(
                "num_key_value_heads", f"{heads} heads of {h} cannot share"
            )
    experts: dict[str, Any] = {}
    if keys.flag("enable_moe_block", False):
        experts = dict(
            experts=positive(keys, "num_experts"),
            chosen=positive(keys, "top_k_experts"),
            expert_width=positive(keys, "moe_intermediate_size"),
        )
        if experts["chosen"] > experts["experts"]:
            raise keys.error("top_k_experts", f"there are {experts['experts']} experts")
    return Gemma4Config(
        **experts,
        architecture=keys.arch,
        context=keys.integer("max_position_embeddings"),
        layers=layers,
        d_model=keys.integer("hidden_size"),
        heads=heads,
        vocabulary=keys.integer("vocab_size"),
        eps=keys.number("rms_norm_eps"),
        window=keys.integer("sliding_window"),
        windowed=windowed,
        near=heads_of(keys, SLIDING, kv_heads, head_dim, False),
        far=heads_of(keys, FULL, far_kv, far_dim, same),
        shared=shared,
        per_layer=keys.integer("hidden_size_per_layer_input", 0),
        logit_softcap=keys.number_or_none("final_logit_softcapping"),
    )


def far_heads(
    keys: ArchitectureKeys, kv_heads: int | None, windowed: tuple[bool, ...]
) -> tuple[int, int]:
    """Key heads and dims of the layers that see all, as older or newer files say it."""
    dim = keys.integer("global_head_dim", 0)
    own = keys.integer("num_global_key_value_heads", 0)
    found = {
        (
            keys.integer(f"per_layer_config.{i}.head_dim", dim),
            keys.integer(f"per_layer_config.{i}.num_key_value_heads", own),
        )
        for i, near in enumerate(windowed)
        if not near
    }
    if len(found) != 1:
        raise keys.file.error(f"layers of {FULL} differ in per_layer_config, or none")
    ((dim, own),) = found
    if not dim:
        raise keys.file.error(f"says no head_dim of the layers of {FULL}")
    return kv_heads or own or keys.integer("num_key_value_heads"), dim


def heads_of(
    keys: ArchitectureKeys, kind: str, kv_heads: int, head_dim: int, same: bool
) -> Heads:
    where = f"rope_parameters.{kind}"
    part, rope = 1.0, keys.string(f"{where}.rope_type", "default")
    if rope == "proportional":
        part = keys.number(f"{where}.partial_rotary_factor", 1.0)
        if not 0 <= part <= 1:
            raise keys.error(f"{where}.partial_rotary_factor", "expected 0 to 1")
    elif rope != "default":
        raise keys.error(f"{where}.rope_type", "known are default and proportional")
    theta = keys.number(f"{where}.rope_theta")
    return Heads(kv_heads, head_dim, theta, int(part * head_dim // 2), same)


def weights_of(config: Gemma4Config, reader: WeightReader) -> Gemma4Weights:
    """The weights as the page takes them."""
    embedding, output = reader.table_and_output()
    table = context = None
    if config.per_layer:
        table = reader.table("per_layer_token_embd.weight")
        context = reader.matrices("per_layer_model_proj.weight")
    return Gemma4Weights(
        embedding=embedding,
        layers=tuple(layer_of(reader, f"blk.{i}") for i in range(config.layers)),
        output_norm=reader.vector("output_norm.weight"),
        output=output,
        input_table=table,
        input_context=context,
        input_norm=reader.vectors("per_layer_proj_norm.weight"),
    )


def layer_of(reader: WeightReader, blk: str) -> Gemma4Layer:
    def norm(name: str):
        return reader.vector(f"{blk}.{name}.weight")

    def matrices(*names: str):
        return reader.matrices(*(f"{blk}.{name}.weight" for name in names))

    qkv = [n for n in ("attn_q", "attn_k", "attn_v") if reader.has(f"{blk}.{n}.weight")]
    inputs = reader.has(f"{blk}.inp_gate.weight")
    experts = reader.has(f"{blk}.ffn_gate_inp.weight")
    return Gemma4Layer(
        attention_norm=norm("attn_norm"),
        qkv=matrices(*qkv),
        q_norm=norm("attn_q_norm"),
        k_norm=norm("attn_k_norm") if "attn_k" in qkv else None,
        attention_output=matrices("attn_output"),
        attention_post_norm=norm("post_attention_norm"),
        ffn_norm=norm("ffn_norm"),
        gate_up=matrices("ffn_gate", "ffn_up"),
        down=matrices("ffn_down"),
        ffn_post_norm=norm("post_ffw_norm"),
        input_gate=matrices("inp_gate") if inputs else None,
        input_projection=matrices("proj") if inputs else None,
        input_post_norm=norm("post_norm") if inputs else None,
        scalar=norm("layer_output_scale"),
        experts=read_experts(reader, blk) if experts else None,
    )


ARCHITECTURES = (
    Architecture(
        name="gemma4",
        weights=weights_of,
        gguf="gemma4",
        from_gguf=described_gguf,
        model_type="gemma4_text",
        from_folder=described_folder,
        names=names_at("model"),
        without=WITHOUT,
    ),
    Architecture(
        name="gemma4 with images",
        weights=weights_of,
        model_type="gemma4",
        from_folder=described_whole,
        names={
            **names_at("model.language_model"),
            **{f"model.{n}.{{rest}}": f"ignored.{n}.{{rest}}" for n in OTHER_SENSES},
        },
        harmless={
            **HARMLESS,
            **{f"{INSIDE}.{key}": why for key, why in hugging_face.HARMLESS.items()},
        },
        without={
            f"{INSIDE}.{key}": values
            for key, values in {**hugging_face.WITHOUT, **WITHOUT}.items()
        },
    ),
)
