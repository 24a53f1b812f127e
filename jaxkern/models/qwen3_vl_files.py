"""Files of Qwen3-VL: text as Qwen3 or Qwen3-MoE, and the tower beside it.

Of GGUF files see qwen3_vl_gguf.py. A folder has

config.json                 text_config, vision_config, the placeholders
preprocessor_config.json    how images are made, see image_rule.py

Experts lie as published, `[e, d, 2*f]` and `[e, f, d]`, or as newer versions of
transformers save them, with rows and columns exchanged. Which of both the shapes say.
"""

import math
from dataclasses import replace
from functools import partial

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.formats.safetensors import SafetensorsFolder
from jaxkern.models import hugging_face
from jaxkern.models.architecture import Architecture, Described
from jaxkern.models.decoder import DecoderConfig
from jaxkern.models.decoder_files import (
    ATTENTION,
    DENSE,
    ENDS,
    HEAD_NORMS,
    NORMS,
    ROUTER,
    Folder,
    described_folder,
    described_gguf,
    template_names,
    weights_of,
)
from jaxkern.models.feed_forward import Dense, Mixture
from jaxkern.models.folder_keys import (
    TRAINING,
    attention,
    head_size,
    mixture,
    num_layers,
    positive,
    rotation,
    shared_keys,
    sparse_layers,
)
from jaxkern.models.image_rule import rule_of_folder
from jaxkern.models.mixers.layout import Layout
from jaxkern.models.qwen3_vl import (
    Qwen3VLConfig,
    Qwen3VLWeights,
    rotation_of,
    seeing,
)
from jaxkern.models.qwen3_vl_gguf import GGUF_TEXT, with_tower
from jaxkern.models.vision_files import vision_tensors, vision_weights
from jaxkern.models.vision_tower import VisionConfig
from jaxkern.models.weight_reader import WeightReader

INSIDE, TOWER = "text_config", "vision_config"
SECTIONS = [24, 20, 20]  # where no key says it
EXPERTS = {
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
BLOCK = {
    "norm1": "ln1",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "norm2": "ln2",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
DEEP = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
VISION_NAMES = {
    "patch_embed.proj": "v.patch_embd",
    "pos_embed": "v.position_embd",
    "merger.norm": "v.post_ln",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
    **{f"blocks.{{i}}.{a}": f"v.blk.{{i}}.{b}" for a, b in BLOCK.items()},
    **{
        f"deepstack_merger_list.{{i}}.{a}": f"v.deepstack.{{i}}.{b}"
        for a, b in DEEP.items()
    },
}
SAID_OUTSIDE = {"tie_word_embeddings": "the key outside counts"}
HARMLESS = {
    **{
        f"{INSIDE}.{key}": why
        for key, why in {**hugging_face.HARMLESS, **TRAINING, **SAID_OUTSIDE}.items()
    },
    f"{TOWER}.model_type": "read as the architecture",
    f"{TOWER}.initializer_range": "of weights before training",
    f"{TOWER}.dtype": "the weights say their own",
    f"{TOWER}.torch_dtype": "the weights say their own",
    "vision_start_token_id": "written by chat templates",
    "vision_end_token_id": "written by chat templates",
}
WITHOUT = {
    **{f"{INSIDE}.{key}": values for key, values in hugging_face.WITHOUT.items()},
    f"{INSIDE}.rope_parameters.mrope_interleaved": (True,),
    f"{INSIDE}.rope_scaling.mrope_interleaved": (True,),
    f"{INSIDE}.norm_topk_prob": (True,),
    f"{TOWER}.hidden_act": ("gelu_pytorch_tanh",),
    f"{TOWER}.rope_parameters.rope_type": ("axial",),
}


def text_config(keys: ArchitectureKeys, *, experts: bool) -> DecoderConfig:
    """What the keys of `text_config` say."""
    layers = num_layers(keys)
    head_dim = head_size(keys) if experts or keys.has("head_dim") else 128
    bias = keys.flag("attention_bias", False)
    turns = rotation(keys, head_dim, theta=500000.0)
    mixer = attention(keys, turns, head_dim, bias=bias, head_norms=True)
    blocks: tuple[Dense | Mixture, ...]
    if experts:
        name = "num_experts" if keys.has("num_experts") else "num_local_experts"
        width = positive(keys, "moe_intermediate_size")
        blocks = sparse_layers(keys, layers, mixture(keys, positive(keys, name), width))
    else:
        blocks = (Dense(positive(keys, "intermediate_size")),) * layers
    return DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("rms_norm_eps"),
        mixers=(mixer,) * layers,
        feed_forwards=blocks,
    )


DENSE_TEXT = Folder(
    partial(text_config, experts=False),
    names=NORMS | ATTENTION | HEAD_NORMS | DENSE,
    at="model.language_model",
    keys_at=INSIDE,
)
WITH_EXPERTS = replace(
    DENSE_TEXT,
    config=partial(text_config, experts=True),
    names={**DENSE_TEXT.names, **ROUTER},
    others=EXPERTS,
)


def described(folder: Folder, keys: ArchitectureKeys) -> Described:
    """The config of text and tower, and exactly the tensors that config.json says."""
    tied = keys.flag("tie_word_embeddings", False)  # whatever the text's own key says
    folder = replace(laid(folder, keys.file.tensors), tied_keys=(), tied=tied)
    text, tensors = described_folder(folder, keys)
    vision = vision_config(keys.within(TOWER), keys.file.tensors)
    if vision.d_text != text.d_model:
        raise keys.error(f"{TOWER}.out_hidden_size", f"the text has {text.d_model}")
    if len(vision.deep) > text.layers:
        raise keys.error(
            f"{TOWER}.deepstack_visual_indexes", f"the text has {text.layers} layers"
        )
    assert isinstance(keys.file, SafetensorsFolder)
    config = seeing(
        text,
        vision=vision,
        sections=sections_of(keys.within(INSIDE), rotation_of(text).dim),
        image_token=keys.integer("image_token_id", 151655),
        video_token=keys.integer("video_token_id", 151656),
        image_rule=rule_of_folder(keys.file.path, vision),
    )
    return config, {**tensors, **vision_tensors(vision)}


def sections_of(keys: ArchitectureKeys, rotary_dim: int) -> tuple[int, int, int]:
    """How many pairs turn by time, row and column: all of them together."""
    where = "rope_parameters" if keys.has_within("rope_parameters") else "rope_scaling"
    key = f"{where}.mrope_section"
    found = keys.value(key, SECTIONS)
    if not isinstance(found, list) or [type(n) for n in found] != [int] * 3:
        raise keys.error(key, "expected three integers")
    if min(found) < 0 or 2 * sum(found) != rotary_dim:
        raise keys.error(key, f"expected {rotary_dim // 2} pairs in all")
    return found[0], found[1], found[2]


def vision_config(keys: ArchitectureKeys, tensors) -> VisionConfig:
    """What the keys of `vision_config` say."""
    places = positive(keys, "num_position_embeddings")
    side = math.isqrt(places)
    if side**2 != places:
        raise keys.error("num_position_embeddings", "expected a square")
    heads, d = positive(keys, "num_heads"), positive(keys, "hidden_size")
    if d % (4 * heads):
        raise keys.error("num_heads", f"{d} dims are no multiple of 4 for each of them")
    blocks = positive(keys, "depth")
    if blocks > len(tensors):
        raise keys.error("depth", f"the files have {len(tensors)} tensors")
    deep = keys.value("deepstack_visual_indexes", [8, 16, 24])
    good = isinstance(deep, list) and all(
        type(i) is int and 0 <= i < blocks for i in deep
    )
    if not good or len({*deep}) != len(deep):
        raise keys.error(
            "deepstack_visual_indexes", f"expected some of {blocks} blocks, each once"
        )
    channels = positive(keys, "in_channels", 3)
    if channels != 3:
        raise keys.error("in_channels", "expected 3: red, green and blue")
    return VisionConfig(
        blocks=blocks,
        d_model=d,
        heads=heads,
        width=positive(keys, "intermediate_size"),
        patch=positive(keys, "patch_size", 16),
        frames=positive(keys, "temporal_patch_size", 2),
        channels=channels,
        merge=positive(keys, "spatial_merge_size", 2),
        side=side,
        deep=tuple(deep),
        d_text=positive(keys, "out_hidden_size"),
        theta=keys.number("rope_parameters.rope_theta", 10000.0),
    )


def laid(folder: Folder, tensors) -> Folder:
    """The folder with the layout of its experts, by the shapes of the first ones."""
    for name, info in tensors.items():
        if name.endswith(".ffn_down_exps.weight") and len(info.shape) == 3:
            gate_up = tensors.get(name.replace("down", "gate_up"))
            # [e, d, f] beside [e, 2*f, d], or as published [e, f, d] beside [e, d, 2*f]
            _, rows, columns = info.shape
            saved = gate_up is not None and gate_up.shape[1:] == (2 * columns, rows)
            form = "fused" if saved else "columns"
            return replace(folder, layout=Layout(experts=form))
    return replace(folder, layout=Layout(experts="columns"))


def weights(folder: Folder, config: DecoderConfig, reader: WeightReader):
    """The weights as the page takes them; those of the text where it is alone."""
    if reader.from_folder:
        folder = laid(folder, reader.file.tensors)
    text = weights_of(folder, GGUF_TEXT, config, reader)
    if not isinstance(config, Qwen3VLConfig):
        return text
    return Qwen3VLWeights(*text, vision=vision_weights(config.vision, reader))


def entry(name: str, model_type: str, folder: Folder) -> Architecture:
    tower = {
        f"model.visual.{a}.{end}": f"{b}.{end}"
        for a, b in VISION_NAMES.items()
        for end in ENDS
    }
    return Architecture(
        name=name,
        weights=partial(weights, folder),
        gguf=name,
        from_gguf=partial(described_gguf, GGUF_TEXT),
        with_tower=with_tower,
        model_type=model_type,
        from_folder=partial(described, folder),
        names={**template_names(folder), **tower},
        harmless=HARMLESS,
        without=WITHOUT,
    )


ARCHITECTURES = (
    entry("qwen3vl", "qwen3_vl", DENSE_TEXT),
    entry("qwen3vlmoe", "qwen3_vl_moe", WITH_EXPERTS),
)
