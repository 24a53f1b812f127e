"""Qwen3-Next, and the text in Qwen3.5: gated delta nets, and some attention.

    x = x + mixer(rms_norm(x))      a gated delta net; in every fourth layer attention,
                                    a part of whose dims rotates, with an output gate
    x = x + experts(rms_norm(x))    with a shared expert and its gate; or a dense block

All norms but that of the delta net are stored less 1. The tensors `mtp.*` of the
published files predict further tokens: they are no part of the model that gives the
logits, and are left out. So is what reads images: Qwen3.5 answers text alone here.

GGUF files have norms as they are, a convolution without its dim of 1, the
rates -exp(A_log), and q, k, v apart from z; older ones of Qwen3-Next
have these by head, as folders. Those of Qwen3.5 have value heads in turns.
"""

from dataclasses import replace

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models import hugging_face
from jaxkern.models.decoder import DecoderConfig
from jaxkern.models.decoder_files import (
    ATTENTION,
    DENSE,
    EXPERTS,
    HEAD_NORMS,
    NORMS,
    ROUTER,
    Folder,
    OfGGUF,
    folder_architecture,
    shared_expert,
)
from jaxkern.models.decoder_gguf import (
    further_layers,
    gguf_attention,
    gguf_base,
    gguf_decoder,
    gguf_mixture,
    own_layers,
)
from jaxkern.models.feed_forward import Dense, Mixture
from jaxkern.models.folder_keys import (
    TRAINING,
    attention,
    head_size,
    layer_types,
    mixture,
    num_layers,
    positive,
    rotation,
    shared_keys,
    sparse_layers,
)
from jaxkern.models.llama_form import Form
from jaxkern.models.mixers.delta_net import DeltaNet
from jaxkern.models.mixers.layout import Layout

HARMLESS = {
    "full_attention_interval": "read where there are no layer_types",
    "rope_parameters.mrope_section": "of images; text has one position",
    "rope_parameters.mrope_interleaved": "of images; text has one position",
    "intermediate_size": "of layers that this model may not have",
}
KINDS = {"full_attention": "full", "linear_attention": "delta"}
DELTA = {
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
OTHERS = {"linear_attn.A_log": "ssm_a_log", "linear_attn.dt_bias": "ssm_dt.bias"}
SHARED = shared_expert("mlp.shared_expert")
SHARED |= {"mlp.shared_expert_gate": "ffn_gate_inp_shexp"}


def config_of(keys: ArchitectureKeys) -> DecoderConfig:
    """What config.json says."""
    layers, head_dim = num_layers(keys), head_size(keys)
    every = positive(keys, "full_attention_interval", 4)
    default = [
        "linear_attention" if (i + 1) % every else "full_attention"
        for i in range(layers)
    ]
    kinds = layer_types(keys, layers, KINDS, default)
    turns = rotation(keys, head_dim, share=0.25)
    full = attention(keys, turns, head_dim, output_gate=True, head_norms=True)
    delta = DeltaNet(
        key_heads=positive(keys, "linear_num_key_heads"),
        value_heads=positive(keys, "linear_num_value_heads"),
        key_dim=positive(keys, "linear_key_head_dim"),
        value_dim=positive(keys, "linear_value_head_dim"),
        taps=positive(keys, "linear_conv_kernel_dim"),
        by_head=keys.arch == "qwen3_next",
    )
    if delta.value_heads % delta.key_heads:
        raise keys.error(
            "linear_num_value_heads", f"{delta.key_heads} key heads do not divide them"
        )
    if keys.arch in ("qwen3_5", "qwen3_5_text"):
        feed_forwards: tuple[Dense | Mixture, ...]
        feed_forwards = (Dense(positive(keys, "intermediate_size")),) * layers
    else:
        feed_forwards = sparse_layers(keys, layers, experts_of(keys))
    return DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("rms_norm_eps"),
        mixers=tuple(full if kind == "full" else delta for kind in kinds),
        feed_forwards=feed_forwards,
    )


def experts_of(keys: ArchitectureKeys) -> Mixture:
    """Experts, and the one that every token passes."""
    found = mixture(
        keys,
        positive(keys, "num_experts"),
        positive(keys, "moe_intermediate_size"),
        shared_gate=True,
    )
    if keys.arch == "qwen3_next":  # Qwen3.5 always normalises
        found = replace(found, normalize=keys.flag("norm_topk_prob", True))
    shared = Dense(positive(keys, "shared_expert_intermediate_size"), "_shexp")
    return replace(found, shared=shared)


def config_of_gguf(keys: ArchitectureKeys) -> DecoderConfig:
    """What the keys of a GGUF file say."""
    base = gguf_base(keys, Form(keys.arch, features=("experts",)))
    layers = own_layers(keys, base)
    third = keys.arch == "qwen3next"
    if not third:
        keys.value("rope.dimension_sections")  # of images; text has one position
    full = gguf_attention(base, output_gate=True, head_norms=True)
    heads = positive(keys, "ssm.time_step_rank")
    key_heads, width = (
        positive(keys, f"ssm.{part}") for part in ("group_count", "inner_size")
    )
    if width % heads or heads % key_heads:
        raise keys.error("ssm.time_step_rank", f"{key_heads} key heads, {width} values")
    names = keys.file.tensors
    delta = DeltaNet(
        key_heads=key_heads,
        value_heads=heads,
        key_dim=positive(keys, "ssm.state_size"),
        value_dim=width // heads,
        taps=positive(keys, "ssm.conv_kernel"),
        by_head=third and any(name.endswith(".ssm_in.weight") for name in names),
        gates_by_head=third,
        in_turns=not third and heads > key_heads,
    )
    if keys.arch == "qwen35":
        block = Dense(positive(keys, "feed_forward_length"))
    else:
        block = experts_of_gguf(keys)
    return gguf_decoder(
        base,
        mixers=tuple(delta if here else full for here in delta_layers(keys, layers)),
        feed_forwards=(block,) * layers,
    )


def delta_layers(keys: ArchitectureKeys, layers: int) -> list[bool]:
    """Which layers are delta nets: as listed, or all but every so many."""
    interval = positive(keys, "full_attention_interval", 4)
    found = keys.flags("attention.recurrent_layers")
    if not found:
        return [(i + 1) % interval != 0 for i in range(layers)]
    if len(found) < layers:
        raise keys.error("attention.recurrent_layers", f"expected {layers} answers")
    return found[:layers]


def experts_of_gguf(keys: ArchitectureKeys) -> Mixture:
    """`experts_of` a GGUF file."""
    sparse = gguf_mixture(
        keys,
        shared_gate=True,
        normalize=keys.flag("expert_weights_norm", True),
        scaling_factor=keys.number_or_none("expert_weights_scale") or 1.0,
    )
    shared = Dense(positive(keys, "expert_shared_feed_forward_length"), "_shexp")
    return replace(sparse, shared=shared)


NAMES = NORMS | ATTENTION | HEAD_NORMS | DELTA | DENSE | EXPERTS | ROUTER | SHARED
WITHOUT = {"attention_bias": (False,)}
TEXT = Folder(
    config_of,
    names=NAMES,
    others=OTHERS,
    ignored=("mtp.{rest}",),
    layout=Layout(experts="single", plus=1.0),
    harmless=TRAINING | HARMLESS,
    without=WITHOUT,
)
INSIDE = "text_config"
WITH_IMAGES = replace(
    TEXT,
    at="model.language_model",
    keys_at=INSIDE,
    ignored=("mtp.{rest}", "model.visual.{rest}"),
    harmless={
        **{
            f"{INSIDE}.{key}": why
            for key, why in {**hugging_face.HARMLESS, **TRAINING, **HARMLESS}.items()
        },
        "vision_config.*": "of images",
        "image_token_id": "of images",
        "video_token_id": "of images",
        "vision_start_token_id": "of images",
        "vision_end_token_id": "of images",
    },
    without={
        f"{INSIDE}.{key}": values
        for key, values in {**hugging_face.WITHOUT, **WITHOUT}.items()
    },
)
OF_GGUF = Layout(ffn_norm="post_attention_norm", flat_taps=True, rates=True)
GGUF = {
    name: OfGGUF(kind, config_of_gguf, OF_GGUF, further_layers)
    for name, kind in (
        ("qwen3next", "qwen3next"),
        ("qwen3.5", "qwen35"),
        ("qwen3.5moe", "qwen35moe"),
    )
}
ARCHITECTURES = tuple(
    folder_architecture(name, model_type, folder, GGUF.get(name))
    for name, model_type, folder in (
        ("qwen3next", "qwen3_next", TEXT),
        ("qwen3.5", "qwen3_5", WITH_IMAGES),
        ("qwen3.5moe", "qwen3_5_moe", WITH_IMAGES),
        ("qwen3.5 text", "qwen3_5_text", TEXT),
        ("qwen3.5moe text", "qwen3_5_moe_text", TEXT),
    )
)
