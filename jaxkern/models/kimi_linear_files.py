"""Kimi Linear: Kimi delta attention, and some latent attention without positions.

    x = x + mixer(rms_norm(x))    Kimi delta attention, in some layers latent attention
    x = x + experts(rms_norm(x)) + shared(rms_norm(x))

The first layers are dense (https://arxiv.org/abs/2510.26692). Experts are chosen by
sigmoids plus a correction, in the best groups, as DeepSeek V3 does.
"""

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig
from jaxkern.models.decoder_files import (
    NORMS,
    Folder,
    folder_architecture,
    shared_expert,
)
from jaxkern.models.deepseek_files import LATENT
from jaxkern.models.feed_forward import Dense
from jaxkern.models.folder_keys import (
    TRAINING,
    layer_types,
    mixture,
    num_layers,
    positive,
)
from jaxkern.models.mixers.kimi_delta import KimiDelta
from jaxkern.models.mixers.latent import LatentAttention
from jaxkern.models.mixers.layout import Layout

NO_ROTATION = "no layer rotates"
HARMLESS = {
    "head_dim": "qk_rope_head_dim once more, or of no layer",
    "qk_head_dim": "the sum of its two parts",
    "num_key_value_heads": "each head has keys of its own",
    "rope_theta": NO_ROTATION,
    "rope_parameters.rope_theta": NO_ROTATION,
    "rope_parameters.rope_type": NO_ROTATION,
}
WITHOUT = {
    "mla_use_nope": (True,),
    "moe_layer_freq": (1,),
    "moe_router_activation_func": ("sigmoid",),
    "num_nextn_predict_layers": (0,),
    "use_grouped_topk": (True,),
}
KINDS = {"full_attention": "full", "linear_attention": "delta"}
BLOCKS = {"dense": "dense", "sparse": "sparse"}
DELTA = {f"self_attn.{x}_proj": f"attn_{x}" for x in "kv"}  # q and o are in LATENT
DELTA |= {f"self_attn.{x}_conv1d": f"ssm_conv1d_{x}" for x in "qkv"}
DELTA |= {f"self_attn.{x}_{y}_proj": f"ssm_{x}_{y}" for x in "fg" for y in "ab"}
DELTA |= {"self_attn.b_proj": "ssm_beta", "self_attn.o_norm": "ssm_norm"}
DENSE = {  # under either name, that of experts where transformers wrote the folder
    f"{at}.{x}_proj": f"ffn_{x}"
    for at in ("mlp", "block_sparse_moe")
    for x in ("gate", "up", "down")
}
EXPERTS = {
    f"block_sparse_moe.experts.{{j}}.{x}": f"ffn_{y}_exps.{{j}}"
    for x, y in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
}
EXPERTS |= {"block_sparse_moe.gate": "ffn_gate_inp"}
EXPERTS |= shared_expert("block_sparse_moe.shared_experts")
OTHERS = {
    "self_attn.A_log": "ssm_a_log",
    "self_attn.dt_bias": "ssm_dt.bias",
    "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
}


def config_of(keys: ArchitectureKeys) -> DecoderConfig:
    """What config.json says."""
    layers, width = num_layers(keys), positive(keys, "moe_intermediate_size")
    mixers = {"full": latent_of(keys), "delta": delta_of(keys)}
    blocks = {
        "dense": Dense(positive(keys, "intermediate_size")),
        "sparse": mixture(
            keys,
            positive(keys, "num_experts"),
            width,
            shared=Dense(width * positive(keys, "num_shared_experts", 1), "_shexp"),
            chosen_key="num_experts_per_token",
            groups_key="num_expert_group",
            score="sigmoid",
            normalize=keys.flag("moe_renormalize", True),
            correction=True,
            scaling_factor=keys.number("routed_scaling_factor", 1.0),
            num_groups=positive(keys, "num_expert_group", 1),
            top_groups=positive(keys, "topk_group", 1),
            group_score="top2",
        ),
    }
    return DecoderConfig(
        architecture=keys.arch,
        context=positive(keys, "model_max_length"),
        d_model=positive(keys, "hidden_size"),
        vocabulary=keys.integer("vocab_size"),
        eps=keys.number("rms_norm_eps"),
        mixers=tuple(mixers[kind] for kind in kinds_of(keys, layers)),
        feed_forwards=tuple(blocks[kind] for kind in blocks_of(keys, layers)),
    )


def kinds_of(keys: ArchitectureKeys, layers: int) -> list[str]:
    """Of each layer: by `layer_types`, or by the numbers of the layers of either kind,
    which count from 1 and must be all layers, once."""
    numbers = {
        kind: keys.value(f"linear_attn_config.{kind}_layers", [])
        for kind in ("full_attn", "kda")
    }
    default = [
        "full_attention" if i and i % 4 == 0 else "linear_attention"
        for i in range(layers)
    ]
    if any(numbers.values()):
        full, delta = numbers.values()
        lists = isinstance(full, list) and isinstance(delta, list)
        if not lists or sorted([*full, *delta]) != list(range(1, layers + 1)):
            raise keys.error(
                "linear_attn_config.kda_layers",
                f"expected each of 1 to {layers} there or in full_attn_layers",
            )
        default = [
            "full_attention" if i + 1 in full else "linear_attention"
            for i in range(layers)
        ]
    found = layer_types(keys, layers, KINDS, default)
    if any(numbers.values()) and found != [KINDS[kind] for kind in default]:
        raise keys.error("layer_types", "which linear_attn_config contradicts")
    return found


def blocks_of(keys: ArchitectureKeys, layers: int) -> list[str]:
    """Of each layer: by `mlp_layer_types`, or how many of the first are dense."""
    dense = keys.integer("first_k_dense_replace", 1)
    default = ["dense" if i < dense else "sparse" for i in range(layers)]
    found = layer_types(keys, layers, BLOCKS, default, "mlp_layer_types")
    if keys.has("first_k_dense_replace") and found != default:
        raise keys.error("first_k_dense_replace", "which mlp_layer_types contradicts")
    return found


def delta_of(keys: ArchitectureKeys) -> KimiDelta:
    """The sizes of a delta layer, in config.json or in its linear_attn_config."""

    def size(key: str, inner: str, default: int) -> int:
        default = positive(keys, key, default)
        found = positive(keys, f"linear_attn_config.{inner}", default)
        if keys.has(key) and found != default:
            raise keys.error(key, "which linear_attn_config contradicts")
        return found

    return KimiDelta(
        heads=size("linear_num_heads", "num_heads", 32),
        head_dim=size("linear_head_dim", "head_dim", 128),
        taps=size("linear_conv_kernel_dim", "short_conv_kernel_size", 4),
    )


def latent_of(keys: ArchitectureKeys) -> LatentAttention:
    """The sizes of latent attention, all of whose dims are without a position."""
    plain, shared = (positive(keys, f"qk_{x}_head_dim") for x in ("nope", "rope"))
    return LatentAttention(
        heads=positive(keys, "num_attention_heads"),
        latent=positive(keys, "kv_lora_rank"),
        query_latent=keys.integer("q_lora_rank", 0),
        plain_dim=plain,
        rotary_dim=shared,
        value_dim=positive(keys, "v_head_dim"),
        scale=(plain + shared) ** -0.5,
        rotation=None,
        bias=keys.flag("attention_bias", False),
    )


ARCHITECTURES = (
    folder_architecture(
        "kimi_linear",
        "kimi_linear",
        Folder(
            config_of,
            names=NORMS | LATENT | DELTA | DENSE | EXPERTS,
            others=OTHERS,
            layout=Layout(experts="single"),
            harmless=TRAINING | HARMLESS,
            without=WITHOUT,
        ),
    ),
)
