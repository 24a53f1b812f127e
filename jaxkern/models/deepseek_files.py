"""DeepSeek V2 and V3: latent attention, experts in groups, the first layers dense.

    x = x + latent_attention(rms_norm(x))       https://arxiv.org/abs/2405.04434
    x = x + experts(rms_norm(x)) + shared(rms_norm(x))

V2 chooses by a softmax, in the best groups by their best expert; V3 by sigmoids plus a
correction, in the best groups by their two best, and normalises the weights
(https://arxiv.org/abs/2412.19437). With `mscale_all_dim` YaRN scales the scores too.
The layers of V3's files behind the last one predict further tokens: they are no part of
the model that gives the logits, and are left out.

GGUF files say `deepseek2` for both, with the length of a head's keys apart from that of
the cache (`attention.key_length_mla`); older ones have no such key, `attn_kv_b` whole.
They write mscale_all_dim times 0.1 as `rope.scaling.yarn_log_multiplier`.
"""

import math
from dataclasses import replace
from typing import Any

from jaxkern import YarnScaling
from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.formats.gguf import GGUFFile
from jaxkern.models.decoder import DecoderConfig
from jaxkern.models.decoder_files import (
    DENSE,
    EXPERTS,
    NORMS,
    ROUTER,
    Folder,
    OfGGUF,
    folder_architecture,
    shared_expert,
)
from jaxkern.models.decoder_gguf import gguf_mixture, gguf_table
from jaxkern.models.feed_forward import Dense, Mixture
from jaxkern.models.folder_keys import (
    TRAINING,
    mixture,
    num_layers,
    positive,
    rotation,
    shared_keys,
)
from jaxkern.models.llama_config import gguf_rope_scaling
from jaxkern.models.mixers.latent import LatentAttention
from jaxkern.models.mixers.layout import Layout
from jaxkern.models.mixers.mixing import Rotation

HARMLESS = {
    "head_dim": "qk_rope_head_dim once more",
    "qk_head_dim": "the sum of its two parts",
    "num_key_value_heads": "each head has keys of its own",
    "num_mtp_layers": "of layers that predict further tokens",
    "num_nextn_predict_layers": "of layers that predict further tokens",
    "aux_loss_alpha": "of training",
    "seq_aux": "of training",
    "ep_size": "how it is run",
    "n_group": "only read where experts are chosen in groups",
    "topk_group": "only read where experts are chosen in groups",
}
LATENT = {
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
}
OTHERS = {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
FURTHER = {  # of a layer that predicts further tokens
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.head": "nextn.shared_head_head",
    "shared_head.norm": "nextn.shared_head_norm",
}


def config_of(keys: ArchitectureKeys) -> DecoderConfig:
    """What config.json says."""
    layers, width = num_layers(keys), positive(keys, "moe_intermediate_size")
    sparse = mixture(
        keys,
        positive(keys, "n_routed_experts"),
        width,
        shared=Dense(width * positive(keys, "n_shared_experts"), "_shexp"),
        **routing(keys),
    )
    dense = min(keys.integer("first_k_dense_replace", 0), layers)
    block = Dense(positive(keys, "intermediate_size"))
    return DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("rms_norm_eps"),
        mixers=(latent_of(keys),) * layers,
        feed_forwards=(block,) * dense + (sparse,) * (layers - dense),
    )


def latent_of(keys: ArchitectureKeys) -> LatentAttention:
    """The sizes of attention, and its scale."""
    plain, turning = (
        positive(keys, f"qk_{part}_head_dim") for part in ("nope", "rope")
    )
    turns = rotation(keys, turning)
    scale = (plain + turning) ** -0.5
    if isinstance(turns.scaling, YarnScaling) and turns.scaling.mscale_all_dim:
        stretch = math.log(max(turns.scaling.factor, 1.0))
        scale *= (0.1 * turns.scaling.mscale_all_dim * stretch + 1) ** 2
    neighbours = keys.flag("rope_interleave", True)
    return LatentAttention(
        heads=positive(keys, "num_attention_heads"),
        latent=positive(keys, "kv_lora_rank"),
        query_latent=keys.integer("q_lora_rank", 0),
        plain_dim=plain,
        rotary_dim=turning,
        value_dim=positive(keys, "v_head_dim"),
        scale=scale,
        rotation=turns,
        pairing="interleaved" if neighbours else "neox",
        bias=keys.flag("attention_bias", False),
    )


def routing(keys: ArchitectureKeys) -> dict[str, Any]:
    """How experts are chosen, as options of `Mixture`."""
    third = keys.arch == "deepseek_v3"
    score = "sigmoid" if third else "softmax"
    if keys.string("scoring_func", score) != score:
        raise keys.error("scoring_func", f"expected {score} for {keys.arch}")
    methods = ("noaux_tc",) if third else ("greedy", "group_limited_greedy")
    method = keys.string("topk_method", methods[0])
    if method not in methods:
        raise keys.error("topk_method", f"expected {' or '.join(methods)}")
    normalize = keys.flag("norm_topk_prob", third)
    if normalize and not third:  # programs differ in what they make of it
        raise keys.error("norm_topk_prob", f"expected false for {keys.arch}")
    options: dict[str, Any] = dict(
        score=score,
        normalize=normalize,
        correction=third,
        scaling_factor=keys.number("routed_scaling_factor", 1.0),
    )
    if method == "greedy":
        return options
    return options | dict(
        num_groups=positive(keys, "n_group", 1),
        top_groups=positive(keys, "topk_group", 1),
        group_score="top2" if third else "max",
    )


def config_of_gguf(keys: ArchitectureKeys) -> DecoderConfig:
    """What the keys of a GGUF file say."""
    file = keys.file
    assert isinstance(file, GGUFFile)
    vocabulary, d_model = gguf_table(keys)
    layers = positive(keys, "block_count")
    if layers > len(file.tensors):
        raise keys.error("block_count", f"the file has {len(file.tensors)} tensors")
    eps = keys.number("attention.layer_norm_rms_epsilon")
    block = Dense(positive(keys, "feed_forward_length"))
    dense = min(keys.integer("leading_dense_block_count", 0), layers)
    sparse = experts_of_gguf(keys)
    return DecoderConfig(
        architecture=keys.arch,
        context=positive(keys, "context_length"),
        d_model=d_model,
        vocabulary=vocabulary,
        eps=eps,
        mixers=(latent_of_gguf(keys, eps),) * layers,
        feed_forwards=(block,) * dense + (sparse,) * (layers - dense),
    )


def latent_of_gguf(keys: ArchitectureKeys, eps: float) -> LatentAttention:
    """Attention as a GGUF file says it."""
    heads = positive(keys, "attention.head_count")
    latent = positive(keys, "attention.kv_lora_rank")
    turning = positive(keys, "rope.dimension_count")
    wide, values = (positive(keys, f"attention.{x}_length") for x in ("key", "value"))
    apart = keys.has("attention.key_length_mla")
    if apart:  # the others are those of a row of the cache
        if (wide, values) != (latent + turning, latent):
            raise keys.error("attention.key_length", "expected that of the cache")
        wide, values = (
            positive(keys, f"attention.{x}_length_mla") for x in ("key", "value")
        )
    if turning % 2 or turning >= wide:
        raise keys.error("rope.dimension_count", f"expected an even part of {wide}")
    shared = 1 if apart else heads
    if keys.integer("attention.head_count_kv", shared) != shared:
        raise keys.error("attention.head_count_kv", f"expected {shared}")
    theta = keys.number("rope.freq_base", 10000.0)
    scaling = gguf_rope_scaling(keys, positive(keys, "context_length"), theta)
    scale = wide**-0.5
    if isinstance(scaling, YarnScaling):
        stretch = keys.number_or_none("rope.scaling.yarn_log_multiplier")
        if stretch is None or keys.number("rope.scaling.attn_factor", 1.0) != 1.0:
            raise keys.error(
                "rope.scaling.yarn_log_multiplier",
                "and programs differ in what YaRN multiplies without it, or with an "
                "attn_factor",
            )
        scale *= (stretch * math.log(max(scaling.factor, 1.0)) + 1) ** 2
        scaling = replace(
            scaling, mscale=None, mscale_all_dim=None, attention_factor=1.0
        )
    return LatentAttention(
        heads=heads,
        latent=latent,
        query_latent=keys.integer("attention.q_lora_rank", 0),
        plain_dim=wide - turning,
        rotary_dim=turning,
        value_dim=values,
        scale=scale,
        rotation=Rotation(turning, theta, scaling),
        eps=eps,
        apart=apart,
    )


def experts_of_gguf(keys: ArchitectureKeys, default: str = "softmax") -> Mixture:
    """The experts, and how they are chosen; by `default` where no key says it."""
    score = {0: default, 1: "softmax", 2: "sigmoid"}.get(
        keys.integer("expert_gating_func", 0)
    )
    if score is None:
        raise keys.error("expert_gating_func", "known are 1, softmax, and 2, sigmoid")
    found = gguf_mixture(
        keys,
        score=score,
        normalize=keys.flag("expert_weights_norm", False),
        scaling_factor=keys.number_or_none("expert_weights_scale") or 1.0,
        num_groups=positive(keys, "expert_group_count", 1),
        top_groups=positive(keys, "expert_group_used_count", 1),
        group_score="top2",
        correction=any(n.endswith(".exp_probs_b.bias") for n in keys.file.tensors),
    )
    groups, top = found.num_groups, found.top_groups
    uneven = found.experts % groups or top > groups
    if uneven or found.chosen > found.experts // groups * top:
        raise keys.error("expert_group_count", f"of {found.experts} experts")
    if score == "softmax" and groups > 1:
        raise keys.error(
            "expert_group_count", "and programs differ in how a softmax ranks groups"
        )
    width = found.width * positive(keys, "expert_shared_count")
    return replace(found, shared=Dense(width, "_shexp"))


def further_layers(keys: ArchitectureKeys) -> int:
    """How many layers predict further tokens."""
    return keys.integer("num_nextn_predict_layers", 0)


ARCHITECTURES = tuple(
    folder_architecture(
        model_type,
        model_type,
        Folder(
            config_of,
            names=NORMS
            | LATENT
            | DENSE
            | EXPERTS
            | ROUTER
            | shared_expert("mlp.shared_experts")
            | FURTHER,
            others=OTHERS,
            layout=Layout(experts="single"),
            further_layers=further_layers,
            harmless=TRAINING | HARMLESS,
            without={"moe_layer_freq": (1,), "mlp_bias": (False,)},
        ),
        OfGGUF("deepseek2", config_of_gguf) if model_type == "deepseek_v3" else None,
    )
    for model_type in ("deepseek_v2", "deepseek_v3")
)
