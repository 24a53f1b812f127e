"""DeepSeek V2 and V3: latent attention, experts in groups, the first layers dense.

    x = x + latent_attention(rms_norm(x))       https://arxiv.org/abs/2405.04434
    x = x + experts(rms_norm(x)) + shared(rms_norm(x))

V2 chooses by a softmax, in the best groups by their best expert; V3 by sigmoids plus a
correction, in the best groups by their two best, and normalises the weights
(https://arxiv.org/abs/2412.19437). With `mscale_all_dim` YaRN scales the scores too.
"""

import math
from typing import Any

from jaxkern import YarnScaling
from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig, DecoderWeights, LayerWeights
from jaxkern.models.feed_forward import Dense, Mixture
from jaxkern.models.folder_blocks import decoder_weights, dense_weights, expert_weights
from jaxkern.models.folder_keys import (
    Widths,
    choice,
    num_layers,
    positive,
    rotation,
    shared_keys,
)
from jaxkern.models.folder_tensors import FolderTensors
from jaxkern.models.mixers.latent import LatentAttention, LatentWeights

HARMLESS = {
    "head_dim": "qk_rope_head_dim once more",
    "qk_head_dim": "the sum of its two parts",
    "num_key_value_heads": "each head has keys of its own",
    "num_nextn_predict_layers": "predicts further tokens",
    "num_mtp_layers": "predicts further tokens",
    "aux_loss_alpha": "of training",
    "seq_aux": "of training",
    "ep_size": "how it is run",
    "n_group": "only read where experts are chosen in groups",
    "topk_group": "only read where experts are chosen in groups",
}
WITHOUT = {"moe_layer_freq": (1,), "mlp_bias": (False,)}
IGNORED: dict[str, str] = {}


def read(keys: ArchitectureKeys, num_tensors: int) -> tuple[DecoderConfig, Widths]:
    """What config.json says."""
    layers, mixer = num_layers(keys, num_tensors), latent(keys)
    experts = positive(keys, "n_routed_experts")
    mixture = choice(keys, experts, **routing(keys))
    dense = min(keys.integer("first_k_dense_replace", 0), layers)
    config = DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("rms_norm_eps"),
        mixers=(mixer,) * layers,
        feed_forwards=(Dense(),) * dense + (mixture,) * (layers - dense),
    )
    expert = keys.integer("moe_intermediate_size")
    return config, Widths(
        dense=keys.integer("intermediate_size"),
        expert=expert,
        shared=expert * positive(keys, "n_shared_experts"),
        experts=experts,
        tied=keys.flag("tie_word_embeddings", False),
        bias=keys.flag("attention_bias", False),
    )


def latent(keys: ArchitectureKeys) -> LatentAttention:
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
    )


def routing(keys: ArchitectureKeys) -> dict[str, Any]:
    """How experts are chosen, as options of `Mixture`."""
    third = keys.arch == "deepseek_v3"
    score = keys.string("scoring_func", "sigmoid" if third else "softmax")
    if score != ("sigmoid" if third else "softmax"):
        raise keys.error("scoring_func", f"{keys.arch} has another")
    method = keys.string("topk_method", "noaux_tc" if third else "greedy")
    options: dict[str, Any] = dict(
        score=score, scaling_factor=keys.number("routed_scaling_factor", 1.0)
    )
    normalize = keys.flag("norm_topk_prob", third)
    if third and method == "noaux_tc":
        return options | dict(
            normalize=normalize,
            num_groups=positive(keys, "n_group", 1),
            top_groups=positive(keys, "topk_group", 1),
            group_score="top2",
        )
    if normalize or third:
        raise keys.error(
            "topk_method" if third else "norm_topk_prob",
            f"which {keys.arch} here does not have",
        )
    if method == "greedy":
        return options | dict(normalize=False)
    if method != "group_limited_greedy":
        raise keys.error("topk_method", "known are greedy and group_limited_greedy")
    return options | dict(
        normalize=False,
        num_groups=positive(keys, "n_group"),
        top_groups=positive(keys, "topk_group"),
    )


def weights(
    take: FolderTensors, config: DecoderConfig, widths: Widths
) -> DecoderWeights:
    """The tensors of a folder."""
    d = config.d_model

    def layer(i: int) -> LayerWeights:
        at, mixer = f"model.layers.{i}", config.mixers[i]
        assert isinstance(mixer, LatentAttention)
        block = config.feed_forwards[i]
        if isinstance(block, Mixture):
            sizes = (d, widths.expert, widths.experts)
            shared = f"{at}.mlp.shared_experts"
            feed_forward = expert_weights(take, f"{at}.mlp", *sizes)._replace(
                shared=dense_weights(take, shared, d, widths.shared),
                correction=take.array_if(
                    block.score == "sigmoid",
                    f"{at}.mlp.gate.e_score_correction_bias",
                    (widths.experts,),
                ),
            )
        else:
            feed_forward = dense_weights(take, f"{at}.mlp", d, widths.dense)
        return LayerWeights(
            mixer_norm=take.array(f"{at}.input_layernorm.weight", (d,)),
            mixer=latent_weights(take, f"{at}.self_attn", mixer, d, widths.bias),
            feed_forward_norm=take.array(
                f"{at}.post_attention_layernorm.weight", (d,)
            ),
            feed_forward=feed_forward,
        )

    layers = [layer(i) for i in range(config.layers)]
    return decoder_weights(take, config, layers, tied=widths.tied)


def latent_weights(
    take: FolderTensors, at: str, mixer: LatentAttention, d: int, bias: bool
) -> LatentWeights:
    """The projections; that from the latent taken apart by heads, keys and values."""
    n, rank, low = mixer.heads, mixer.latent, mixer.query_latent
    wide = n * (mixer.plain_dim + mixer.rotary_dim)
    down = rank + mixer.rotary_dim
    both = mixer.plain_dim + mixer.value_dim
    up = take.rows(f"{at}.kv_b_proj.weight", (n * both, rank)).reshape(n, both, rank)
    query = f"{at}.q_b_proj.weight" if low else f"{at}.q_proj.weight"
    query_down = query_norm = None
    if low:
        query_down = take.matrices(take.rows(f"{at}.q_a_proj.weight", (low, d)))
        query_norm = take.array(f"{at}.q_a_layernorm.weight", (low,))
    return LatentWeights(
        query_down=query_down,
        query_norm=query_norm,
        query=take.matrices(take.rows(query, (wide, low or d))),
        down=take.matrices(take.rows(f"{at}.kv_a_proj_with_mqa.weight", (down, d))),
        norm=take.array(f"{at}.kv_a_layernorm.weight", (rank,)),
        up_key=take.stack(up[:, : mixer.plain_dim]),
        up_value=take.stack(up[:, mixer.plain_dim :]),
        output=take.matrices(
            take.rows(f"{at}.o_proj.weight", (d, n * mixer.value_dim))
        ),
        query_down_bias=take.array_if(bias and low > 0, f"{at}.q_a_proj.bias", (low,)),
        down_bias=take.array_if(bias, f"{at}.kv_a_proj_with_mqa.bias", (down,)),
        output_bias=take.array_if(bias, f"{at}.o_proj.bias", (d,)),
    )
