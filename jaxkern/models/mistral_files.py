"""Ministral 3 and Mistral 4, alone and as the text in Mistral 3's folders with images.

    x = x + attention(rms_norm(x))      queries grow with their position
    x = x + block(rms_norm(x))

Ministral 3 has grouped attention and a dense block; Mistral 4 the latent attention of
DeepSeek, and experts chosen by a softmax beside a shared one. The queries of both are
multiplied by 1 + beta log(1 + floor(position / original context)). What reads images is
left out: the model answers text alone here.

GGUF files of Ministral 3 say `mistral3`, and have the rows of q and k in pairs. Those
of Mistral 4 do not say how queries grow, and are refused.
"""

from dataclasses import replace
from typing import Any

from jaxkern import YarnScaling
from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models import hugging_face
from jaxkern.models.decoder import DecoderConfig
from jaxkern.models.decoder_files import (
    ATTENTION,
    DENSE,
    NORMS,
    ROUTER,
    Folder,
    OfGGUF,
    folder_architecture,
    shared_expert,
)
from jaxkern.models.decoder_gguf import gguf_attention, gguf_base, gguf_decoder
from jaxkern.models.deepseek_files import LATENT, latent_of
from jaxkern.models.feed_forward import Dense
from jaxkern.models.folder_keys import (
    TRAINING,
    attention,
    head_size,
    mixture,
    num_layers,
    positive,
    rotation,
    shared_keys,
)
from jaxkern.models.llama_form import Form
from jaxkern.models.mixers.layout import Layout
from jaxkern.models.mixers.mixing import QueryGrowth

HARMLESS = TRAINING | {
    "qk_head_dim": "the sum of its two parts",
    "intermediate_size": "of layers that this model may not have",
    "rope_parameters.max_position_embeddings": "max_position_embeddings once more",
}
EXPERTS = {f"mlp.experts.{x}_proj": f"ffn_{x}_exps.weight" for x in ("gate_up", "down")}
GROWTH = "rope_parameters.llama_4_scaling_beta"


def config_of(keys: ArchitectureKeys) -> DecoderConfig:
    """What config.json says of the text model."""
    kind = keys.string("model_type", keys.arch)
    if kind not in ("ministral3", "mistral4"):
        raise keys.error("model_type", "known are ministral3 and mistral4")
    latent = kind == "mistral4"
    layers, growth = num_layers(keys), growth_of(keys)
    block = Dense(positive(keys, "intermediate_size"))
    options: dict[str, Any] = {}
    if latent:
        options = latent_layers(keys, layers, block, growth)
    else:
        head_dim = head_size(keys)
        window = keys.integer("sliding_window", 0) or None
        mixer = attention(
            keys, rotation(keys, head_dim), head_dim, window=window, growth=growth
        )
        options = dict(mixers=(mixer,) * layers, feed_forwards=(block,) * layers)
    return DecoderConfig(
        **shared_keys(keys), eps=keys.number("rms_norm_eps"), **options
    )


def growth_of(keys: ArchitectureKeys) -> QueryGrowth | None:
    """How queries grow; None where they do not."""
    beta = keys.number_or_none(GROWTH)
    if beta is None:
        return None
    original = "rope_parameters.original_max_position_embeddings"
    return QueryGrowth(beta, positive(keys, original))


def config_of_gguf(keys: ArchitectureKeys) -> DecoderConfig:
    """What the keys of a GGUF file say of Ministral 3.

    The original context is also the length by which queries grow.
    """
    base = gguf_base(keys, Form(keys.arch))
    stretch = "rope.scaling.yarn_log_multiplier"
    if isinstance(base.scaling, YarnScaling) and not keys.number_or_none(stretch):
        raise keys.error(
            stretch, "and programs differ in what YaRN multiplies without it"
        )
    growth, beta = None, keys.number_or_none("attention.temperature_scale")
    if beta is not None:
        original = keys.integer("rope.scaling.original_context_length", 0)
        growth = QueryGrowth(beta, original or positive(keys, "context_length"))
    mixer = gguf_attention(base, pairing="interleaved", growth=growth)
    block = Dense(positive(keys, "feed_forward_length"))
    return gguf_decoder(
        base,
        mixers=(mixer,) * base.layers,
        feed_forwards=(block,) * base.layers,
    )


def latent_layers(
    keys: ArchitectureKeys, layers: int, block: Dense, growth: QueryGrowth | None
) -> dict[str, Any]:
    """The layers of Mistral 4."""
    mixer = replace(latent_of(keys), growth=growth)
    both = mixer.plain_dim + mixer.rotary_dim
    many = keys.integer("num_key_value_heads", mixer.heads)
    if many != mixer.heads:
        raise keys.error("num_key_value_heads", f"each of {mixer.heads} has its own")
    if keys.integer("head_dim", both) != both:
        raise keys.error("head_dim", f"expected the sum of its parts, {both}")
    share = keys.number(
        "rope_parameters.partial_rotary_factor", mixer.rotary_dim / both
    )
    if round(both * share) != mixer.rotary_dim:
        raise keys.error(
            "rope_parameters.partial_rotary_factor",
            f"{mixer.rotary_dim} of {both} dims rotate",
        )
    width = positive(keys, "moe_intermediate_size")
    sparse = mixture(
        keys,
        positive(keys, "n_routed_experts"),
        width,
        shared=Dense(width * positive(keys, "n_shared_experts", 1), "_shexp"),
        normalize=keys.flag("norm_topk_prob", True),
        scaling_factor=keys.number("routed_scaling_factor", 1.0),
        num_groups=positive(keys, "n_group", 1),
        top_groups=positive(keys, "topk_group", 1),
        group_score="top2",
    )
    dense = min(keys.integer("first_k_dense_replace", 0), layers)
    return dict(
        mixers=(mixer,) * layers,
        feed_forwards=(block,) * dense + (sparse,) * (layers - dense),
    )


SHARED = shared_expert("mlp.shared_experts")
MINISTRAL = Folder(config_of, names=NORMS | ATTENTION | DENSE, harmless=HARMLESS)
MISTRAL = Folder(
    config_of,
    names=NORMS | LATENT | DENSE | ROUTER | SHARED,
    others=EXPERTS,
    layout=Layout(experts="fused"),
    harmless=HARMLESS,
    without={"attention_bias": (False,)},
)
INSIDE = "text_config"
WITH_IMAGES = replace(
    MISTRAL,
    names={**MISTRAL.names, **ATTENTION},
    at="language_model.model",
    output="language_model.lm_head.weight",
    keys_at=INSIDE,
    ignored=("vision_tower.{rest}", "multi_modal_projector.{rest}"),
    harmless={
        **{
            f"{INSIDE}.{key}": why
            for key, why in {**hugging_face.HARMLESS, **HARMLESS}.items()
        },
        "vision_config.*": "of images",
        "vision_feature_layer": "of images",
        "multimodal_projector_bias": "of images",
        "projector_hidden_act": "of images",
        "spatial_merge_size": "of images",
        "image_token_index": "of images",
        "image_token_id": "of images",
    },
    without={
        f"{INSIDE}.{key}": values
        for key, values in {**hugging_face.WITHOUT, **MISTRAL.without}.items()
    },
)
ARCHITECTURES = tuple(
    folder_architecture(name, model_type, folder, gguf)
    for name, model_type, folder, gguf in (
        ("ministral3", "ministral3", MINISTRAL, OfGGUF("mistral3", config_of_gguf)),
        ("mistral4", "mistral4", MISTRAL, None),
        ("mistral3", "mistral3", WITH_IMAGES, None),
    )
)
