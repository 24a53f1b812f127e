"""GLM-4.5 and 4.6: half of each head rotates, the first layers are dense.

    x = x + attention(rms_norm(x))      heads of q and k normalised in the larger models
    x = x + experts(rms_norm(x)) + shared(rms_norm(x))

Experts are chosen as by DeepSeek V3: by sigmoids plus a correction, in the best groups,
with normalised weights. The layers behind the last one predict further tokens and are
left out; GGUF files count them in `block_count`.
"""

from jaxkern.formats.architecture_keys import ArchitectureKeys
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
    own_layers,
)
from jaxkern.models.deepseek_files import FURTHER, OTHERS, experts_of_gguf
from jaxkern.models.feed_forward import Dense, Mixture
from jaxkern.models.folder_keys import (
    TRAINING,
    attention,
    check_said,
    head_size,
    mixture,
    num_layers,
    positive,
    rotation,
    shared_keys,
)
from jaxkern.models.llama_form import Form
from jaxkern.models.mixers.layout import Layout

LAYERS_BEHIND = "num_nextn_predict_layers"
LEFT_OUT = "of layers that are left out"


def config_of(keys: ArchitectureKeys) -> DecoderConfig:
    """What config.json says."""
    check_said(keys, "num_key_value_heads")
    layers, head_dim = num_layers(keys), head_size(keys)
    mixer = attention(
        keys,
        rotation(keys, head_dim, share=0.5),
        head_dim,
        qkv_bias=keys.flag("attention_bias", False),
        head_norms=keys.flag("use_qk_norm", False),
    )
    dense = min(keys.integer("first_k_dense_replace", 1), layers)
    block = Dense(positive(keys, "intermediate_size"))
    return DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("rms_norm_eps"),
        mixers=(mixer,) * layers,
        feed_forwards=(block,) * dense + (experts_of(keys),) * (layers - dense),
    )


def experts_of(keys: ArchitectureKeys) -> Mixture:
    """The experts, and the block that every token passes."""
    width = positive(keys, "moe_intermediate_size")
    return mixture(
        keys,
        positive(keys, "n_routed_experts"),
        width,
        shared=Dense(width * positive(keys, "n_shared_experts", 1), "_shexp"),
        score="sigmoid",
        correction=True,
        normalize=keys.flag("norm_topk_prob", True),
        scaling_factor=keys.number("routed_scaling_factor", 1.0),
        num_groups=positive(keys, "n_group", 1),
        top_groups=positive(keys, "topk_group", 1),
        group_score="top2",
    )


def config_of_gguf(keys: ArchitectureKeys) -> DecoderConfig:
    """What a GGUF file says; of biases and norms of heads its tensors do."""
    base = gguf_base(keys, Form("glm4moe", features=("experts",)))
    layers, tensors = own_layers(keys, base), keys.file.tensors
    mixer = gguf_attention(
        base,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        head_norms="blk.0.attn_q_norm.weight" in tensors,
    )
    dense = min(keys.integer("leading_dense_block_count", 0), layers)
    block = Dense(positive(keys, "feed_forward_length"))
    sparse = experts_of_gguf(keys, default="sigmoid")
    return gguf_decoder(
        base,
        mixers=(mixer,) * layers,
        feed_forwards=(block,) * dense + (sparse,) * (layers - dense),
    )


ARCHITECTURES = (
    folder_architecture(
        "glm4moe",
        "glm4_moe",
        Folder(
            config_of,
            names=NORMS
            | ATTENTION
            | HEAD_NORMS
            | DENSE
            | EXPERTS
            | ROUTER
            | shared_expert("mlp.shared_experts")
            | FURTHER,
            others=OTHERS,
            layout=Layout(experts="single"),
            further_layers=lambda keys: keys.integer(LAYERS_BEHIND, 0),
            harmless=TRAINING
            | dict.fromkeys((LAYERS_BEHIND, "num_mtp_layers"), LEFT_OUT),
        ),
        OfGGUF(
            "glm4moe",
            config_of_gguf,
            Layout(ffn_norm="post_attention_norm"),
            further_layers,
        ),
    ),
)
